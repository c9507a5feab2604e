"""A real process: how `forerun serve` starts, drains, and ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from forerun import cli
from tests.support import commands
from tests.support.local import LOCAL
from tests.support.processes import health, started, started_apart, until_said
from tests.support.serving import models, until
from tests.support.toys import save_models


@pytest.mark.slow
@pytest.mark.versions
def test_a_server_from_its_start_to_its_end(tmp_path: Path) -> None:
    folder = save_models(tmp_path, target=models()[0]) / "target"
    options = ("--max-rows", "4", "--model-name", "named", "--drain", "1000")
    with started_apart("--target", str(folder), "--method", "suffix", *options) as (process, url):
        seen = set()
        until(lambda: seen.add(health(url)) or 200 in seen, 250)
        assert httpx.get(url + "/v1/models", **LOCAL).json()["data"][0]["id"] == "named"
        other = commands.run("serve", "--port", url.rpartition(":")[2], "--target", str(folder))
        assert other.returncode == 2 and "cannot listen on 127.0.0.1" in other.stderr
        assert other.stderr.count("\n") == 1
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_text('{"model_type": "llama"}')
        other = commands.run("serve", "--port", "0", "--target", str(broken), "--method", "ar")
        assert other.returncode == 2 and "cannot load" in other.stderr.splitlines()[-1]
        # An answer that is under way is given to its end while others are refused.
        body = {
            "prompt": "the cat",
            "max_tokens": 300,
            "ignore_eos": True,
            "forerun_method": "ar",
            "stream": True,
        }
        lines: list[str] = []
        began = threading.Event()

        def read() -> None:
            with httpx.stream(
                "POST", url + "/v1/completions", json=body, timeout=200, **LOCAL
            ) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    began.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(100)
        os.kill(process.pid, signal.SIGTERM)
        statuses = set()
        while reader.is_alive():
            statuses.add(health(url))
            reader.join(0.1)
        assert [line for line in lines if line][
            -1
        ] == "data: [DONE]" and '"finish_reason":"length"' in "".join(lines)
        assert statuses <= {200, 503, None}
        assert process.wait(100) == 0
        assert process.stderr is not None
        logged = process.stderr.read()
        first, listening, *_ = messages = [
            entry.partition(" INFO ")[2] for entry in logged.splitlines()
        ]
        assert first == f"loading {folder} ..." and listening.startswith(url)
        (ready,) = [message for message in messages if message.startswith("ready in ")]
        assert ready.endswith(url)
        (line,) = [message for message in messages if " tokens=" in message]
        assert (
            line.endswith(" reason='length'") and " tokens=300 " in line and "the cat" not in logged
        )


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """The reader sees that the stream broke off, and the port is free at once.

    The next server is terminated, and ends what runs when its drain takes too long.
    """
    body = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 128}
    options = ("--target", "embedded", "--max-rows", "1")
    lines = list[str]()
    with started(*options, folder=tmp_path) as (process, url):
        until(lambda: health(url) == 200, 250)
        there = sorted(tmp_path.iterdir())
        with (
            httpx.stream(
                "POST", url + "/v1/completions", json=body, timeout=100, **LOCAL
            ) as response,
            pytest.raises(httpx.RemoteProtocolError),  # no chunk of length 0, which would be an end
        ):
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    os.kill(process.pid, signal.SIGKILL)
        assert lines[0].startswith("data: {") and "data: [DONE]" not in lines
        assert process.wait(60) == -signal.SIGKILL
        with started(
            *options, "--drain", "0", port=int(url.rpartition(":")[2]), folder=tmp_path
        ) as (other, again):
            assert again == url
            until(lambda: other.poll() is not None or health(url) == 200, 250)
            asked = body | {"stream": False, "n": 1, "max_tokens": 5}
            found = httpx.post(url + "/v1/completions", json=asked, timeout=100, **LOCAL)
            assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 5
            assert sorted(tmp_path.iterdir()) == there == []
            with httpx.stream(
                "POST", url + "/v1/completions", json=body, timeout=100, **LOCAL
            ) as response:
                rest = response.iter_lines()
                next(rest)
                os.kill(other.pid, signal.SIGTERM)
                *_, error, done = [line for line in rest if line]
            assert (
                json.loads(error[6:])["error"]["code"] == "shutting_down" and done == "data: [DONE]"
            )
            assert other.wait(100) == 0


# A server that stays for ever where it calls a function.
STAYING = """
import sys
import threading
from forerun.server import {module}
from forerun.cli import main

def stay(*args):
    print("IT STAYS", file=sys.stderr, flush=True)
    threading.Event().wait()

{module}.{name} = stay
main()
"""
ONE = ("--target", "embedded")
SEVERAL = ("--model", "one=embedded", "--model", "other=embedded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "sent", "options"),
    [
        ("listening", "listen", signal.SIGTERM, ONE),
        ("worker", "loaded", signal.SIGTERM, ONE),
        ("worker", "loaded", signal.SIGINT, SEVERAL),
    ],
)
def test_a_server_that_is_not_ready_ends_with_status_0(
    module: str, name: str, sent: signal.Signals, options: tuple[str, ...]
) -> None:
    with started(*options, program=STAYING.format(module=module, name=name)) as (process, _):
        until_said(process, "IT STAYS")
        process.send_signal(sent)
        assert process.wait(100) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "sent"), [(SEVERAL[:2], signal.SIGTERM), (ONE, signal.SIGINT)])
def test_a_second_signal_ends_running_answers_with_one_line(
    options: tuple[str, ...], sent: signal.Signals
) -> None:
    body = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 32}
    limits = ("--max-rows", "1", "--drain", "1000")
    with started(*options, *limits) as (process, url), ExitStack() as answers:
        until_said(process, "ready in")
        for _ in range(3):
            answers.enter_context(
                httpx.stream(
                    "POST", url + "/v1/completions", json=body, timeout=100, trust_env=False
                )
            )
        process.send_signal(sent)
        until_said(process, "shutting down")
        process.send_signal(sent)
        assert process.wait(100) == 0
        (line,) = process.stderr.read().splitlines()
        assert line.endswith(" WARNING ended at once by a second signal")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "nonsense"], "nonsense"),
        (["--log-level", "loud"], "loud"),
        (["--drain", "-1"], "--drain"),
        (["--max-seconds", "0"], "--max-seconds"),
        (["--api-key", "two words "], "--api-key"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--replicas", "2"], "--replicas is for --ray"),
        (["--ray", ""], "--ray takes local, auto or HOST:PORT"),
        ([], "pip install '.[serve]'"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "forerun.cli.options.find_spec", lambda name: options or name != "uvicorn" or None
    )
    monkeypatch.setattr(sys, "argv", ["forerun", "serve", "--target", "embedded", *options])
    assert cli._run() == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
