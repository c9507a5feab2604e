"""The server before its model is loaded, at its end, and with readers that misbehave.

Nothing that a client may send leads to a 5xx, or to an answer that /openapi.json does not promise.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import httpx
import pytest

from forerun.server import answers, protocol
from forerun.server.app import STATIC, Settings, create_app
from forerun.server.errors import ApiError
from forerun.server.protocol import Protocol
from forerun.server.worker import Worker
from tests.support.local import LOCAL
from tests.support.serving import NAME, held, live, make_decoder, make_filler, post

CASES = 500  # at least
OPTIONS = (
    "-m schemathesis.cli run --seed 1 --generation-deterministic --no-shrink "
    "--continue-on-failure --exclude-checks positive_data_acceptance --workers 1 "
    "--request-timeout 60 --warnings off --no-color"
)
ALL_KINDS = "--phases examples,coverage,fuzzing --max-examples 15"
VALID_ONES = "--phases fuzzing --mode positive --max-examples 15 --include-method POST"
WORDS = {"type": "string", "pattern": "^[a-z]{1,8}$"}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"const": "user"}, "content": WORDS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
LIMIT = {"type": "integer", "minimum": 1, "maximum": 9}
# What is sent in place of anything that the schema allows.
CERTAIN = {
    "model": {"const": NAME},
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 1},
    "prompt": WORDS,
    "input": WORDS,
    "max_tokens": LIMIT,
    "max_output_tokens": LIMIT,
}
SCALARS = ("boolean", "integer", "number", "null")
ANSWERING = {
    f"POST {path}"
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/api/chat",
        "/api/generate",
        "/api/embed",
    )
}


def inside(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def test_nothing_is_answered_before_the_model_is_there_and_while_it_goes() -> None:
    go = threading.Event()

    def make() -> Any:
        assert go.wait(120)
        return make_decoder()

    async def ask() -> None:
        worker = Worker(make)
        app = create_app(worker, Settings(NAME))
        async with app.router.lifespan_context(app), inside(app) as client:
            for code in ("loading", "shutting_down"):
                for response in (
                    await client.get("/health"),
                    await client.get("/v1/models"),
                    await client.post("/v1/completions", json={"prompt": "a"}),
                ):
                    assert response.status_code == 503 and response.headers["Retry-After"] == "5"
                    assert response.json()["error"]["code"] == code
                assert (await client.get("/metrics")).status_code == 200
                go.set()
                await asyncio.wait_for(worker.ready.wait(), 120)
                assert (await client.get("/health")).status_code == 200 or code != "loading"
                app.state.service.draining = True

    asyncio.run(ask())


@pytest.mark.parametrize("message", ["no such model", "the device is gone"])
def test_a_model_that_cannot_be_used(message: str) -> None:
    def make() -> Any:
        if "model" in message:
            raise ValueError(message)
        decoder = make_decoder()
        decoder.target.forward = Mock(side_effect=RuntimeError(message))  # type: ignore[method-assign]
        return decoder

    async def ask() -> None:
        worker = Worker(make)
        ended = asyncio.Event()
        worker.on_failure = ended.set
        worker.start()
        await asyncio.wait_for(ended.wait(), 60)
        assert str(worker.failed) == message and not worker.ready.is_set()
        with pytest.raises(ApiError):
            worker.engine  # noqa: B018
        await worker.stop()

    asyncio.run(ask())


@pytest.mark.slow
def test_a_silent_answer_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE", 0.05)
    with live(idle=1) as server:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        with socket.create_connection(address) as idle:
            idle.settimeout(60)
            assert idle.recv(1) == b""  # closed without a request
        with socket.create_connection(address) as trickling:
            trickling.settimeout(60)
            trickling.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Endless: ")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:  # closed although something comes again and again
                    trickling.sendall(b"x")
                    time.sleep(0.05)
        body = {"prompt": "a", "max_tokens": 3, "stream": True, "echo": True, "temperature": 0}
        with (
            held(server.worker.engine) as go,
            httpx.stream(
                "POST", server.url + "/v1/completions", json=body, timeout=120, **LOCAL
            ) as response,
        ):
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            go.set()
            rest = [line for line in lines if line and line != ": keep-alive"]
        assert '"text":"a' in rest[0] and rest[-1] == "data: [DONE]"


def test_a_reader_that_has_stopped_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALLED_SECONDS", 0.05)

    async def stall(resumes: bool) -> bool:
        connection = Protocol.__new__(Protocol)
        transport = MagicMock()
        connection.loop = asyncio.get_running_loop()
        connection.transport = transport
        connection.flow = MagicMock()
        connection.pause_writing()
        if resumes:
            connection.resume_writing()
        await asyncio.sleep(0.2)
        return bool(transport.abort.called)

    assert not asyncio.run(stall(True)) and asyncio.run(stall(False))


@pytest.mark.skipif(not (STATIC / "index.html").is_file(), reason="the page is not there")
def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async def ask() -> None:
        async with inside(
            create_app(Worker(make_decoder), Settings(NAME, api_key="secret"))
        ) as client:
            for path in ("/", "/page.js", "/page.css", "/vendor/purify.es.mjs"):
                response = await client.get(path)
                assert response.status_code == 200
                policy = response.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; ")
                assert policy.endswith(
                    "require-trusted-types-for 'script'; trusted-types dompurify"
                )
            assert (await client.get("/../app.py")).status_code == 401

    asyncio.run(ask())


def test_without_its_thread_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait get the error."""
    failed = threading.Event()
    with live() as server:
        server.worker.on_failure = failed.set
        monkeypatch.setattr(server.worker.engine, "advance", Mock(side_effect=SystemExit))
        answer = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 500 and "SystemExit" in answer.json()["error"]["message"]
        assert failed.wait(30) and isinstance(server.worker.failed, SystemExit)


def schemathesis(url: str, schema: dict[str, Any], options: str, folder: Path) -> dict[str, Any]:
    """The report of a run without failures. It makes the same cases each time."""
    (folder / "openapi.json").write_text(json.dumps(schema))
    command = [sys.executable, *OPTIONS.split(), *options.split(), "openapi.json", "--url", url]
    env = os.environ | {"NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
    command += ["--report-json-path", "report.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return dict(json.loads((folder / "report.json").read_text()))


def certain(body: dict[str, Any]) -> dict[str, Any]:
    """A body's schema with texts, names and limits that the server takes, and plain fields."""
    required = {*body.get("required", []), *(CERTAIN.keys() & body["properties"].keys())}
    fields = {}
    for name, field in body["properties"].items():
        kinds = {kind.get("type") for kind in field.get("anyOf", [field])}
        if name in required or kinds.issubset(SCALARS):
            fields[name] = CERTAIN.get(name, field)
    return body | {
        "properties": fields,
        "required": sorted(required),
        "additionalProperties": False,
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_nothing_that_a_client_sends_breaks_it(tmp_path: Path) -> None:
    """Schemathesis finds no failure, neither in refusals nor in answers.

    It also sends what the schema allows and the server refuses, for example token ids that do not
    exist. That is no failure. Few of its bodies are answered, so more are made of certain values.
    """
    # A short context, so that no answer takes long.
    with live(lambda: make_filler(context=48)) as server:
        schema = httpx.get(f"{server.url}/openapi.json", **LOCAL).json()
        report = schemathesis(server.url, schema, ALL_KINDS, tmp_path)
        assert report["test_cases"]["generated"] >= CASES
        bodies = schema["components"]["schemas"]
        for name, body in bodies.items():
            if "model" in body.get("properties", {}):
                bodies[name] = certain(body)
        rates = schemathesis(server.url, schema, VALID_ONES, tmp_path)["valid_rates"]
        assert not server.rows
    for operation in ANSWERING:
        counts = rates[operation]["fuzzing"]
        assert counts["accepted"] >= 5, (operation, counts)
