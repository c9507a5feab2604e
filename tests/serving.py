"""A server in a thread of the test's own process, with a tiny model."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import uvicorn
from toys import noisy_copy, tiny, tiny_tokenizer

from forerun.api.decoder import Decoder
from forerun.server.app import Service, Settings, create_app
from forerun.server.listening import listen
from forerun.server.run import Protocol
from forerun.server.worker import Worker

NAME = "tiny"
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


class Live:
    """A server that runs: its address, and what is inside it."""

    def __init__(self, url: str, worker: Worker, service: Service) -> None:
        self.url, self.worker, self.service = url, worker, service

    @property
    def rows(self) -> int:
        engine = self.worker.engine
        return len(engine.running) + len(engine.waiting) + engine.prefilling


@contextmanager
def live(make: Any = make_decoder, idle: int = 15, **settings: Any) -> Iterator[Live]:
    """Starts a server on a free port, and ends it."""
    found, box, up = listen("127.0.0.1", 0), {}, threading.Event()
    settings = {"model": NAME, "max_seconds": 120} | settings

    async def main() -> None:
        worker = Worker(make)
        app = create_app(worker, Settings(**settings))
        config = uvicorn.Config(
            app,
            http=Protocol,
            log_config=None,
            access_log=False,
            timeout_keep_alive=idle,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        box.update(server=server, live=Live(f"http://127.0.0.1:{found.getsockname()[1]}", worker, app.state.service))
        task = asyncio.create_task(server.serve(sockets=[found]))
        while not (worker.ready.is_set() or worker.failed or task.done()):
            await asyncio.sleep(0.01)
        up.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert up.wait(120)
    try:
        yield box["live"]
    finally:
        box["server"].should_exit = True
        thread.join(60)


def post(server: Live, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120, trust_env=False, **options)
