"""The form of the output: from options of the command line to `response_format`. Needs no torch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.files import read_text
from forerun.sampling.params import SamplingParams

KINDS = {"json-schema": "json_schema", "regex": "regex", "grammar": "grammar"}  # names of options and of fields


def asked_form(json_schema: str | None, regex: str | None, grammar: Path | None) -> dict[str, Any] | None:
    """Return the form that these options ask for; None for any text.

    Raises ValueError for more than one of them, a file that cannot be read, and a form that is none.
    """
    asked = {"json-schema": json_schema, "regex": regex, "grammar": None if grammar is None else str(grammar)}
    given = {kind: text for kind, text in asked.items() if text is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(f'--{kind}' for kind in given)}: one form at a time")
    return next((form_of_kind(kind, text) for kind, text in given.items()), None)


def form_of_kind(kind: str, text: str) -> dict[str, Any]:
    """Return a form of one of `KINDS`. Its text is a schema or a file with one, an expression, or a grammar's file.

    Raises ValueError as `asked_form` does.
    """
    content: Any = text
    if kind == "json-schema":
        content = {"name": "answer", "schema": _schema(text)}
    elif kind == "grammar":
        content = read_text(Path(text).expanduser())
    form = {"type": KINDS[kind], KINDS[kind]: content}
    try:
        SamplingParams(response_format=form)
    except ValueError as error:
        raise ValueError(_named(str(error))) from None
    return form


def check_extra(form: dict[str, Any] | None) -> None:
    """Raise ValueError if the package that keeps output to a form is missing."""
    if form is not None and find_spec("llguidance") is None:
        option = form["type"].replace("_", "-")
        raise ValueError(f"--{option} needs the package llguidance: pip install 'forerun[grammar]'")


def check_form(form: Any, tokenizer: Any) -> None:
    """Raise ValueError for a form that llguidance cannot read, or that allows no text in the tokenizer's tokens.

    No weights are needed for that. A tokenizer that names no end token is left to the decoder: the model may name one.
    """
    if form is None:
        return
    from forerun.sampling.grammar import compiled, end_of
    from forerun.sampling.response_format import form_of
    from forerun.text.chat import turn_ends

    ends, asked = turn_ends(tokenizer) | end_of(tokenizer), form_of(form)
    if not ends or asked is None:
        return
    try:
        compiled(asked, tokenizer, ends)
    except ValueError as error:
        raise ValueError(_named(str(error))) from None


def _schema(text: str) -> Any:
    """Parse a schema that is given as such or in a file."""
    if not text.strip():
        raise ValueError("--json-schema takes a file or a JSON schema, not nothing")
    is_file = not text.lstrip().startswith(("{", "[", '"')) and text.strip() not in ("true", "false")
    source = f"'{text}'" if is_file else "what is given"
    try:
        found = json.loads(read_text(Path(text).expanduser()) if is_file else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--json-schema: {source} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"--json-schema: {source} is nested too deeply") from None
    if not isinstance(found, dict | bool):
        raise ValueError(f"--json-schema: {source} is no JSON schema, which is an object, true or false")
    return found


def _named(message: str) -> str:
    """Replace the names of fields by those of options."""
    for kind, field in KINDS.items():
        message = message.replace(f"response_format.{field}.schema", f"the schema of --{kind}")
        message = message.replace(f"response_format.{field}", f"--{kind}")
    return message
