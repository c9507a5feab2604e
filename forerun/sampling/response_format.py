"""The form of output, as OpenAI's `response_format` describes it. It needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TYPES = ("text", "json_object", "json_schema", "regex", "grammar")
MAX_CHARACTERS = 2**16  # of a schema, a regular expression or a grammar


def form_of(response_format: Any) -> tuple[str, str] | None:
    """Return the kind ("json_schema", "regex" or "grammar") and the text of a response format.

    Return None if any text will do.

    Args:
        response_format: None or a dict: {"type": "text"}, {"type": "json_object"}, {"type":
            "regex", "regex": ...}, {"type": "grammar", "grammar": ...} in llguidance's Lark or
            llama.cpp's GBNF, or {"type": "json_schema", "json_schema": {"schema": ...}} with a JSON
            schema as a dict. Names, descriptions and `strict` beside the schema change nothing.

    Raises:
        ValueError: another type or form, a schema that is not JSON, or a text of more than
            `MAX_CHARACTERS` characters.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ValueError(
            f"response_format must be a dict with a type, not {_short(response_format)}"
        )
    kind = response_format.get("type")
    if kind not in TYPES:
        raise ValueError(
            f"response_format.type must be one of {', '.join(TYPES)}, not {_short(kind)}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_schema", '{"type": "object"}'
    if kind == "json_schema":
        text: Any = _schema(response_format.get("json_schema"))
    else:
        text = response_format.get(kind)
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"response_format.{kind} must be a text that is not empty, not {_short(text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"response_format.{kind} has half of a surrogate pair, which is no character"
            ) from None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"response_format.{kind} has {len(text)} characters; "
            f"at most {MAX_CHARACTERS} are allowed"
        )
    return str(kind), text


def _schema(given: Any) -> str:
    schema = given.get("schema") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or not isinstance(schema, Mapping | bool):
        wrong = _short(schema if isinstance(given, Mapping) else given)
        raise ValueError(
            f"response_format.json_schema must be {{'schema': a JSON schema}}, not {wrong}"
        )
    try:
        return json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise ValueError("response_format.json_schema.schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"response_format.json_schema.schema is no JSON: {str(error)[:100]}"
        ) from None


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
