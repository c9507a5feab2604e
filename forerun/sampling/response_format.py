"""The form of output, as OpenAI's `response_format` describes it. It needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TYPES = ("text", "json_object", "json_schema", "regex", "grammar")
# What may stand beside the type, because a key that nobody reads might be a wish.
_KEYS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", "name", "description", "strict"),
    "regex": ("regex",),
    "grammar": ("grammar",),
}
_SCHEMA_KEYS = ("schema", "name", "description", "strict")
MAX_CHARACTERS = 2**16  # of a schema, a regular expression or a grammar


def form_of(response_format: Any) -> tuple[str, str] | None:
    """Return the kind ("json_schema", "regex" or "grammar") and the text of a response format.

    Return None if any text will do.

    Args:
        response_format: None or a dict: {"type": "text"}, {"type": "json_object"}, {"type":
            "regex", "regex": ...}, {"type": "grammar", "grammar": ...} in llguidance's Lark or
            llama.cpp's GBNF, or {"type": "json_schema", "json_schema": {"schema": ...}} with a JSON
            schema as a dict. Names, descriptions and `strict` beside the schema change nothing. As
            in llama.cpp, `schema` may also stand beside the type, also beside "json_object".

    Raises:
        ValueError: another type, form or key, a schema that is not JSON, or a text of more than
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
    _check_keys(response_format, _KEYS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object" and response_format.get("schema") is None:
        return "json_schema", '{"type": "object"}'
    if kind in ("json_object", "json_schema"):
        text: Any = _schema(_schema_holder(response_format))
        kind = "json_schema"
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


def _check_keys(given: Mapping[str, Any], allowed: Sequence[str], name: str) -> None:
    """Raise ValueError for a key that is not allowed, unless it is null and so absent."""
    for key, value in given.items():
        if key not in ("type", *allowed) and value is not None:
            keys = ", ".join(allowed) or "none beside its type"
            raise ValueError(f"{name} has the unknown key {_short(key)}; it may have {keys}")


def _schema_holder(given: Mapping[str, Any]) -> Any:
    """Return what holds the schema: `json_schema`, or the format itself."""
    inner = given.get("json_schema")
    if given.get("schema") is None:
        if isinstance(inner, Mapping):
            _check_keys(inner, _SCHEMA_KEYS, "response_format.json_schema")
        return inner
    if inner is not None:
        raise ValueError("response_format has two schemas: give schema or json_schema")
    return given


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
