"""Vectors of texts: their numbers, and what runs beside them."""

import asyncio
import base64
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import normalize
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.api.decoder import Decoder
from forerun.model.causal_lm import CausalLM
from forerun.server import embeddings
from forerun.server.errors import ApiError
from tests.support.serving import (
    NAME,
    PLAIN,
    Live,
    client_of,
    events,
    figures,
    held,
    leave,
    live,
    make_decoder,
    post,
    refusal,
    until,
)
from tests.support.toys import tiny, tiny_tokenizer

PATH = "/v1/embeddings"
LONG = [token % 290 + 5 for token in range(400)]  # two large chunks and more


def make_exact() -> Decoder:
    """A model whose sizes the forward in C takes."""
    sizes = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(sizes)
    return Decoder(model, tiny_tokenizer(), guard=False)


def make_eager() -> Decoder:
    return Decoder(tiny("gpt2", vocab=300, context=512), tiny_tokenizer(), guard=False)


MAKES = {"bitwise": make_exact, "rounding": make_eager}


@pytest.fixture(scope="module", params=list(MAKES))
def either(request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server whose bits do not depend on what runs together, and one whose bits do."""
    with live(MAKES[request.param]) as server:
        decoder = server.worker.decoder
        assert decoder is not None and decoder.target.exact == request.param
        yield server


def expected(server: Live, tokens: list[int], pooling: str) -> torch.Tensor:
    """What transformers' own forward gives."""
    decoder = server.worker.decoder
    assert decoder is not None
    with torch.no_grad():
        output = decoder.target.model(torch.tensor([tokens]), output_hidden_states=True)
    states = output.hidden_states[-1][0]
    return normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


def vectors(server: Live, given: Any, **options: Any) -> list[list[float]]:
    response = post(server, PATH, {"input": given, **options})
    assert response.status_code == 200, response.text[:500]
    data = response.json()["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    return [item["embedding"] for item in data]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_transformers(either: Live, pooling: str) -> None:
    rows = [[5, 6, 7], LONG, [9], LONG[:64]]
    for row, vector in zip(rows, vectors(either, rows, pooling=pooling), strict=True):
        wanted = expected(either, row, pooling)
        assert torch.allclose(torch.tensor(vector), wanted, atol=1e-5)
        assert abs(sum(number * number for number in vector) - 1) < 1e-5


def test_openais_client_reads_them(server: Live) -> None:
    tokenizer = server.worker.decoder.tokenizer  # type: ignore[union-attr]
    assert tokenizer is not None
    before = figures(server)["forerun:prompt_tokens_total"]
    with client_of(server) as client:
        # Without a format the client asks for base64, and decodes it.
        packed = client.embeddings.create(model=NAME, input=["the cat", "a dog"])
        plain = client.embeddings.create(model=NAME, input="the cat", encoding_format="float")
    (wanted,) = tokenizer(["the cat"])["input_ids"]
    vector = plain.data[0].embedding
    assert torch.allclose(torch.tensor(vector), expected(server, wanted, "mean"), atol=1e-5)
    assert packed.data[0].embedding == vector != packed.data[1].embedding
    assert packed.model == NAME and packed.object == "list"
    tokens = sum(map(len, tokenizer(["the cat", "a dog"])["input_ids"]))
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == tokens
    assert plain.model_extra == {"pooling": "mean"}
    spent = figures(server)["forerun:prompt_tokens_total"] - before
    assert spent == tokens + len(wanted)


def test_base64_is_float32_in_little_endian(server: Live) -> None:
    (text,) = vectors(server, [5, 6], encoding_format="base64", dimensions=32)
    (numbers,) = vectors(server, [5, 6], encoding_format=None, dimensions=None)
    assert list(struct.unpack("<32f", base64.b64decode(text))) == numbers  # type: ignore[arg-type]


def test_the_numbers_do_not_depend_on_what_else_runs(either: Live) -> None:
    rows = [LONG, [5, 6, 7], [8] * 40, [9, 10], LONG[:300]]
    alone = [vectors(either, row)[0] for row in rows]
    assert vectors(either, rows) == alone
    body = {"prompt": [3, 4], "max_tokens": 400, "ignore_eos": True, "stream": True}
    engine = either.worker.engine
    with ThreadPoolExecutor(3) as pool:
        with held(engine) as go:
            stream = pool.submit(post, either, PLAIN, body)
            until(lambda: either.rows)
            asked = [pool.submit(vectors, either, given) for given in (rows, rows[::-1])]
            until(lambda: len(either.worker._side_results) == 2)
            go.set()
        assert [asked[0].result(), asked[1].result()[::-1]] == [alone, alone]
        assert len(events(stream.result())) > 10


def test_a_stream_steps_between_all_chunks(server: Live) -> None:
    engine = server.worker.engine
    log: list[tuple[str, bool]] = []
    states = CausalLM.states
    advance = type(engine).advance

    def note_states(*args: Any) -> Any:
        log.append(("states", bool(engine.running)))
        return states(*args)

    def note_step(*args: Any) -> None:
        log.append(("step", True))
        advance(*args)

    body = {"prompt": [3, 4], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        patch.object(CausalLM, "states", note_states),
        patch.object(type(engine), "advance", note_step),
        ThreadPoolExecutor(3) as pool,
    ):
        with held(engine) as go:
            stream = pool.submit(post, server, PLAIN, body)
            until(lambda: server.rows)
            asked = [pool.submit(vectors, server, [LONG] * 2) for _ in range(2)]
            until(lambda: len(server.worker._side_results) == 2)
            go.set()
        assert [len(each.result()) for each in asked] == [2, 2]
        stream.result()
    beside = [first for first, _ in pairwise(log) if first == ("states", True)]
    assert len(beside) > 10
    assert (("states", True), ("states", True)) not in [*pairwise(log)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5] * 512}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a", "dimensions": 16}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ],
)
def test_mistakes_are_named(server: Live, body: Any, param: str) -> None:
    assert refusal(post(server, PATH, body))["param"] == param
    assert refusal(post(server, PATH, {"input": "a", "model": "x"}), 404)["param"] == "model"


def test_an_input_must_fit_the_memory_for_keys_and_values() -> None:
    positions = make_decoder().target.position_bytes
    with live(lambda: make_decoder(kv_memory=1024 * positions)) as server:
        assert len(vectors(server, [LONG[:200]])) == 1
        error = refusal(post(server, PATH, {"input": LONG}))
        assert error["param"] == "input" and "kv_memory" in error["message"]


def test_states_that_are_no_numbers_are_an_error_and_the_rest_goes_on(server: Live) -> None:
    with patch.object(embeddings, "normalize", lambda total, dim: total * float("nan")):
        assert refusal(post(server, PATH, {"input": "a"}), 500)["code"] == "decoding"
    assert len(vectors(server, "a")) == 1


def test_work_for_clients_that_have_gone_is_broken_off_and_the_end_tells_the_others() -> None:
    with live(partial(make_decoder, max_queue=2)) as server, ThreadPoolExecutor(3) as pool:
        worker = server.worker
        ask = partial(post, server, PATH, {"input": [LONG] * 2048})
        begun = threading.Event()
        go = threading.Event()
        states = CausalLM.states

        def wait(*args: Any) -> Any:
            begun.set()
            assert go.wait(120)
            return states(*args)

        with patch.object(CausalLM, "states", wait):
            leave(server, PATH, {"input": [LONG]}, begun.is_set)
        until(lambda: not worker._side_results)
        go.set()
        until(lambda: not worker._side_results and not worker.session._side_works)
        asked = [pool.submit(ask) for _ in range(2)]
        until(lambda: len(worker._side_results) == 2)
        full = ask()
        assert refusal(full, 503)["code"] == "queue_full" and full.headers["Retry-After"]
        loop = worker._loop
        assert loop is not None and server.service.open == 2
        loop.call_soon_threadsafe(worker.give_up, ApiError(503, "the end", code="shutting_down"))
        assert {refusal(each.result(), 503)["code"] for each in asked} == {"shutting_down"}
        until(lambda: not worker.session._side_works and not server.service.open)


def test_work_of_a_caller_that_is_cancelled_is_not_advanced(server: Live) -> None:
    pieces: list[int] = []

    def work() -> Any:
        while True:
            pieces.append(0)
            yield

    async def ask() -> None:
        task = asyncio.ensure_future(server.worker.between_steps(work()))
        while not pieces:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    until(lambda: not server.worker.session._side_works)
    count = len(pieces)
    assert len(vectors(server, "a")) == 1 and len(pieces) == count
