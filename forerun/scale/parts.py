"""What travels between the app and its replicas, and how a replica goes on with it."""

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
from forerun.engine.engine import Engine, Step
from forerun.engine.sequence import Request
from forerun.sampling.params import SamplingParams
from forerun.server.errors import ApiError
from forerun.server.readers import Readers
from forerun.server.worker import Worker

BEAT = 2.0  # seconds without a step, behind which a replica says that it is there

_OWN = ("eos", "seed", "stream", "plain", "logprobs", "prompt_logprobs", "salt")

Found = list[tuple[int, Step]]  # which part, and its step


@dataclass(frozen=True)
class Part:
    """A request that can be sent.

    Attributes:
        tokens: the prompt.
        params: what the request was made of; own: its attributes that win over those.
        emitted: what came after the prompt, on replicas that are gone.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    own: Mapping[str, Any]
    emitted: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, seed: int) -> Part:
        """`seed`: for what is sampled and has none, as it could not go on elsewhere."""
        assert request.params is not None
        own = {name: getattr(request, name) for name in _OWN}
        if own["seed"] is None and not request.sampler.greedy:
            own["seed"] = seed
        return cls(tuple(request.tokens), request.params, own)


def remade(parts: Sequence[Part], decoder: Decoder) -> list[Request]:
    """The requests of parts with one prompt and one body. Raises what `forerun.api.requests.requests` does.

    They are made for the prompt alone: so penalties and grammars count what was emitted as output. Then they go on
    after it. Seeds need nothing: what is sampled depends on the position.
    """
    first = parts[0]
    made = requests([first.tokens] * len(parts), first.params, decoder.target, decoder.tokenizer)
    found = []
    for request, part in zip(made, parts, strict=True):
        own = {**part.own, "prompt_logprobs": part.own["prompt_logprobs"] and not part.emitted}
        left = request.max_new_tokens - len(part.emitted)
        found.append(replace(request, tokens=[*part.tokens, *part.emitted], max_new_tokens=left, **own))
    return found


async def decoded(worker: Worker, readers: Readers, parts: Sequence[Part]) -> AsyncGenerator[Found, None]:
    """The steps of parts with one prompt, and empty lists at the beginning and in between.

    Raises ApiError for what ends the body, and what the worker failed with where it can do no more.
    """
    yield []
    assert worker.decoder is not None
    reading = asyncio.ensure_future(readers.call(remade, parts, worker.decoder))  # a grammar may take seconds
    try:
        while not (await asyncio.wait([reading], timeout=BEAT))[0]:
            yield []
    finally:
        if not reading.cancel() and not reading.cancelled():  # it has ended; else nobody waits for it any more
            reading.exception()  # which asyncio would call unheard, where the reader went away meanwhile
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
class Face:
    """What the app has to know of the model that replicas have.

    Attributes:
        room: requests that a replica holds, running and waiting; None for any number.
        positions: of keys and values that a request may take; None for any number.
        spread: those that it takes beside its tokens.
    """

    tokenizer: PreTrainedTokenizerBase | None
    config: GenerationConfig
    context: int | None
    vocab_size: int
    room: int | None
    positions: int | None
    spread: int

    @classmethod
    def of(cls, decoder: Decoder, engine: Engine) -> Face:
        target, room = decoder.target, None if engine.max_queue is None else engine.max_rows + engine.max_queue
        positions = None
        if engine.kv_memory is not None:  # the most that fit: they fit up to some number, and no more from there on
            low, high = 0, target.context or 2**24
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if target.fits(0, middle, engine.kv_memory) else (low, middle - 1)
            positions = low
        spread = engine.drafter.spread
        config = target.model.generation_config
        return cls(decoder.tokenizer, config, target.context, target.vocab_size, room, positions, spread)

    def decoder(self) -> Decoder:
        """Return what reads bodies in place of a Decoder. It cannot decode."""
        target = SimpleNamespace(
            context=self.context,
            vocab_size=self.vocab_size,
            model=SimpleNamespace(generation_config=self.config),
        )
        return cast(Decoder, SimpleNamespace(target=target, tokenizer=self.tokenizer))

    def reserve(self, request: Request) -> int:
        """Positions of keys and values that a request takes."""
        limit = len(request.tokens) + request.max_new_tokens
        return max(min(limit, self.context or limit), len(request.tokens) + 1) + self.spread
