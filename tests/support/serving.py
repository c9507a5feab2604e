"""A server in a thread of the test's own process, with a tiny model."""

import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest
import uvicorn
from tokenizers import AddedToken

from forerun.api.decoder import Decoder
from forerun.engine.engine import Engine
from forerun.server.app import Service, Settings, create_app
from forerun.server.listening import listen
from forerun.server.protocol import Protocol
from forerun.server.worker import Worker
from tests.support.local import LOCAL
from tests.support.toys import noisy_copy, tiny, tiny_tokenizer

NAME = "tiny"
PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
# The last is not special.
FILLERS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"]
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def models() -> tuple[Any, Any]:
    target = tiny("llama", vocab=300, context=512)
    return target, noisy_copy(target, 0.02)


def make_decoder(**options: Any) -> Decoder:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    target, draft = models()
    return Decoder(target, tokenizer, draft, guard=False, **options)


def make_filler(context: int = 512) -> Decoder:
    """With the tokens of Qwen2.5-Coder to fill in the middle."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(
        [AddedToken(name, special=name != FILLERS[-1], normalized=False) for name in FILLERS]
    )
    target = tiny("llama", vocab=len(tokenizer), context=context)
    return Decoder(target, tokenizer, noisy_copy(target, 0.02), guard=False)


class Live:
    def __init__(self, url: str, worker: Worker, service: Service) -> None:
        self.url = url
        self.worker = worker
        self.service = service

    @property
    def rows(self) -> int:
        engine = self.worker.engine
        return len(engine.running) + len(engine.waiting) + engine.prefilling


@contextmanager
def running(app: Any, **options: Any) -> Iterator[str]:
    listener = listen("127.0.0.1", 0)
    options |= {"log_config": None, "access_log": False, "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(app, http=Protocol, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def live(make: Any = make_decoder, idle: int = 15, **settings: Any) -> Iterator[Live]:
    worker = Worker(make)
    app = create_app(worker, Settings(**{"model": NAME, "max_seconds": 120} | settings))
    with running(app, timeout_keep_alive=idle) as url:
        until(lambda: worker.ready.is_set() or worker.failed, 120)
        yield Live(url, worker, app.state.service)


def served(make: Any) -> Any:
    """A fixture: a server with the decoder that `make` makes, for the tests of a module."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[Live]:
        with live(make) as found:
            yield found

    return server


def client_of(server: Live) -> Any:
    """OpenAI's client of a server, which closes its connections at the end of a `with`."""
    http = httpx.Client(**LOCAL)
    import openai  # late, as not every environment of CI has it

    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0
    )


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """Let an engine make no step until the event is set."""
    go = threading.Event()
    advance = engine.advance

    def wait() -> None:
        assert go.wait(120)
        advance()

    engine.advance = wait  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        engine.advance = advance  # type: ignore[method-assign]


def get(server: Live, path: str, **options: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=120, **LOCAL, **options)


def post(server: Live, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120, **LOCAL, **options)


def leave(server: Live, path: str, body: Any, has_come: Callable[[], Any]) -> None:
    """Post a body, and close the connection without its answer as soon as `has_come` says so."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
        until(has_come)


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, which has the one shape and a short text."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 1000
    (error,) = response.json().values()
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    return error


def sent(server: Live, path: str, body: Any) -> httpx.Response:
    """Post JSON that httpx itself would refuse to write, or bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60, **LOCAL)


def figures(server: Live) -> dict[str, float]:
    lines = [
        line.rpartition(" ")
        for line in get(server, "/metrics").text.splitlines()
        if not line.startswith("#")
    ]
    return {name: float(value) for name, _, value in lines}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; its end is checked."""
    *lines, done = [
        line.removeprefix("data: ")
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def answered(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    return "".join(
        each["choices"][0]["text"]
        for each in (events(response) if is_stream else [response.json()])
    )
