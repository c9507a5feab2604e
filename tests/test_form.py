"""The form of the output on the command line: --json-schema, --regex, --grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ggufs import small, write

import forerun.api.load
from forerun.cli import form
from forerun.cli.form import asked_form
from forerun.cli.generate import chat, generate

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

SCHEMA = {"enum": ["low", "lower"]}
LARK = 'start: "the" " low"+\n'


def test_forms_are_what_the_api_takes(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text(LARK)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert asked_form(str(schema), None, None) == asked_form(json.dumps(SCHEMA), None, None) == wanted
    assert asked_form(None, "a|b", None) == {"type": "regex", "regex": "a|b"}
    assert asked_form(None, None, grammar) == {"type": "grammar", "grammar": LARK}
    assert asked_form(None, None, None) is None
    assert (asked_form(" true", None, None) or {})["json_schema"]["schema"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{}", "x", None), "--json-schema and --regex: one form at a time"),
        (("{", None, None), "--json-schema: what is given is not JSON: "),
        (("[1]", None, None), "--json-schema: what is given is no JSON schema, which is an object, true or false"),
        (('{"a": NaN}', None, None), "the schema of --json-schema is no JSON: "),
        (("[" * 100_000, None, None), "--json-schema: what is given is not JSON: maximum recursion depth"),
        (("nowhere.json", None, None), "cannot read nowhere.json: No such file"),
        (("", None, None), "--json-schema: what is given is not JSON: Expecting value"),
        ((None, "", None), "--regex must be a text that is not empty"),
        ((None, "x" * 70_000, None), "--regex has 70000 characters; at most 65536 are allowed"),
        ((None, None, Path("nowhere")), "cannot read nowhere: No such file"),
    ],
)
def test_mistakes_are_one_line(options: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        asked_form(*options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


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
        ({"regex": "("}, r"^cannot use --regex: .*unclosed group"),
        ({"json_schema": '{"type": "color"}'}, "^cannot use --json-schema: "),
        ({"json_schema": '{"enum": []}'}, "^cannot use --json-schema: "),
        ({"regex": "a", "ignore_eos": True}, "--ignore-eos cannot stand beside a form of the output"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            generate("x", **options)
        assert "\n" not in str(error.value)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "find_spec", lambda name: None)
    for name, text in (("json_schema", "{}"), ("regex", "x"), ("grammar", Path(__file__))):
        wanted = f"--{name.replace('_', '-')} needs the package llguidance: pip install 'forerun[grammar]'"
        with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
            generate("x", **{name: text})
