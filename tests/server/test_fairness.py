"""One heavy request beside others.

Bodies that take long to read, answers with millions of numbers, and how they end.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from forerun.engine.step import Step
from forerun.sampling.probabilities import Logprob
from forerun.server import answers, logprobs, requests
from forerun.server.errors import ApiError
from forerun.server.job import Job
from forerun.server.logprobs import SLICE, LogprobsJson, TokenTexts
from forerun.server.readers import READERS
from tests.support.local import LOCAL
from tests.support.serving import (
    CHAT,
    HELLO,
    PLAIN,
    Live,
    events,
    figures,
    leave,
    live,
    make_decoder,
    post,
    until,
)
from tests.support.toys import tiny_tokenizer

HEAVY = {"prompt": "heavy", "max_tokens": 2}


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Holds up the reading of heavy prompts until it is let go; notes what is read."""
    gate = SimpleNamespace(go=threading.Event(), read=[])
    prepare = requests.prepare_completion

    def hold(body: Any, decoder: Any) -> Any:
        gate.read.append(body.prompt)
        assert body.prompt != "heavy" or gate.go.wait(120)
        return prepare(body, decoder)

    monkeypatch.setattr(requests, "prepare_completion", hold)
    yield gate
    gate.go.set()


@pytest.mark.slow
def test_a_body_that_takes_long_to_read_holds_up_no_other(server: Live, reading: Any) -> None:
    readers = server.service.readers
    with ThreadPoolExecutor(READERS) as pool:
        heavy = [pool.submit(post, server, PLAIN, HEAVY) for _ in range(READERS - 1)]
        until(lambda: reading.read.count("heavy") == READERS - 1)
        response = httpx.post(
            server.url + PLAIN,
            json={"prompt": "light", "max_tokens": 2},
            timeout=60,
            **LOCAL,
        )
        assert response.status_code == 200 and not any(future.done() for future in heavy)
        heavy.append(pool.submit(post, server, PLAIN, HEAVY))
        until(lambda: reading.read.count("heavy") == READERS)
        for path in (PLAIN, "/tokenize"):  # what nobody waits for any more is not read
            leave(server, path, {"prompt": "gone"}, lambda: readers.calls == READERS + 1)
            until(lambda: readers.calls == READERS)
        reading.go.set()
        assert all(future.result().status_code == 200 for future in heavy)
    until(lambda: not readers.calls)
    assert "gone" not in reading.read and not server.service.open


@pytest.mark.slow
def test_times_and_their_limit_count_from_when_a_request_came(server: Live, reading: Any) -> None:
    with live(max_seconds=0.3) as hasty:
        for stream in (False, True):
            found = post(hasty, PLAIN, HEAVY | {"stream": stream})
            assert found.status_code == 504 and found.json()["error"]["code"] == "timeout"
    before = len(reading.read)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, PLAIN, HEAVY)
        until(lambda: len(reading.read) > before)
        time.sleep(0.2)
        reading.go.set()
        metrics = asked.result().json()["metrics"]
    assert metrics["time_to_first_token_ms"] - metrics["queue_time_ms"] > 200


MANY = [
    Logprob(5 + at % 3, -0.5, tuple((token, -1.0) for token in range(20)))
    for at in range(40 * SLICE)
]


@pytest.mark.parametrize("is_chat", [True, False])
def test_many_log_probabilities_leave_others_their_turns(
    is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    decoded = list[int]()
    sizes = list[int]()
    decode, as_json = tokenizer.decode, logprobs.as_json
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **more: decoded.extend(ids) or decode(ids, **more)
    )
    monkeypatch.setattr(
        logprobs, "as_json", lambda content: sizes.append(len(content)) or as_json(content)
    )

    async def main() -> tuple[bytes, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        spelled = LogprobsJson(TokenTexts(tokenizer), is_chat)
        await spelled.add(MANY)
        task.cancel()
        return spelled.take(), turns

    encoded, turns = asyncio.run(main())
    assert turns >= 39 and max(sizes) <= SLICE
    assert sorted(decoded) == sorted(set(decoded))  # each token once
    content = json.loads(encoded)
    if is_chat:
        ChoiceLogprobs.model_validate(content, strict=True)
        assert [entry["token"] for entry in content["content"]] == [
            decode([entry.token]) for entry in MANY
        ]
    else:
        Logprobs.model_validate(content)
        ends = [
            at + len(text)
            for at, text in zip(content["text_offset"], content["tokens"], strict=True)
        ]
        assert content["text_offset"] == [0, *ends[:-1]] and len(content["top_logprobs"]) == len(
            MANY
        )


def test_no_large_answer_is_made_in_one_go(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    as_json = logprobs.as_json
    for module in (answers, logprobs):
        monkeypatch.setattr(
            module, "as_json", lambda content: written.append(as_json(content)) or written[-1]
        )
    body = {
        "messages": HELLO,
        "max_tokens": 200,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    found = post(server, CHAT, body)
    assert len(found.json()["choices"][0]["logprobs"]["content"]) == 200
    assert len(found.content) > 200_000 > 5 * max(map(len, written))


def test_every_choice_begins_with_its_scored_prompt(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.worker.engine.target, "fresh", None)  # there is no second cache
    body = {
        "prompt": ["the cat", "def add(a"],
        "n": 3,
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "seed": 1,
    }
    whole = post(server, PLAIN, body).json()["choices"]
    tokenizer = make_decoder().tokenizer
    for at, choice in enumerate(whole):
        prompt = ("the cat", "def add(a")[at // 3]
        size = len(tokenizer(prompt)["input_ids"])
        scores, first = choice["logprobs"], whole[at // 3 * 3]["logprobs"]
        for name in ("tokens", "text_offset"):
            assert scores[name][:size] == first[name][:size] and len(scores[name]) == size + 3
        assert scores["token_logprobs"][0] is None and None not in scores["token_logprobs"][1:]
        assert scores["text_offset"][size] == len(prompt)
        assert "".join(scores["tokens"][:size]) == prompt == choice["text"][: len(prompt)]
    streamed: list[dict[str, list[Any]]] = [{} for _ in whole]
    for event in events(post(server, PLAIN, body | {"stream": True})):
        (choice,) = event["choices"]
        for name, values in choice["logprobs"].items():
            streamed[choice["index"]].setdefault(name, []).extend(values)
    for name in ("tokens", "text_offset"):
        assert [entry[name] for entry in streamed] == [entry["logprobs"][name] for entry in whole]


def ended(server: Live) -> dict[str, float]:
    """How many answers have ended, by how."""
    samples = figures(server).items()
    return {
        name.split('"')[1]: value
        for name, value in samples
        if name.startswith("forerun:request_success_total{")
    }


@pytest.mark.slow
def test_answers_are_counted_by_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "n": 2}
    steps = answers._steps

    async def slowly(job: Any, until: float) -> AsyncIterator[Any]:
        """As a slow reader takes them: all has been decoded, and none of it was fetched."""
        while job.open:
            await asyncio.sleep(0.01)
        while True:
            yield []
            await asyncio.sleep(0.01)

    with live(max_seconds=60) as server:
        assert post(server, PLAIN, body).status_code == 200 and ended(server) == {"length": 2}
        monkeypatch.setattr(answers, "_steps", slowly)
        with httpx.stream(
            "POST", server.url + PLAIN, json=body | {"stream": True}, **LOCAL
        ) as response:
            next(response.iter_lines())
        until(lambda: not server.service.open)
        assert ended(server) == {"length": 2, "abort": 2}
        monkeypatch.setattr(answers, "_steps", steps)
        monkeypatch.setattr(server.worker.engine, "advance", lambda: time.sleep(0.01))
        object.__setattr__(server.service.settings, "max_seconds", 0.2)
        found = post(server, PLAIN, body)
        assert (found.status_code, found.json()["error"]["code"]) == (504, "timeout")
        assert "took too long" in found.text and found.headers["x-should-retry"] == "false"
        assert (
            events(post(server, PLAIN, body | {"stream": True}))[-1]["error"]["code"] == "timeout"
        )
        until(lambda: not server.service.open)
        assert ended(server) == {"length": 2, "abort": 2, "timeout": 4}


def test_a_job_loses_nothing() -> None:
    """Its steps come in order, and its error after them."""
    step = Step(id=0, number=0, rows=1)
    first, second = ((index, step, 0.0) for index in (0, 1))

    async def run() -> None:
        job = Job(0.0)
        job.open = {7: 0}
        assert await job.wait(0.01) == [] and not job.ended
        waiting = asyncio.ensure_future(job.wait(60))
        await asyncio.sleep(0)
        for each in (first, second):
            job.put(*each)
        assert await waiting == [first, second]
        job.put(*second)
        job.fail(ApiError(500, "an end"))
        assert not job.ended and await job.wait(0) == [second]
        with pytest.raises(ApiError, match="an end"):
            await job.wait(60)

        job = Job(0.0)  # what came in time is given out late
        job.put(0, replace(step, finish_reason="stop"), 0.0)
        assert [len(found) async for found in answers._steps(job, 0.0)] == [1]
        job.open = {7: 0}
        job.put(*first)
        given = answers._steps(job, 0.0)  # the rest has not come in time
        assert await anext(given) == [first]
        with pytest.raises(ApiError, match="took too long"):
            await anext(given)

    asyncio.run(run())


def test_answers_have_the_fields_that_clients_know(server: Live) -> None:
    more = {"max_tokens": 5, "n": 2}
    chat = post(
        server, CHAT, more | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    ).json()
    plain = post(server, PLAIN, more | {"prompt": "the cat", "logprobs": 2}).json()
    for answer, kind, keys in ((chat, ChatCompletion, {"message"}), (plain, Completion, {"text"})):
        kind.model_validate(answer, strict=True)
        assert answer.keys() == {
            "id",
            "object",
            "created",
            "model",
            "choices",
            "usage",
            "metrics",
            "timings",
        }
        assert all(
            choice.keys() == {"index", "finish_reason", "logprobs"} | keys
            for choice in answer["choices"]
        )
    assert chat["choices"][0]["message"].keys() == {"role", "content", "refusal"}
