"""GET /props and GET /slots, as llama.cpp's server answers them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forerun import __version__
from forerun.engine.engine import Engine
from tests.support.serving import (
    CHAT,
    HELLO,
    NAME,
    PLAIN,
    TEMPLATE,
    Live,
    get,
    live,
    make_decoder,
    post,
    refusal,
    until,
)


@contextmanager
def by_turns(engine: Engine) -> Iterator[Callable[[], None]]:
    """Let an engine advance once with each call of what this yields, and freely at the end."""
    asked = threading.Semaphore(0)
    granted = threading.Semaphore(0)
    advance = engine.advance

    def advance_by_turns() -> None:
        asked.release()
        assert granted.acquire(timeout=120)
        advance()

    def turn() -> None:
        assert asked.acquire(timeout=120)  # the engine waits for its turn
        granted.release()
        assert asked.acquire(timeout=120)  # and again, so that nothing changes now
        asked.release()

    engine.advance = advance_by_turns  # type: ignore[method-assign]
    try:
        yield turn
    finally:
        engine.advance = advance  # type: ignore[method-assign]
        granted.release()


def test_props_are_those_of_the_model(server: Live) -> None:
    props = get(server, "/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512 and props["total_slots"] == 64
    assert props["model_alias"] == NAME and props["chat_template"] == TEMPLATE
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"] == f"forerun {__version__}"
    tokenizer = server.worker.decoder.tokenizer  # type: ignore[union-attr]
    assert props["eos_token"] == (tokenizer.eos_token or "")
    # A request with these parameters is one without any.
    params = settings["params"]
    plain = {"messages": HELLO, "seed": 5, "max_tokens": 20}
    wanted = post(server, CHAT, plain).json()
    told = {name: params[name] for name in params if name not in ("n_predict", *plain)}
    found = post(server, CHAT, plain | told).json()
    assert found["choices"][0]["message"] == wanted["choices"][0]["message"]
    assert params["n_predict"] == params["max_tokens"] == 1024 and params["seed"] == -1


def test_slots_are_the_engines_rows() -> None:
    """They tell how far their requests are, and nothing of their texts."""
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    bodies = [body | {"seed": 9}, body | {"forerun_method": "ar"}]
    with live(lambda: make_decoder(max_rows=3)) as server:
        engine = server.worker.engine
        idle = get(server, "/slots").json()
        assert [slot["id"] for slot in idle] == [0, 1, 2]
        assert all(slot["n_ctx"] == 512 and slot["speculative"] for slot in idle)
        assert not any(slot["is_processing"] for slot in idle)
        with by_turns(engine) as turn:
            threads = []
            for number, each in enumerate(bodies):
                threads.append(threading.Thread(target=post, args=(server, PLAIN, each)))
                threads[-1].start()
                until(lambda count=number: server.rows > count)  # so that they run in this order
            while len(engine.running) < 2:
                turn()
            slots = get(server, "/slots").json()
            outputs = [len(seq.tokens) - 3 for seq in engine.running]
        for thread in threads:
            thread.join(120)
        assert get(server, "/slots").json() == idle
    assert [slot["is_processing"] for slot in slots] == [True, True, False]
    assert [slot["speculative"] for slot in slots] == [True, False, True]
    for slot, decoded in zip(slots, outputs, strict=False):
        assert slot["n_prompt_tokens"] == 3 and slot["params"]["n_predict"] == 200
        (progress,) = slot["next_token"]
        assert progress["n_decoded"] == decoded > 0
        assert progress["n_remain"] == 200 - decoded and progress["has_next_token"]
        assert not {"prompt", "generated"} & slot.keys()
    assert [slot["params"]["seed"] for slot in slots[:2]] == [9, -1]
    assert slots[0]["id_task"] != slots[1]["id_task"]


def test_a_full_engine_may_be_an_error() -> None:
    with live(lambda: make_decoder(max_rows=1)) as server:
        engine = server.worker.engine
        asked = "/slots?fail_on_no_slot=1"
        assert get(server, asked).status_code == 200
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
        thread = threading.Thread(target=post, args=(server, PLAIN, body))
        with by_turns(engine) as turn:
            thread.start()
            until(lambda: server.rows)
            while not engine.running:
                turn()
            assert refusal(get(server, asked), 503)["code"] == "no_slot"
            (slot,) = get(server, "/slots").json()
            assert slot["is_processing"]
        thread.join(120)


def test_they_need_the_model_and_the_key(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "draining", True)
    for path in ("/props", "/slots"):
        refusal(get(server, path), 503)
    with live(api_key="secret") as locked:
        for path in ("/props", "/slots"):
            refusal(get(locked, path), 401)
