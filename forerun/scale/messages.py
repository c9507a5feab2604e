"""What goes between the app and its replicas, and how a replica decodes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.requests import requests
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.model.kv_cache import BLOCK
from forerun.sampling.params import SamplingParams
from forerun.server.errors import ApiError
from forerun.server.readers import Readers
from forerun.server.worker import Worker

BEAT = 2.0  # seconds without a step, after which a replica reports that it is there

_OWN = ("eos", "seed", "stream", "plain", "logprobs", "prompt_logprobs", "salt")

Steps = list[tuple[int, Step]]  # which request, and its step


@dataclass(frozen=True)
class SentRequest:
    """A request that can be sent.

    Attributes:
        tokens: the prompt.
        params: what the request was made of; own: its attributes that win over those.
        emitted: its output so far, of replicas that are gone.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    own: Mapping[str, Any]
    emitted: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, seed: int) -> SentRequest:
        """`seed`: for a sampled request without one, as it could not go on elsewhere."""
        assert request.params is not None
        own = {name: getattr(request, name) for name in _OWN}
        if own["seed"] is None and not request.sampler.greedy:
            own["seed"] = seed
        return cls(tuple(request.tokens), request.params, own)


def rebuild(sent: Sequence[SentRequest], decoder: Decoder) -> list[Request]:
    """Return the requests, which have one prompt and one body. Raises what `forerun.api.requests.requests` does.

    They are made for the prompt alone, so that penalties and grammars count emitted tokens as output. Then they go on
    after those. Seeds need nothing: what is sampled depends on the position.
    """
    first = sent[0]
    made = requests([first.tokens] * len(sent), first.params, decoder.target, decoder.tokenizer)
    found = []
    for request, each in zip(made, sent, strict=True):
        own = {**each.own, "prompt_logprobs": each.own["prompt_logprobs"] and not each.emitted}
        left = request.max_new_tokens - len(each.emitted)
        found.append(replace(request, tokens=[*each.tokens, *each.emitted], max_new_tokens=left, **own))
    return found


async def decode(worker: Worker, readers: Readers, sent: Sequence[SentRequest]) -> AsyncGenerator[Steps, None]:
    """Yield the steps of requests with one prompt, and empty lists at the beginning and every BEAT without a step.

    Raises ApiError for what ends the body, and what the worker failed with if it can do no more.
    """
    yield []
    assert worker.decoder is not None
    reading = asyncio.ensure_future(readers.call(rebuild, sent, worker.decoder))  # a grammar may take seconds
    try:
        while not (await asyncio.wait([reading], timeout=BEAT))[0]:
            yield []
    finally:
        if not reading.cancel() and not reading.cancelled():
            reading.exception()  # else asyncio would log it, if the reader went away meanwhile
    try:
        job = worker.submit(reading.result(), perf_counter())
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    try:
        while not job.ended:
            try:
                found = await job.wait(BEAT)
            except ApiError as error:
                raise worker.failed or error from None
            yield [(index, step) for index, step, _ in found]
    finally:
        worker.cancel(job)


@dataclass(frozen=True)
class ModelInfo:
    """What the app has to know of the replicas' model.

    Attributes:
        capacity: requests that a replica holds, running and waiting; None for any number.
        positions: of keys and values that a request may have, prompt and output; None for any number.
    """

    tokenizer: PreTrainedTokenizerBase | None
    config: GenerationConfig
    context: int | None
    vocab_size: int
    capacity: int | None
    positions: int | None = None

    @classmethod
    def of(cls, worker: Worker) -> ModelInfo:
        """`worker` is ready."""
        assert worker.decoder is not None
        engine, target = worker.engine, worker.decoder.target
        blocks = None if engine.kv_memory is None else engine.kv_memory // target.position_bytes // BLOCK
        return cls(
            tokenizer=worker.decoder.tokenizer,
            config=target.model.generation_config,
            context=target.context,
            vocab_size=target.vocab_size,
            capacity=None if engine.max_queue is None else engine.max_rows + engine.max_queue,
            positions=None if blocks is None else blocks * BLOCK - engine.drafter.spread,
        )

    def decoder(self) -> Decoder:
        """Return what reads bodies in place of a Decoder. It cannot decode."""
        model = SimpleNamespace(generation_config=self.config)
        target = SimpleNamespace(context=self.context, vocab_size=self.vocab_size, model=model)
        return cast(Decoder, SimpleNamespace(target=target, tokenizer=self.tokenizer))
