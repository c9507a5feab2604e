"""The form of the output: from options of the command line to `response_format`. Needs no torch."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.files import read_text
from forerun.sampling.params import SamplingParams


def asked_form(json_schema: str | None, regex: str | None, grammar: Path | None) -> dict[str, Any] | None:
    """Return the form that these options ask for; None for any text.

    Raises ValueError for more than one of them, a file that cannot be read, a form that is none, and if the package
    that keeps output to a form is missing.
    """
    asked = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = {kind: value for kind, value in asked.items() if value is not None}
    options = [f"--{kind.replace('_', '-')}" for kind in given]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(options)}: one form at a time")
    for kind, value in given.items():
        content: Any = value
        if kind == "json_schema":
            content = {"name": "answer", "schema": _schema(str(value))}
        elif kind == "grammar":
            content = read_text(Path(value).expanduser())
        form = {"type": kind, kind: content}
        try:
            SamplingParams(response_format=form)
        except ValueError as error:
            raise _by_options(error) from None
        if find_spec("llguidance") is None:
            raise ValueError(f"{options[0]} needs the package llguidance: pip install 'forerun[grammar]'")
        return form
    return None


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
        raise _by_options(error) from None


def _schema(text: str) -> Any:
    """Parse a schema that is given as such or in a file."""
    is_file = text.strip() not in ("", "true", "false") and text.lstrip()[0] not in '{["'
    source = f"--json-schema: '{text}'" if is_file else "--json-schema: what is given"
    try:
        found = json.loads(read_text(Path(text).expanduser()) if is_file else text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(found, dict | bool):
        raise ValueError(f"{source} is no JSON schema, which is an object, true or false")
    return found


def _by_options(error: ValueError) -> ValueError:
    """Return the error with the names of options instead of those of fields."""

    def option(field: re.Match[str]) -> str:
        return ("the schema of " if field[2] else "") + f"--{field[1].replace('_', '-')}"

    return ValueError(re.sub(r"response_format\.(\w+)(\.schema)?", option, str(error)))
