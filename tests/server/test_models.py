"""Several models in one server: loaded when asked for, and unloaded for others."""

import asyncio
import gc
import json
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from forerun import cli
from forerun.api.decoder import Decoder
from forerun.garbage import leave_out_of_searches
from forerun.server import early_streams, worker
from forerun.server.app import Settings
from forerun.server.dispatch import create_models_app
from forerun.server.memory import MemoryShare, weight_memory
from forerun.server.model import Model, State
from forerun.server.models import Models
from tests.support.local import LOCAL
from tests.support.processes import health, started
from tests.support.serving import (
    PLAIN,
    Live,
    answered,
    client_of,
    get,
    held,
    leave,
    make_decoder,
    post,
    refusal,
    running,
    until,
)
from tests.support.serving import models as tiny_models
from tests.support.toys import save_models, tiny, tiny_tokenizer

BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 300, "stream": True}


def make_other() -> Decoder:
    return Decoder(tiny("llama", vocab=300, context=128, seed=3), tiny_tokenizer(), guard=False)


class Several(Live):
    def __init__(self, url: str, models: Models) -> None:
        self.url = url
        self.models = models
        self.all = {model.name: model for model in models.all}

    def ask(self, model: str | None, body: Any = BODY, path: str = PLAIN) -> httpx.Response:
        return post(self, path, body if model is None else body | {"model": model})

    @property
    def states(self) -> dict[str, str]:
        return {item["id"]: item["state"] for item in get(self, "/v1/models").json()["data"]}


@contextmanager
def several(
    makes: dict[str, Callable[[], Decoder]],
    limit: int | None = None,
    wait: float = 120,
    file_bytes: int = 0,
    **settings: Any,
) -> Iterator[Several]:
    models = Models(
        [
            Model(
                make,
                Settings(name, max_seconds=120),
                file_bytes,
                MemoryShare(1 / len(makes), limit),
            )
            for name, make in makes.items()
        ],
        limit,
    )
    app = create_models_app(models, Settings("", max_seconds=wait, **settings))
    with running(app, timeout_keep_alive=15) as url:
        until(models._has_begun.is_set, 120)
        yield Several(url, models)


@pytest.fixture(scope="module")
def pair() -> Iterator[Several]:
    with several({"a": make_decoder, "b": make_other}) as server:
        yield server


def test_a_model_is_loaded_when_a_request_names_it(pair: Several) -> None:
    assert pair.states == {"a": "loaded", "b": "unloaded"}
    assert get(pair, "/health").json()["models"] == pair.states
    first = answered(pair.ask(None))
    assert pair.states["b"] == "unloaded"
    assert first == answered(pair.ask("a")) != answered(pair.ask("b"))
    assert pair.states == {"a": "loaded", "b": "loaded"}
    assert pair.ask("b").json()["model"] == "b" and pair.ask(None).json()["model"] == "a"
    with client_of(pair) as client:
        assert [model.id for model in client.models.list()] == ["a", "b"]
        assert client.models.retrieve("b").model_extra["max_model_len"] == 128  # type: ignore[index]
        assert len(client.embeddings.create(model="b", input="a").data[0].embedding) == 32
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="c", prompt="a")
    assert refusal(pair.ask("c"), 404)["code"] == "model_not_found"
    assert refusal(get(pair, "/v1/models/c"), 404)["param"] == "model"
    assert pair.all["a"].loads == pair.all["b"].loads == 1


def test_what_is_no_request_is_refused_as_by_one_model(pair: Several) -> None:
    for content in (b"{", b"[]", b'{"model": 5}', b"[" * 100_000, b'{"model": null}', b"\xff"):
        response = httpx.post(pair.url + PLAIN, content=content, timeout=60, **LOCAL)
        assert refusal(response)
    assert post(pair, "/v1/nothing", {}).status_code == 404
    assert get(pair, PLAIN).status_code == 405
    assert "text/html" in get(pair, "/").headers["content-type"]
    assert "/v1/embeddings" in get(pair, "/openapi.json").json()["paths"]
    assert get(pair, "/version").status_code == 200
    given = post(pair, PLAIN, BODY, headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"


def test_the_other_apis_reach_the_models_too(pair: Several) -> None:
    assert answered(pair.ask("b"))
    for path in ("/api/tags", "/api/ps"):
        listed = get(pair, path).json()["models"]
        assert [model["name"] for model in listed] == ["a", "b"] and listed[0]["size"] > 0
    body = {"prompt": "the cat", "stream": False, "options": {"num_predict": 4}}
    for given, name in (("b:latest", "b"), ("b", "b"), ("", "a")):
        assert post(pair, "/api/generate", body | {"model": given}).json()["model"] == name
    context = post(pair, "/api/show", {"name": "b"}).json()["model_info"]["llama.context_length"]
    assert context == 128
    assert "error" in post(pair, "/api/generate", body | {"model": "c:latest"}).json()
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    response = post(pair, "/v1/messages", message | {"model": "a"})
    assert response.json()["model"] == "a" and response.json()["type"] == "message"
    missing = post(pair, "/v1/messages", message | {"model": "c"})
    assert missing.status_code == 404 and missing.json()["type"] == "error"
    assert get(pair, "/props?model=b").json()["model_alias"] == "b"


def test_metrics_tell_the_models_apart(pair: Several) -> None:
    assert refusal(pair.ask("none"), 404)
    answered(pair.ask("b"))
    families = list(text_string_to_metric_families(get(pair, "/metrics").text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    for name in ("forerun:prompt_tokens_total", "forerun:generation_tokens_total"):
        tokens = {sample.labels["model"]: sample.value for sample in samples if sample.name == name}
        assert sorted(tokens) == ["a", "b"] and tokens["b"] >= 3
    assert ("forerun:model_loaded", {"model": "b"}, 1) in [sample[:3] for sample in samples]
    refused = [sample for sample in samples if sample.name == "forerun:request_errors_total"]
    counts = {(sample.labels["model"], sample.labels["status"]): sample.value for sample in refused}
    assert counts["", "404"] >= 1 and ("b", "400") not in counts
    assert refusal(pair.ask("b", BODY | {"top_p": 5})) and get(pair, "/props?model=a").is_success
    name = 'forerun:request_errors_total{model="b",status="400"} 1.0'
    assert name in get(pair, "/metrics").text


def test_the_dashboard_asks_for_metrics_that_there_are(pair: Several) -> None:
    answered(pair.ask("b", BODY | {"max_tokens": 30}))
    names = set(re.findall(r"^# TYPE (\S+)", get(pair, "/metrics").text, re.MULTILINE))
    dashboard = Path(__file__).parents[2] / "deploy" / "grafana.json"
    asked = set(re.findall(r"forerun:\w+", dashboard.read_text(encoding="utf-8")))
    assert len(asked) > 12
    assert {name.removesuffix("_bucket") for name in asked} <= names


def test_the_least_recently_used_model_leaves_and_its_memory_is_free() -> None:
    targets: list[weakref.ref[Any]] = []

    def make() -> Decoder:
        decoder = make_decoder()
        targets.append(weakref.ref(decoder.target))
        decoder.target.itself = decoder.target  # type: ignore[attr-defined]  # as parts may do
        leave_out_of_searches()  # as what loads a model for `forerun serve` does
        return decoder

    limit = 5 * weight_memory(make_decoder()) // 2
    with several(dict.fromkeys("abc", make), limit) as server:
        for name in "abac":
            answered(server.ask(name))
        assert server.states == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        until(lambda: gc.collect() >= 0 and targets[1]() is None, 30)
        a, b, c = (target() for target in targets)
        assert a is not None and b is None and c is not None
        text = answered(server.ask("b"))  # in place of a, and the same as before
        assert server.states == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert text == answered(server.ask("c"))
        assert [model.loads for model in server.models.all] == [1, 2, 1]


def test_what_the_first_steps_keep_makes_no_model_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Decoder] = []

    def make() -> Decoder:
        made.append(make_decoder())
        return made[-1]

    def keep(tokenizer: Any) -> None:
        vars(made[-1].target)["kept"] = torch.ones(1000)

    monkeypatch.setattr(worker, "prepare", keep)
    size = weight_memory(make_decoder())
    with several({"a": make}, size) as server:
        answered(server.ask("a"))
        assert weight_memory(made[-1]) > size == server.models.all[0].weight_bytes


def test_a_model_with_running_requests_stays_and_those_who_wait_take_turns() -> None:
    size = weight_memory(make_decoder())
    makes = {"a": make_decoder, "b": make_other}
    with (
        several(makes, size, file_bytes=size) as server,
        ThreadPoolExecutor(4) as go,
    ):
        a, b = server.models.all
        with held(a.worker.engine) as step:
            stream = go.submit(server.ask, "a", LONG)
            until(lambda: a.users)
            second = go.submit(server.ask, "b")
            until(lambda: b.tickets and a.is_leaving)
            third = [go.submit(server.ask, "a") for _ in range(2)]  # behind the one for b
            until(lambda: len(a.tickets) == 2)
            assert a.users == 1 and (a.loads, b.loads) == (1, 0)
            step.set()
        assert '"finish_reason":"length"' in stream.result().text
        assert answered(second.result())
        assert [answered(each.result()) for each in third] == [answered(server.ask("a"))] * 2
        assert (a.loads, b.loads) == (2, 1) and not (a.users or b.users)


def test_who_waits_too_long_gets_503_and_nobody_suffers() -> None:
    size = weight_memory(make_decoder())
    makes = {"a": make_decoder, "b": make_other}
    with (
        several(makes, size, wait=0.5, file_bytes=size) as server,
        ThreadPoolExecutor(1) as go,
    ):
        a, b = server.models.all
        with held(a.worker.engine) as step:
            stream = go.submit(server.ask, "a", LONG)
            until(lambda: a.users)
            late = server.ask("b")
            assert refusal(late, 503)["code"] == "loading" and late.headers["Retry-After"]
            until(lambda: not b.tickets and not a.is_leaving)
            step.set()
        assert '"finish_reason":"length"' in stream.result().text
        assert b.loads == 0 and a.loads == 1 and a.state is State.LOADED


def test_who_leaves_while_a_model_is_waited_for_costs_nobody_anything() -> None:
    size = weight_memory(make_decoder())
    makes = {"a": make_decoder, "b": make_other}
    with several(makes, size, file_bytes=size) as server, ThreadPoolExecutor(1) as go:
        a, b = server.models.all
        with held(a.worker.engine) as step:
            stream = go.submit(server.ask, "a", LONG)
            until(lambda: a.users)
            leave(server, PLAIN, BODY | {"model": "b"}, lambda: b.tickets and a.is_leaving)
            until(lambda: not b.tickets and not a.is_leaving)
            step.set()
        assert '"finish_reason":"length"' in stream.result().text
        assert b.loads == 0 and a.loads == 1 and a.state is State.LOADED


def test_a_load_that_fails_is_told_to_those_who_asked_and_no_others() -> None:
    attempts: list[int] = []
    go = threading.Event()

    def make() -> Decoder:
        attempts.append(0)
        assert go.wait(120)
        if len(attempts) == 1:
            raise ValueError("the folder is broken")
        if len(attempts) == 2:
            raise SystemExit("a library wants to end the process")
        return make_other()

    with several({"a": make_decoder, "b": make}) as server, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.ask, "b") for _ in range(3)]
        until(lambda: len(server.all["b"].tickets) == 3)
        assert answered(server.ask("a")) and server.states["b"] == "loading"
        go.set()
        for each in asked:
            error = refusal(each.result(), 500)
            assert (
                error["code"] == "model_not_loaded" and "the folder is broken" in error["message"]
            )
        assert len(attempts) == 1 and server.states["b"] == "unloaded"
        assert "library" in refusal(server.ask("b"), 500)["message"]
        assert answered(server.ask("b")) and answered(server.ask("a"))


def test_a_model_that_is_too_large_is_refused_and_a_first_one_that_fails_is_no_end() -> None:
    size = weight_memory(make_decoder())
    with several({"a": make_decoder, "b": make_other}, size - 1) as server:
        for _ in range(2):
            error = refusal(server.ask("a"), 500)
            assert error["code"] == "model_too_large" and str(size) in error["message"]
        assert answered(server.ask("b"))
        assert [model.loads for model in server.models.all] == [1, 1]


def test_trained_layers_and_earlier_texts_count_as_weights_do() -> None:
    with several({"a": make_decoder, "b": make_other}, 2**20) as server:
        assert answered(server.ask("a")) and answered(server.ask("b"))
        for model in server.models.all:
            decoder = model.worker.decoder
            assert decoder is not None
            assert model.weight_bytes == weight_memory(decoder)
            count = 1 if decoder.draft is None else 2
            assert 0 < model.prefix_bytes == count * decoder.options.prefix_limit <= 2**20 / 8
        assert sum(model.bytes for model in server.models.all) <= 2**20
        listed = get(server, "/v1/models").json()["data"]
        assert [each["prefix_bytes"] for each in listed] == [
            model.prefix_bytes for model in server.models.all
        ]
    size = weight_memory(make_decoder())

    def make_keeper() -> Decoder:
        return make_decoder(prefix_bytes=1000)

    limit = size + 1999  # of target and draft
    with several({"a": make_keeper, "b": make_other}, limit) as server:
        error = refusal(server.ask("a"), 500)
        assert error["code"] == "model_too_large"
        assert f"{size} of weights, 2000 for earlier texts" in error["message"]


def test_an_engine_that_ends_is_started_again() -> None:
    with several({"a": make_decoder, "b": make_other}) as server:
        engine = server.all["a"].worker.engine
        engine.advance = lambda: sys.exit(1)  # type: ignore[method-assign]
        assert refusal(server.ask("a"), 500)["code"] == "decoding"
        assert answered(server.ask("b")) and answered(server.ask("a"))
        assert server.all["a"].loads == 2


def test_streams_are_kept_alive_while_their_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early_streams, "KEEP_ALIVE", 0.02)
    go = threading.Event()
    problems = ["the folder is broken"]

    def make() -> Decoder:
        assert go.wait(120)
        if problems:
            raise ValueError(problems.pop())
        return make_other()

    bodies = [LONG, BODY | {"stream": True, "top_p": 5}]
    with several({"a": make_decoder, "b": make}) as server:
        for index in (0, 0, 1):
            go.clear()
            if index == 1:
                asyncio.run_coroutine_threadsafe(
                    server.models.loader._unload(server.all["b"]), server.all["b"].worker._loop
                ).result(60)
            body = bodies[index] | {"model": "b"}
            with httpx.stream(
                "POST", server.url + PLAIN, json=body, timeout=120, **LOCAL
            ) as response:
                lines = response.iter_lines()
                assert response.status_code == 200 and next(lines) == ": keep-alive"
                go.set()
                events = [line[6:] for line in lines if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            first = json.loads(events[0])
            if "error" not in first:
                assert first["model"] == "b" and '"finish_reason":"length"' in events[-2]
            elif index:
                assert first["error"]["param"] == "top_p" and len(events) == 2
            else:
                assert "broken" in first["error"]["message"] and len(events) == 2


def ask_ollama(server: Several, seen: Callable[[], None]) -> str:
    """Calls `seen` at a record without text, which must come while the model is loaded."""
    texts = []
    with ollama.Client(host=server.url, trust_env=False) as client:
        message = {"role": "user", "content": "hello"}
        for part in client.chat("b", [message], stream=True, options={"num_predict": 4}):
            texts.append(part.message.content or "")
            if not part.done and not texts[-1]:
                seen()
    return "".join(texts)


def ask_ollama_to_load(server: Several, seen: Callable[[], None]) -> str:
    with ollama.Client(host=server.url, trust_env=False) as client:
        for part in client.generate("b", stream=True):
            if not part.done:
                seen()
        return str(part.done_reason)


def ask_anthropic(server: Several, seen: Callable[[], None]) -> str:
    """Its client passes over comments, but has a stream as soon as that begins."""
    http = httpx2.Client(trust_env=False)
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", http_client=http, max_retries=0
    ) as client:
        message: Any = {"role": "user", "content": "hello"}
        stream = client.messages.create(model="b", max_tokens=4, messages=[message], stream=True)
        seen()
        return "".join(event.type for event in stream)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (ask_ollama, ollama.ResponseError),
        (ask_ollama_to_load, ollama.ResponseError),
        (ask_anthropic, anthropic.APIStatusError),
    ],
)
def test_clients_of_other_apis_wait_for_a_model(
    ask: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_streams, "KEEP_ALIVE", 0.02)
    go = threading.Event()
    problems = ["the folder is broken"]

    def make() -> Decoder:
        assert go.wait(120)  # a stream that begins after the load would never let it go on
        if problems:
            raise ValueError(problems.pop())
        return make_decoder()

    with several({"a": make_decoder, "b": make}) as server:
        with pytest.raises(error, match="the folder is broken"):
            ask(server, go.set)
        go.clear()
        assert ask(server, go.set)
        assert go.is_set() and server.all["b"].loads == 1


def test_a_key_is_asked_for_before_anything_is_loaded() -> None:
    with several({"a": make_decoder, "b": make_other}, api_key="secret") as server:
        assert refusal(server.ask("b"), 401) and refusal(get(server, "/metrics"), 401)
        assert get(server, "/health").status_code == 200
        assert server.all["b"].state is State.UNLOADED and not server.all["b"].tickets
        headers = {"Authorization": "Bearer secret"}
        assert answered(post(server, PLAIN, BODY | {"model": "b"}, headers=headers))


@pytest.mark.slow
def test_a_process_with_two_models_drains_both(tmp_path: Path) -> None:
    folder = save_models(tmp_path, target=tiny_models()[0]) / "target"
    options = ("--model", f"one={folder}", "--model", f"two={folder}", "--drain", "1000")
    with started(*options, "--models-memory", "1GiB", "--max-rows", "4") as (process, url):
        seen: set[int | None] = set()
        until(lambda: seen.add(health(url)) or 200 in seen, 250)
        body = LONG | {"forerun_method": "ar"}

        def ask(model: str) -> str:
            return httpx.post(url + PLAIN, json=body | {"model": model}, timeout=200, **LOCAL).text

        def running() -> list[float]:
            text = httpx.get(url + "/metrics", timeout=60, **LOCAL).text
            name = "forerun:num_requests_running{"
            return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, model) for model in ("one", "two")]
            until(lambda: all(running()) or all(future.done() for future in asked), 100)
            os.kill(process.pid, signal.SIGTERM)
            for future in asked:
                assert future.result().endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in future.result()
        assert process.wait(100) == 0
        logged = process.stderr.read()
        assert "loaded one in" in logged and "loaded two in" in logged and "Traceback" not in logged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "embedded"], "--model must be NAME=PATH, not 'embedded'"),
        (["--model", "=embedded"], "NAME=PATH"),
        (["--model", "a="], "NAME=PATH"),
        (["--model", "a=embedded", "--model", "a=embedded"], "2 models have the name 'a'"),
        (["--target", "embedded", "--model", "embedded=embedded"], "the name 'embedded'"),
        (["--model", "a=./nowhere"], "no model folder"),
        (["--model", "a=embedded", "--draft", "embedded"], "--draft belongs to --target"),
        (["--model", "a=embedded", "--model-name", "b"], "--model-name belongs to --target"),
        (["--model", "a=embedded", "--ray", "local"], "--model is for one process"),
        (["--models-memory", "8GiB"], "give --model as well"),
        (["--model", "a=embedded", "--models-memory", "much"], "'much' is no size"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["forerun", "serve", *options])
    assert cli._run() == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
