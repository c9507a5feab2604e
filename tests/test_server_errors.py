"""What is refused, and how it is said."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serving import NAME, Live, live, make_decoder, post

from forerun.sampling.grammar import FormError, Grammar
from forerun.server.middleware import ApiKey, BodyLimit

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_body=2**21) as found:
        yield found


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, which has the one shape and a short text."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 1000
    (error,) = response.json().values()
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    return error


BAD: list[tuple[str, dict[str, Any], str]] = [
    (PLAIN, {"max_tokens": 0}, "max_tokens"),
    (PLAIN, {"max_tokens": -5}, "max_tokens"),
    (PLAIN, {"max_tokens": 2**40}, "max_tokens"),
    (PLAIN, {"max_tokens": "7"}, "max_tokens"),
    (PLAIN, {"max_tokens": True}, "max_tokens"),
    (PLAIN, {"temperature": -1}, "temperature"),
    (PLAIN, {"temperature": 1e-9}, "temperature"),
    (PLAIN, {"temperature": 10**400}, "temperature"),
    (PLAIN, {"top_p": 0}, "top_p"),
    (PLAIN, {"top_k": -2}, "top_k"),
    (PLAIN, {"min_p": 2}, "min_p"),
    (PLAIN, {"seed": -1}, "seed"),
    (PLAIN, {"seed": 2**62}, "seed"),
    (PLAIN, {"n": 0}, "n"),
    (PLAIN, {"n": 10**9}, "n"),
    (PLAIN, {"n": 128, "prompt": ["a", "b", "c"]}, "n"),
    (PLAIN, {"stop": [""]}, "stop"),
    (PLAIN, {"stop": ["a"] * 17}, "stop"),
    (PLAIN, {"stop": "a" * 1001}, "stop"),
    (PLAIN, {"stop": ["\ud800"]}, "stop"),
    (PLAIN, {"stop": 5}, "stop"),
    (PLAIN, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (PLAIN, {"logit_bias": {"a": 1}}, "logit_bias"),
    (PLAIN, {"logit_bias": {"5": 101}}, "logit_bias"),
    (PLAIN, {"logit_bias": {"300": 1}}, "logit_bias"),
    (PLAIN, {"logit_bias": {str(each): 1 for each in range(2000)}}, "logit_bias"),
    (PLAIN, {"logit_bias": [1]}, "logit_bias"),
    (PLAIN, {"presence_penalty": 3}, "presence_penalty"),
    (PLAIN, {"repetition_penalty": 0}, "repetition_penalty"),
    (PLAIN, {"logprobs": 21}, "logprobs"),
    (PLAIN, {"logprobs": -1}, "logprobs"),
    (PLAIN, {"stream": "yes"}, "stream"),
    (PLAIN, {"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    (PLAIN, {"forerun_method": "sd"}, "forerun_method"),
    (PLAIN, {"prompt": ""}, "prompt"),
    (PLAIN, {"prompt": []}, "prompt"),
    (PLAIN, {"prompt": [[]]}, "prompt"),
    (PLAIN, {"prompt": [1, "a"]}, "prompt"),
    (PLAIN, {"prompt": [-1]}, "prompt"),
    (PLAIN, {"prompt": [300]}, "prompt"),
    (PLAIN, {"prompt": [True]}, "prompt"),
    (PLAIN, {"prompt": {"a": 1}}, "prompt"),
    (PLAIN, {"prompt": "a\0b"}, "prompt"),
    (PLAIN, {"prompt": "a\ud800b"}, "prompt"),
    (PLAIN, {"prompt": "the cat sat " * 5000}, "prompt"),
    (PLAIN, {"prompt": [[5]] * 300}, "prompt"),
    (PLAIN, {"prompt": ["x", {"y" * 100_000: 1}] * 5}, "prompt"),
    (PLAIN, {"repetition_penalty": 1e-30}, "repetition_penalty"),
    (PLAIN, {"suffix": "x"}, "suffix"),
    (PLAIN, {"best_of": 2}, "best_of"),
    (PLAIN, {"response_format": {"type": "nonsense"}}, "response_format"),
    (PLAIN, {"user": {"a": "b" * 100_000}}, "user"),
    (PLAIN, {"cache_salt": ""}, "cache_salt"),
    (PLAIN, {"cache_salt": "a" * 257}, "cache_salt"),
    (PLAIN, {"cache_salt": "\ud800"}, "cache_salt"),
    (PLAIN, {"cache_salt": 5}, "cache_salt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a\0"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "messages"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"cache_salt": ""}, "cache_salt"),
    (CHAT, {"cache_salt": ["a"]}, "cache_salt"),
    (CHAT, {"logprobs": 2}, "logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"documents": None}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"own": "a" * 2**18}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a b": False}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tokenizer": "x"}}, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 2**20}]}]}, "messages"),
    (PLAIN, {"prompt": "a" * 2**20}, "prompt"),
    ("/tokenize", {"prompt": "a" * 2**20}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=lambda value: None if isinstance(value, dict) else value)
def test_bad_fields_are_named(server: Live, path: str, fields: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {PLAIN: {"prompt": "a"}, CHAT: {"messages": HELLO}}.get(path, {})
    response = httpx.post(
        server.url + path,
        content=json.dumps(base | fields).encode(),
        headers={"content-type": "application/json"},
        timeout=60,
        trust_env=False,
    )
    assert refusal(response)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 10**6,
        b'{"prompt":' * 10**5,
        b'{"prompt": "\xff"}',
        b"[1]",
        b'"prompt"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 10**5 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bodies_that_are_no_requests(server: Live, body: bytes) -> None:
    response = httpx.post(
        server.url + PLAIN, content=body, headers={"content-type": "application/json"}, timeout=60, trust_env=False
    )
    assert refusal(response)["param"] in ("body", "prompt", "temperature", "seed")


def test_other_refusals(server: Live) -> None:
    assert refusal(post(server, PLAIN, {"prompt": "a", "model": "gpt"}), 404)["param"] == "model"
    assert refusal(post(server, PLAIN, {"prompt": "a" * 2**21}), 413)
    assert refusal(post(server, "/v1/nothing", {}), 404)
    assert refusal(httpx.get(server.url + PLAIN, trust_env=False), 405)
    assert refusal(httpx.get(server.url + "/v1/models/other", trust_env=False), 404)
    chunks = iter([b'{"prompt": "'] + [b"a" * 2**19] * 8)
    try:  # the length is not said
        response = httpx.post(server.url + PLAIN, content=chunks, timeout=60, trust_env=False)
        assert refusal(response, 413)
    except httpx.WriteError:  # the server has closed the connection meanwhile
        pass


def test_the_openai_client_sees_its_own_errors(server: Live) -> None:
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="a", max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")


def test_a_full_queue_answers_at_once() -> None:
    with live(lambda: make_decoder(max_rows=1, max_queue=1)) as server, httpx.Client(trust_env=False) as http:
        engine, go = server.worker.engine, threading.Event()
        step = engine.step

        def held() -> Any:
            assert go.wait(120)
            return step()

        engine.step = held  # type: ignore[method-assign]
        url, body = server.url + PLAIN, {"prompt": "a", "max_tokens": 5, "stream": True}
        try:  # one has the row to come, one waits, and there is no room for more
            with http.stream("POST", url, json=body, timeout=120) as one, http.stream("POST", url, json=body) as other:
                found = post(server, PLAIN, {"prompt": "a"})
                assert refusal(found, 503)["code"] == "queue_full" and int(found.headers["Retry-After"]) > 0
                assert refusal(post(server, PLAIN, {"prompt": "a", "n": 5}))["param"] == "n"
                go.set()
                assert [each for each in one.iter_lines() if each][-1] == "data: [DONE]"
                assert [each for each in other.iter_lines() if each][-1] == "data: [DONE]"
        finally:
            go.set()


def test_a_form_for_the_answer(server: Live) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["cat", "mat"]}}}
    body = {"messages": HELLO, "response_format": form, "max_tokens": 40, "seed": 1}
    (choice,) = post(server, CHAT, body).json()["choices"]
    assert json.loads(choice["message"]["content"]) in ("cat", "mat") and choice["finish_reason"] == "stop"
    form = {"type": "regex", "regex": "(a"}
    assert refusal(post(server, CHAT, {"messages": HELLO, "response_format": form}))["param"] == "response_format"


def test_a_form_that_cannot_be_kept_up(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows only when there are tokens, and is the request's fault."""
    pytest.importorskip("llguidance")

    def complete(self: Grammar, ids: Any) -> bool:
        raise FormError("the response_format cannot be kept")

    monkeypatch.setattr(Grammar, "complete", complete)
    body = {"messages": HELLO, "response_format": {"type": "json_object"}}
    assert refusal(post(server, CHAT, body))["param"] == "response_format"


def test_too_much_for_the_memory_is_refused_and_less_waits() -> None:
    def make() -> Any:
        decoder = make_decoder()
        return decoder.replace(kv_memory=300 * decoder.target.position_bytes)

    with live(make) as server:
        assert refusal(post(server, PLAIN, {"prompt": "a", "max_tokens": 500}))["param"] == "max_tokens"
        found = post(server, PLAIN, {"prompt": "a", "max_tokens": 100, "n": 8, "ignore_eos": True, "temperature": 0})
        assert len({each["text"] for each in found.json()["choices"]}) == 1


def test_an_answer_that_takes_too_long() -> None:
    with live(max_seconds=0.02) as server:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "forerun_method": "ar"}
        found = post(server, PLAIN, body)
        assert refusal(found, 504)["code"] == "timeout" and found.headers["x-should-retry"] == "false"
        lines = [line for line in post(server, PLAIN, body | {"stream": True}).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["error"]["code"] == "timeout"


def test_what_breaks_a_request_ends_it_alone(server: Live) -> None:
    engine = server.worker.engine
    judge, broken = engine.drafter.observe, []

    def observe(seqs: Any, *args: Any) -> None:
        if any(len(seq.request.tokens) == 7 for seq in seqs):
            broken.append(1)
            raise RuntimeError("broken")
        judge(seqs, *args)

    engine.drafter.observe = observe  # type: ignore[method-assign]
    try:
        found = post(server, PLAIN, {"prompt": [5] * 7, "max_tokens": 50})
        assert refusal(found, 500)["code"] == "decoding" and len(broken) == 2  # it was tried again
    finally:
        engine.drafter.observe = judge  # type: ignore[method-assign]
    assert post(server, PLAIN, {"prompt": [5] * 7, "max_tokens": 5}).status_code == 200


class Panic(BaseException):
    """As a library's in Rust: no handler of exceptions catches it."""


class Together:
    """Asks for many answers at once; the engine's first step has all of them queued."""

    def __init__(self, server: Live, bodies: list[dict[str, Any]]) -> None:
        self.engine, self.bodies, self.server = server.worker.engine, bodies, server

    def __enter__(self) -> list[httpx.Response]:
        self._step = self.engine.step

        def held() -> Any:
            if len(self.engine.waiting) == len(self.bodies):
                self.engine.step = self._step  # type: ignore[method-assign]
                return self._step()
            return time.sleep(0.001) or []

        self.engine.step = held  # type: ignore[method-assign]
        with ThreadPoolExecutor(len(self.bodies)) as pool:
            return list(pool.map(lambda body: post(self.server, PLAIN, body), self.bodies))

    def __exit__(self, *error: object) -> None:
        self.engine.step = self._step  # type: ignore[method-assign]


MARK = 299  # a token that only the culprit's prompt has


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken")], ids=["exception", "panic"])
@pytest.mark.parametrize("place", ["forward", "prefill"])
def test_one_of_sixteen_that_breaks_every_step_ends_alone(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, stream: bool
) -> None:
    with live(lambda: make_decoder(max_rows=12)) as server:  # so that four wait for a row
        engine, more = server.worker.engine, {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": stream}
        bodies = [more | {"prompt": [5 + at, *range(20, 24 + at)]} for at in range(16)]
        wanted = [answered(post(server, PLAIN, body)) for body in bodies]
        bodies[7] = more | {"prompt": [*range(20, 30), MARK, 5]}
        real, failed = getattr(engine.target, place), []

        def fails(given: Any, *args: Any, **kwargs: Any) -> Any:
            marked = [seq.id for seq in engine.running if MARK in seq.request.tokens]
            if MARK in given if place == "prefill" else not {*marked}.isdisjoint(given):
                failed.append(1)
                raise error
            return real(given, *args, **kwargs)

        monkeypatch.setattr(engine.target, place, fails)
        with Together(server, bodies) as found:
            pass
        bad = found.pop(7)
        if stream:
            assert json.loads(bad.text.split("data: ")[-2])["error"]["code"] == "decoding"
        else:
            assert refusal(bad, 500)["code"] == "decoding"
        del wanted[7]
        assert [answered(each) for each in found] == wanted and len(failed) == 2
        assert post(server, PLAIN, more | {"prompt": "a"}).status_code == 200 and not server.rows


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken")], ids=["exception", "panic"])
@pytest.mark.parametrize("place", ["forward", "commit", "prefill", "join"])
def test_what_fails_once_costs_no_request(monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException) -> None:
    with live(lambda: make_decoder(max_rows=6)) as server:
        engine, more = server.worker.engine, {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        bodies = [more | {"prompt": [5 + at, *range(20, 24 + at)]} for at in range(8)]
        wanted = [answered(post(server, PLAIN, body)) for body in bodies]
        real, calls = getattr(engine.target, place), []

        def fails(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(engine.target, place, fails)
        with Together(server, bodies) as found:
            pass
        assert [answered(each) for each in found] == wanted and len(calls) > 4


def answered(response: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["text"] for each in events)


def test_a_panic_while_a_body_is_read_ends_that_request_alone(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*args: Any) -> Any:
        raise Panic

    monkeypatch.setattr("forerun.server.requests.encode_prompts", panics)
    assert refusal(post(server, PLAIN, {"prompt": "a"}), 500)
    monkeypatch.undo()
    assert post(server, PLAIN, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_key_is_needed_where_there_is_one() -> None:
    with live(api_key="secret", allow_origin=("http://a.example",)) as server:
        for given in (None, "Bearer wrong", "Basic secret", "secret"):
            headers = {} if given is None else {"authorization": given}
            found = post(server, PLAIN, {"prompt": "a"}, headers=headers)
            assert refusal(found, 401)["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret", "origin": "http://a.example"}
        found = post(server, PLAIN, {"prompt": "a", "max_tokens": 1}, headers=right)
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "http://a.example"
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        assert httpx.get(server.url + "/metrics", trust_env=False).status_code == 401
        asked = {"origin": "http://b.example", "access-control-request-method": "POST"}
        found = httpx.options(server.url + PLAIN, headers=asked, trust_env=False)
        assert "access-control-allow-origin" not in found.headers


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen = []
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: seen.append((len(one), len(other))) or one == other)
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        pass

    guard = ApiKey(app, "secret", frozenset())
    for given in (b"", b"Bearer s", b"Bearer secre", b"Bearer " + b"s" * 5000, b"Bearer secret", b"Bearer \xff"):
        scope = {"type": "http", "path": given.decode("latin-1"), "headers": [(b"authorization", given)]}
        asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert seen == [(32, 32)] * 6 and reached == ["Bearer secret"]


def test_a_body_that_never_ends() -> None:
    told: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        told.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    asyncio.run(BodyLimit(app, 1000, 0.1)({"type": "http", "path": "/", "headers": []}, receive, send))
    assert told[0]["status"] == 408
    asyncio.run(BodyLimit(app, 3, 10)({"type": "http", "path": "/", "headers": []}, receive, send))
    assert told[2]["status"] == 413


def test_a_reader_that_goes_frees_its_row_with_the_next_step(server: Live) -> None:
    """Also one that never read: the abort is with the engine before its next step."""
    engine, gone = server.worker.engine, {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "forerun_method": "ar"}
    for stream in (True, False):
        numbers: list[int] = []
        abort = engine.abort

        def noted(id: int, numbers: list[int] = numbers, abort: Any = abort) -> None:
            numbers.append(engine._number)
            abort(id)

        engine.abort = noted  # type: ignore[method-assign]
        leave, left = engine._leave_aborted, []

        def leaving(leave: Any = leave, left: list[int] = left) -> None:
            before = len(engine.outbox)
            leave()
            if len(engine.outbox) > before:
                left.append(engine._number)

        engine._leave_aborted = leaving  # type: ignore[method-assign]
        try:
            with httpx.Client(trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
                http.post(server.url + PLAIN, json=gone | {"stream": stream}, timeout=0.15) if not stream else vanish(
                    http, server.url + PLAIN, gone | {"stream": True}
                )
            until = time.monotonic() + 30
            while (server.rows or server.service.open) and time.monotonic() < until:
                time.sleep(0.01)
            assert not server.rows and not server.service.open
            if left:  # else it had come to its end before
                assert left[0] - numbers[0] <= 1
        finally:
            engine.abort, engine._leave_aborted = abort, leave  # type: ignore[method-assign]


def vanish(http: httpx.Client, url: str, body: dict[str, Any]) -> None:
    with http.stream("POST", url, json=body, timeout=30) as response:
        next(response.iter_lines())
    raise httpx.ReadTimeout("gone")
