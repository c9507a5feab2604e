"""Clients of others, in environments of their own, are served by a tiny model that plays along.

`.ci/run` makes the environments that install quickly; CLIENTS names another folder of them.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.api.decoder import Decoder
from tests.clients import catalogue, matrix
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.matrix import Report, Try
from tests.support import tools
from tests.support.serving import NAME, Live, live
from tests.support.tools import scripted
from tests.support.toys import noisy_copy, tiny

FOLDER = Path(os.environ.get("CLIENTS", Path(sys.prefix) / "clients"))
CONTEXT = 8192  # the prompts of some clients have a page of JSON schema
TOKENS = 12  # of a plain answer, as in the scripts
HELLO = "Say hello."
QUICK = [client for client in CLIENTS if catalogue.environment_of(client).is_quick]


def made() -> Decoder:
    target = tiny("llama", vocab=304, context=CONTEXT)
    target.generation_config.eos_token_id = tools.END
    return tools.make_decoder(pair=(target, noisy_copy(target, 0.02)))


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(prompt: str) -> str | None:
    """What the model says where a model that has learned something is needed."""
    person = {"job": "engineer", "age": 36}
    has_weather = '"get_weather"' in prompt
    form = re.search(r'"name": "(\w*Person)"', prompt)  # a tool that stands for a form
    if "Ada is" in prompt:
        return call(form[1], person) if form else json.dumps(person)
    if "<|tool|>" in prompt:
        return "It is sunny."
    if "weather in Oslo" in prompt and has_weather:
        return call("get_weather", {"city": "Oslo"})
    return None


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch, live(made) as running:
        patch.setattr("forerun.server.parameters.requests", scripted(said))
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("client", QUICK, ids=[client.script for client in QUICK])
def test_a_client_gets_what_it_asks_for(server: Live, client: Client) -> None:
    if not catalogue.has(client, FOLDER):
        pytest.skip(f"{client.package} is not in {FOLDER}; tests/clients/catalogue.py makes it")
    report = matrix.run(client, FOLDER, server.url, NAME)
    assert report.failed == [] and report.versions[client.package]
    texts = {each.text for each in report.tries} - {None}
    answer = made().chat([{"role": "user", "content": HELLO}], max_new_tokens=TOKENS).text
    assert not texts or answer in texts


# The matrix itself.


def test_a_script_that_ends_early_has_failed() -> None:
    client = CLIENTS[0]
    lines = [{"versions": {"x": "1"}}, {"tried": "a", "passed": True, "text": None}]
    output = "a warning\n" + "\n".join(map(json.dumps, lines))
    whole = matrix.report(client, output)
    assert whole == Report(client.name, {"x": "1"}, (Try("a", True),)) and not whole.failed
    for found in (matrix.report(client, output, "ended"), matrix.report(client, "")):
        assert [each.tried for each in found.failed] == ["the script"]


def test_scripts_tell_what_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tries\n"
        "tries.run(['pytest'], {'good': lambda: tries.same('a', 'a'), 'bad': lambda: 1 / 0})\n"
    )
    client = Client("x", str(script), "python", "pytest")
    place = tmp_path / "python" / "bin"
    place.mkdir(parents=True)
    (place / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH={catalogue.SCRIPTS} exec {sys.executable} "$@"\n'
    )
    (place / "python").chmod(0o755)
    report = matrix.run(client, tmp_path, "http://127.0.0.1:9", "m")
    assert report.versions == {"pytest": pytest.__version__}
    good, bad = report.tries
    assert good == Try("good", True, "a")
    assert not bad.passed and "ZeroDivisionError" in str(bad.text)


def test_the_table_takes_the_place_of_the_old_one() -> None:
    reports = [Report("a", {"p": "1", "q": "2"}, (Try("x", True), Try("y", False, "no")))]
    lines = matrix.table(reports)
    assert lines[-1] == "| a | p 1, q 2 | x; y | y |"
    page = "# Page\n\n" + "\n".join([*lines, "| old | | | |"]) + "\n\nThe end.\n"
    assert matrix.with_table(page, lines) == page.replace("| old | | | |\n", "")
    with pytest.raises(ValueError, match="no line"):
        matrix.with_table("# Page\n", lines)


def test_the_page_has_the_results() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.with_table(page, matrix.table(matrix.saved())) == page
    assert {report.client for report in matrix.saved()} == {client.name for client in CLIENTS}


def test_installing_takes_one_environment_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "subprocess.run", lambda command, **_: commands.append([str(word) for word in command])
    )
    for environment in catalogue.ENVIRONMENTS:
        catalogue.install(environment, tmp_path)
    installed = [command for command in commands if "install" in command]
    assert [command[-1] for command in installed] == [
        environment.packages[-1] for environment in catalogue.ENVIRONMENTS
    ]
    assert all(any(str(tmp_path) in word for word in command) for command in commands)
