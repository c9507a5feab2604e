"""POST /v1/embeddings: texts as vectors, from the states that the target's LM head reads.

The vector of a text is the mean of the states at all of its tokens, or the last of them, scaled to
length 1. The engine's thread computes it in chunks between its steps. The numbers depend on the
text alone, not on what else runs.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from torch import Tensor
from torch.nn.functional import normalize

from forerun.api.decoder import Decoder
from forerun.engine.session import SIDE_TURNS
from forerun.failures import NotNumbersError
from forerun.model.causal_lm import CausalLM
from forerun.server.errors import blame
from forerun.server.requests import as_prompts, encode_prompts
from forerun.server.schemas import EmbeddingsBody

if TYPE_CHECKING:
    from forerun.server.app import Service

_LOG = logging.getLogger("forerun.server")

Pooling = Literal["mean", "last"]

DEFAULT: Pooling = "mean"
MAX_INPUTS = 2048  # as in OpenAI's API
SUM_BLOCK = 32  # states are summed in blocks of so many, so that the sum does not depend on chunks
# Numbers of tokens that are run at once. All are multiples of SUM_BLOCK.
BUSY_CHUNK = 32  # while requests are decoded, whose steps wait for it
IDLE_CHUNK = 256
FIXED_CHUNK = 64  # of models whose rounding depends on what is run together


def read_inputs(body: EmbeddingsBody, decoder: Decoder) -> list[list[int]]:
    """Return the tokens of each input. Raises ApiError."""
    target = decoder.target
    with blame("model"):
        width = target.width("head")
    with blame("dimensions"):
        if body.dimensions not in (None, width):
            raise ValueError(
                f"dimensions must be {width}, the size of this model's states, "
                f"not {body.dimensions}"
            )
    with blame("input"):
        rows = encode_prompts(as_prompts(body.input), decoder, MAX_INPUTS, "input")
        longest = max(map(len, rows))
        budget = decoder.options.kv_memory
        # Together, the inputs whose turns alternate take at most as much again as the requests.
        if budget is not None and not target.fits(SIDE_TURNS - 1, longest, budget):
            raise ValueError(
                f"an input of {longest} tokens needs more than a quarter of the {budget} bytes of "
                "kv_memory"
            )
    return rows


def pooled(
    target: CausalLM,
    rows: Sequence[Sequence[int]],
    pooling: Pooling,
    is_busy: Callable[[], bool],
) -> Generator[None, None, list[Tensor]]:
    """Return the vector [d] of each row of tokens, computed in chunks with a `yield` after each.

    Short rows share a chunk. Where that would change the rounding, each row is run alone.

    Args:
        target: the model; its own sequences are not touched.
        rows: the tokens of each text.
        pooling: "mean" of the states at all tokens, or the "last" one.
        is_busy: tells before each chunk whether steps wait for it.

    Raises:
        NotNumbersError: the model's states are not finite.
    """
    is_exact = target.exact == "bitwise"

    def chunk() -> int:
        if not is_exact:
            return FIXED_CHUNK
        return BUSY_CHUNK if is_busy() else IDLE_CHUNK

    model = target.fresh()
    waiting = deque(rows)
    vectors: list[Tensor] = []
    while waiting:
        group = _next_rows(waiting, chunk() if is_exact else 0)
        pools = [_Pool(pooling) for _ in group]
        for id, row in enumerate(group):
            model.add(id, len(row))
        start = 0
        while start < max(map(len, group)):
            size = chunk()
            ids = [id for id, row in enumerate(group) if start < len(row)]
            parts = [group[id][start : start + size] for id in ids]
            for id, states in zip(ids, model.states(ids, parts), strict=True):
                pools[id].add(states)
            start += size
            yield
        model.reset()
        vectors += [pool.vector() for pool in pools]
    return vectors


def _next_rows(waiting: deque[Sequence[int]], most: int) -> list[Sequence[int]]:
    """Take rows of at most `most` tokens together from a queue, but at least one row."""
    group = [waiting.popleft()]
    room = most - len(group[0])
    while waiting and len(waiting[0]) <= room:
        room -= len(waiting[0])
        group.append(waiting.popleft())
    return group


class _Pool:
    """The states of one text, added up or the last one kept."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Add the states [n, d] of the next n tokens.

        n is a multiple of SUM_BLOCK except at the end of the text.
        """
        if self._pooling == "last":
            self._total = states[-1].double()
            return
        for block in states.double().split(SUM_BLOCK):
            total = block.sum(0)
            self._total = total if self._total is None else self._total + total

    def vector(self) -> Tensor:
        """Return the vector [d] of float32 on the CPU. Raises NotNumbersError."""
        assert self._total is not None
        # The mean has the direction of the sum, and the length becomes 1.
        vector = normalize(self._total, dim=0).float().cpu()
        if not vector.isfinite().all():
            raise NotNumbersError("the model's states are not numbers")
        return vector


def _answer(body: EmbeddingsBody, vectors: Sequence[Tensor], model: str, tokens: int) -> bytes:
    """Return OpenAI's list of embeddings as JSON."""
    items = []
    for index, vector in enumerate(vectors):
        # One by one, because json holds up all threads while it writes.
        embedding: str | list[float] = vector.tolist()
        if body.encoding_format == "base64":
            embedding = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        item = {"object": "embedding", "index": index, "embedding": embedding}
        items.append(json.dumps(item, separators=(",", ":")))
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    head = json.dumps({"object": "list", "model": model, "pooling": body.pooling or DEFAULT})
    return f'{head[:-1]},"usage":{usage},"data":[{",".join(items)}]}}'.encode()


async def embed(
    service: Service, request: Request, rows: list[list[int]], pooling: Pooling = DEFAULT
) -> list[Tensor]:
    """Return the vector [d] of each row of tokens of a request. Raises ApiError."""
    started_at = perf_counter()
    tokens = sum(map(len, rows))
    service.metrics.prompt_tokens.inc(tokens)
    worker = service.worker
    target = service.decoder().target
    work = pooled(target, rows, pooling, lambda: worker.engine.busy)
    vectors = await service.compute(request, worker.between_steps(work))
    id = request.state.request_id
    took = 1000 * (perf_counter() - started_at)
    _LOG.info("request=%r embeddings=%d prompt=%d total_ms=%.1f", id, len(rows), tokens, took)
    return vectors


def add_embeddings(app: FastAPI, service: Service) -> None:
    """Add the endpoint."""

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        rows = await service.read(request, read_inputs, body)
        vectors = await embed(service, request, rows, body.pooling or DEFAULT)
        name = service.settings.model
        tokens = sum(map(len, rows))
        content = await service.readers.call(_answer, body, vectors, name, tokens)
        return Response(content, media_type="application/json")
