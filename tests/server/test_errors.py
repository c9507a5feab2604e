"""What is refused, and with which error."""

import asyncio
import hmac
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx
import pytest

from forerun.sampling.grammar import FormError, Grammar
from forerun.server.middleware import BodyLimit
from tests.support.failures import Panic
from tests.support.local import LOCAL
from tests.support.serving import (
    CHAT,
    HELLO,
    PLAIN,
    Live,
    answered,
    events,
    figures,
    get,
    held,
    leave,
    live,
    make_decoder,
    post,
    refusal,
    sent,
    until,
)

CONTENTS = [
    None,
    "a\0",
    "\udfff",
    [{"type": "image_url", "image_url": "x"}],
    [{"type": "text", "text": "a" * 2**20}],
]
BAD: list[tuple[str, str, list[Any]]] = [  # path, field, and values that it cannot have
    (PLAIN, "max_tokens", [0, -3, 2**40, "7", True]),
    (PLAIN, "max_completion_tokens", [0]),
    (CHAT, "max_tokens", [0]),
    (PLAIN, "min_tokens", [-1, 17, "7"]),
    (PLAIN, "temperature", [-1, 10**400]),
    (PLAIN, "top_p", [-0.1, 1.1]),
    (PLAIN, "typical_p", [0, 1.1]),
    (PLAIN, "top_k", [-2]),
    (PLAIN, "min_p", [2]),
    (PLAIN, "seed", [-2, 2**62]),
    (PLAIN, "stop_token_ids", [[300], [-1], ["a"], 5]),
    (PLAIN, "n", [0, 10**9]),
    (PLAIN, "stop", [[""], ["a"] * 65, "a" * 1001, ["\ud800"], 5]),
    (PLAIN, "logit_bias", [{"-1": 1}, {"a": 1}, {"5": 101}, {"5": True}, {"300": 1}, [1]]),
    (PLAIN, "logit_bias", [{str(token): 1 for token in range(2000)}]),
    (PLAIN, "presence_penalty", [3]),
    (PLAIN, "repetition_penalty", [0, 1e-30]),
    (PLAIN, "repeat_penalty", [0, 1e-30]),
    (PLAIN, "logprobs", [21, -1]),
    (PLAIN, "stream", ["yes"]),
    (PLAIN, "stream_options.include_usage", [3]),
    (PLAIN, "forerun_method", ["sd"]),
    (PLAIN, "prompt", ["", [], [[]], [1, "a"], [-1], [300], [True], {"a": 1}, "a\0b", "a\ud800b"]),
    (PLAIN, "prompt", ["the cat sat " * 5000, "a" * 2**20, [[5]] * 300]),
    (PLAIN, "prompt", [["x", {"y" * 100_000: 1}] * 5]),
    (PLAIN, "suffix", ["x"]),
    (PLAIN, "best_of", [0, True, 129]),
    (PLAIN, "prompt_logprobs", [0]),
    (PLAIN, "audio", [{}]),
    (PLAIN, "response_format", [{"type": "nonsense"}, {"type": "json_object", "shema": {}}]),
    (PLAIN, "response_format", [{"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}]),
    (CHAT, "response_format", [{"type": "text", "schema": {}}, {"type": "regex", "pattern": "a"}]),
    (CHAT, "echo", [True]),
    (CHAT, "priority", [1]),
    (CHAT, "top_n_sigma", [1.0]),
    (CHAT, "samplers", [["top_k"]]),
    (CHAT, "repetition_detection", [{"max_pattern_size": 3}]),
    (CHAT, "t_max_predict_ms", [100]),
    (CHAT, "n_probs", [3]),
    (CHAT, "logprob_token_ids", [[1]]),
    (CHAT, "return_token_ids", [True]),
    (PLAIN, "user", [{"a": "b" * 100_000}]),
    (PLAIN, "cache_salt", ["", "a" * 257, "\ud800", 5]),
    (CHAT, "messages", [[], "hello"]),
    (CHAT, "messages", [[{"role": "robot", "content": "a"}], [{"role": "assistant"}]]),
    (CHAT, "messages", [[{"role": "assistant", "content": "a", "audio": {"id": "x"}}]]),
    (CHAT, "messages", [[{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]]),
    (CHAT, "messages", [[{"role": "assistant", "content": "a", "reasoning": 5}]]),
    (CHAT, "messages", [[{"role": "user", "content": content}] for content in CONTENTS]),
    (CHAT, "top_logprobs", [2]),
    (CHAT, "cache_salt", ["", ["a"]]),
    (CHAT, "logprobs", [2]),
    (CHAT, "modalities", [["audio"]]),
    (CHAT, "chat_template_kwargs", [{"tokenize": False}, {"tools": []}, {"end": 1}]),
    (CHAT, "chat_template_kwargs", [{"documents": None}, {"messages": []}]),
    (CHAT, "chat_template_kwargs", [{"own": "a" * 2**18}, {"a b": False}, {"tokenizer": "x"}]),
    ("/tokenize", "prompt", ["a" * 2**20, None, "\ud800"]),
    ("/detokenize", "tokens", [[1, -1], "abc"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "param", "values"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_fields_are_named(server: Live, path: str, param: str, values: list[Any]) -> None:
    base: dict[str, Any] = {PLAIN: {"prompt": "a"}, CHAT: {"messages": HELLO}}.get(path, {})
    for value in values:
        field, _, inner = param.partition(".")
        assert (
            refusal(sent(server, path, base | {field: {inner: value} if inner else value}))["param"]
            == param
        )


NO_REQUESTS = [
    b"",
    b"{",
    b"[" * 10**6,
    b'{"prompt":' * 10**5,
    b'{"prompt": "\xff"}',
    b"[1]",
    b'"prompt"',
]
NO_REQUESTS += [
    b'{"prompt": "a", %s}' % field for field in (b'"temperature": NaN', b'"temperature": 1e999')
]
NO_REQUESTS += [b'{"prompt": "a", "seed": ' + b"9" * 10**5 + b"}"]


@pytest.mark.parametrize("body", NO_REQUESTS, ids=lambda body: repr(body[:24]))
def test_bodies_that_are_no_requests_are_refused(server: Live, body: bytes) -> None:
    assert refusal(sent(server, PLAIN, body))["param"] in ("body", "prompt", "temperature", "seed")


def test_wrong_models_paths_and_sizes_are_refused(server: Live) -> None:
    assert refusal(post(server, PLAIN, {"prompt": "a", "model": "gpt"}), 404)["param"] == "model"
    assert refusal(post(server, PLAIN, {"prompt": ["a", "b", "c"], "n": 128}))["param"] == "n"
    assert refusal(post(server, PLAIN, {"prompt": "a" * 2**21}), 413)
    assert refusal(post(server, "/v1/nothing", {}), 404) and refusal(get(server, PLAIN), 405)
    assert refusal(get(server, "/v1/models/other"), 404)
    chunks = iter([b'{"prompt": "'] + [b"a" * 2**19] * 8)
    try:  # without a content-length
        response = httpx.post(server.url + PLAIN, content=chunks, timeout=60, **LOCAL)
        assert refusal(response, 413)
    except httpx.WriteError:  # the server has closed the connection meanwhile
        pass


def test_a_full_queue_answers_at_once() -> None:
    with (
        live(lambda: make_decoder(max_rows=1, max_queue=1)) as server,
        httpx.Client(**LOCAL) as http,
    ):
        url, body = server.url + PLAIN, {"prompt": "a", "max_tokens": 5, "stream": True}
        with (  # one has the row to come, one waits, and there is no room for more
            held(server.worker.engine) as go,
            http.stream("POST", url, json=body, timeout=120) as one,
            http.stream("POST", url, json=body) as other,
        ):
            response = post(server, PLAIN, {"prompt": "a"})
            assert (
                refusal(response, 503)["code"] == "queue_full"
                and int(response.headers["Retry-After"]) > 0
            )
            assert refusal(post(server, PLAIN, {"prompt": "a", "n": 5}))["param"] == "n"
            go.set()
            for each in (one, other):
                assert [line for line in each.iter_lines() if line][-1] == "data: [DONE]"


def test_an_answer_follows_the_form_that_is_asked_for(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": ["cat", "mat"]}, "strict": True},
    }
    body = {"messages": HELLO, "response_format": form, "max_tokens": 40, "seed": 1}
    (choice,) = post(server, CHAT, body).json()["choices"]
    assert (
        json.loads(choice["message"]["content"]) in ("cat", "mat")
        and choice["finish_reason"] == "stop"
    )
    # One that cannot be kept may show only after some tokens, and is the request's fault too.
    monkeypatch.setattr(
        Grammar, "complete", Mock(side_effect=FormError("the response_format cannot be kept"))
    )
    nowhere = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    for form in ({"type": "regex", "regex": "(a"}, nowhere, {"type": "json_object"}):
        assert (
            refusal(post(server, CHAT, {"messages": HELLO, "response_format": form}))["param"]
            == "response_format"
        )


@pytest.mark.slow
def test_too_much_for_the_memory_is_refused_and_less_waits() -> None:
    def make() -> Any:
        decoder = make_decoder()
        return decoder.replace(kv_memory=300 * decoder.target.position_bytes)

    with live(make) as server:
        assert (
            refusal(post(server, PLAIN, {"prompt": "a", "max_tokens": 500}))["param"]
            == "max_tokens"
        )
        response = post(
            server,
            PLAIN,
            {"prompt": "a", "max_tokens": 100, "n": 8, "ignore_eos": True, "temperature": 0},
        )
        assert len({each["text"] for each in response.json()["choices"]}) == 1


MARK = 299  # a token that only the culprit's prompt has
FAILURES = [*product(("forward", "prefill", "observe"), ("whole", "streamed"))]
FAILURES += product(("forward", "commit", "prefill", "join"), ("once",))


def plain_answers(bodies: list[dict[str, Any]]) -> list[str]:
    """Answer requests one by one on a server where nothing fails. Streams have the same text."""
    return _plain_answers(json.dumps([body | {"stream": False} for body in bodies]))


@cache
def _plain_answers(bodies: str) -> list[str]:
    with live(lambda: make_decoder(max_rows=12)) as server:
        return [answered(post(server, PLAIN, body)) for body in json.loads(bodies)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), Panic("broken")], ids=["exception", "panic"]
)
@pytest.mark.parametrize(("place", "how"), FAILURES)
def test_a_failing_step_is_undone(
    monkeypatch: pytest.MonkeyPatch, place: str, how: str, error: BaseException
) -> None:
    """A request that breaks every step ends alone; a call that fails once costs nobody an answer.

    There are 16 requests.
    """
    with live(lambda: make_decoder(max_rows=12)) as server:  # so that four wait for a row
        engine, more = (
            server.worker.engine,
            {"max_tokens": 24, "temperature": 0, "ignore_eos": True},
        )
        more["stream"] = how == "streamed"
        bodies = [more | {"prompt": [5 + at, *range(20, 24 + at)]} for at in range(16)]
        bodies[3] |= {"temperature": 1.0, "seed": 5}
        wanted = plain_answers(bodies)
        if how != "once":
            bodies[7] = more | {"prompt": [*range(20, 30), MARK, 5]}
        owner: Any = engine.drafter if place == "observe" else engine.target
        real = getattr(owner, place)
        calls = []
        failed = []

        def has_culprit(given: Any) -> bool:
            if place == "prefill":
                return MARK in given
            marked = {seq.id for seq in engine.running if MARK in seq.request.tokens}
            ids = {outcome.sequence.id for outcome in given} if place == "observe" else given
            return not marked.isdisjoint(ids)

        def fails(given: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 4 if how == "once" else has_culprit(given):
                failed.append(1)
                raise error
            return real(given, *args, **kwargs)

        monkeypatch.setattr(owner, place, fails)
        with (
            held(engine) as go,
            ThreadPoolExecutor(len(bodies)) as pool,
        ):  # the first step has all of them queued
            asked = [pool.submit(post, server, PLAIN, body) for body in bodies]
            until(lambda: len(engine.waiting) == len(bodies))
            go.set()
            responses = [future.result() for future in asked]
        if how != "once":
            bad = responses.pop(7)
            wanted = [*wanted[:7], *wanted[8:]]
            error_body = events(bad)[-1]["error"] if more["stream"] else refusal(bad, 500)
            assert error_body["code"] == "decoding"
        assert [answered(response) for response in responses] == wanted and len(failed) == (
            1 if how == "once" else 2
        )
        assert post(server, PLAIN, more | {"prompt": "a"}).status_code == 200 and not server.rows


def test_a_panic_while_a_body_is_read_ends_that_request_alone(server: Live) -> None:
    with patch("forerun.server.requests.encode_prompts", side_effect=Panic):
        assert refusal(post(server, PLAIN, {"prompt": "a"}), 500)
    assert post(server, PLAIN, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_key_is_needed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Mock(wraps=hmac.compare_digest)  # whose time says nothing about the key
    monkeypatch.setattr("hmac.compare_digest", compare)
    with live(api_key="secret", allow_origin=("http://a.example",)) as server:
        for given in (
            b"",
            b"Bearer secre",
            b"Bearer " + b"s" * 5000,
            b"Bearer \xff",
            b"Basic secret",
            b"secret",
        ):
            headers = {b"authorization": given} if given else {}
            response = post(server, PLAIN, {"prompt": "a"}, headers=headers)
            assert refusal(response, 401)["code"] == "invalid_api_key"
        assert compare.call_count == 6
        right = {"authorization": "Bearer secret", "origin": "http://a.example"}
        response = post(server, PLAIN, {"prompt": "a", "max_tokens": 1}, headers=right)
        assert (
            response.status_code == 200
            and response.headers["access-control-allow-origin"] == "http://a.example"
        )
        assert get(server, "/health").status_code == 200
        assert get(server, "/metrics").status_code == 401
        asked = {"origin": "http://b.example", "access-control-request-method": "POST"}
        response = httpx.options(server.url + PLAIN, headers=asked, **LOCAL)
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(("limit", "seconds", "status"), [(1000, 0.1, 408), (3, 10, 413)])
def test_a_body_that_never_ends_is_refused(limit: int, seconds: float, status: int) -> None:
    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    app = AsyncMock()
    send = AsyncMock()
    asyncio.run(
        BodyLimit(app, limit, seconds)({"type": "http", "path": "/", "headers": []}, receive, send)
    )
    assert send.await_args_list[0].args[0]["status"] == status and not app.called


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_goes_ends_its_request(server: Live, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "stream": stream}
    before = figures(server)["forerun:generation_tokens_total"]
    with held(server.worker.engine):
        leave(server, PLAIN, body, lambda: server.service.open and server.rows)
        until(lambda: not server.service.open)  # the abort is with the engine before its next step
    until(lambda: not server.rows)
    assert figures(server)["forerun:generation_tokens_total"] - before < 40
