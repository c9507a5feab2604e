"""The form of the output on the command line: --json-schema, --regex, --grammar."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import forerun.api.load
from forerun.cli.generate import chat, generate
from forerun.cli.options import SamplingOptions
from tests.support.ggufs import small, write
from tests.support.toys import refuses

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

SCHEMA = {"enum": ["low", "lower"]}
LARK = 'start: "the" " low"+\n'


def asked_form(**options: Any) -> Any:
    return SamplingOptions(**options).params(8).response_format


def test_forms_are_what_the_api_takes(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text(LARK)
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert (
        asked_form(json_schema=str(schema)) == asked_form(json_schema=json.dumps(SCHEMA)) == wanted
    )
    assert asked_form(regex="a|b") == {"type": "regex", "regex": "a|b"}
    assert asked_form(grammar=grammar) == {"type": "grammar", "grammar": LARK}
    assert asked_form() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": "{}", "regex": "x"}, "--json-schema and --regex exclude each other"),
        ({"json_schema": "{"}, "--json-schema '{' is not JSON: "),
        (
            {"json_schema": "[1]"},
            "response_format.json_schema must be {'schema': a JSON schema}, not a list",
        ),
        ({"json_schema": '{"a": NaN}'}, "response_format.json_schema.schema is no JSON: "),
        ({"json_schema": "[" * 100_000}, "--json-schema '[[[["),
        ({"json_schema": "nowhere.json"}, "cannot read nowhere.json: No such file"),
        ({"json_schema": ""}, "--json-schema '' is not JSON: Expecting value"),
        ({"regex": ""}, "response_format.regex must be a text that is not empty"),
        (
            {"regex": "x" * 70_000},
            "response_format.regex has 70000 characters; at most 65536 are allowed",
        ),
        ({"grammar": Path("nowhere")}, "cannot read nowhere: No such file"),
    ],
)
def test_mistakes_are_one_line(options: Any, message: str) -> None:
    refuses(f"^{re.escape(message)}", asked_form, **options)


def test_output_follows_them(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "g.lark").write_text(LARK)
    file = str(write(tmp_path / "model.gguf", small(max_position_embeddings=256)))
    generate("x = ", regex="[0-9]{3}", max_new_tokens=12)
    assert re.fullmatch(r"[0-9]{3}\n", capsys.readouterr().out)
    generate("hello", target=file, grammar=tmp_path / "g.lark", max_new_tokens=12, method="suffix")
    assert re.fullmatch(r"the( low)+\n|the( low)* ?(l|lo)?\n", capsys.readouterr().out)
    chat("hello", target=file, json_schema=json.dumps(SCHEMA), as_json=True, method="ar")
    assert json.loads(json.loads(capsys.readouterr().out)["text"]) in SCHEMA["enum"]


def test_bad_forms_are_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forerun.api.load, "load", lambda *_, **__: pytest.fail("loaded"))
    for options, message in (
        ({"regex": "("}, r"^cannot use response_format.regex: .*unclosed group"),
        ({"json_schema": '{"type": "color"}'}, "^cannot use response_format.json_schema: "),
        ({"json_schema": '{"enum": []}'}, "^cannot use response_format.json_schema: "),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos cannot be given with response_format"),
    ):
        refuses(message, generate, "x", **options)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(forerun.api.load, "load", lambda *_, **__: pytest.fail("loaded"))
    refuses(
        r"^response_format needs the package llguidance: pip install '\.\[",
        generate,
        "x",
        regex="x",
    )
