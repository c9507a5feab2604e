"""Ollama's API for vectors of texts: `POST /api/embed`, and `/api/embeddings` of older clients."""

from __future__ import annotations

import json
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from forerun.api.decoder import Decoder
from forerun.api.requests import encode_text
from forerun.server.embeddings import embed, read_inputs
from forerun.server.errors import blame
from forerun.server.ollama_models import check_context, use_own_name
from forerun.server.ollama_schemas import OllamaEmbedBody, OllamaOldEmbedBody, Options
from forerun.server.requests import CHARACTERS_PER_TOKEN
from forerun.server.schemas import EmbeddingsBody
from forerun.text.chat import checked_text

if TYPE_CHECKING:
    from forerun.server.app import Service

MOST_TOKENS = 4  # of a character: its bytes in UTF-8


def read_texts(body: OllamaEmbedBody, decoder: Decoder) -> list[list[int]]:
    """Return the tokens of each text; none if there is nothing to turn into vectors.

    Texts longer than the context are cut, as in Ollama, unless `truncate` is false. Raises
    ApiError.
    """
    check_context(body.options or Options(), decoder)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if texts in ([], [""]):
        return []
    inputs: list[Any] = [*texts]
    if body.truncate is not False:
        with blame("input"):
            inputs = [_cut(text, decoder) for text in texts]
    return read_inputs(
        EmbeddingsBody.model_construct(input=inputs, dimensions=body.dimensions), decoder
    )


def _cut(text: str, decoder: Decoder) -> str | list[int]:
    """Return a text, or its first tokens if it may not fit into the context. Raises ValueError."""
    context = decoder.target.context
    if context is None or MOST_TOKENS * len(text) < context - 1:  # there may be a begin token
        return text
    checked_text("input", text)
    assert decoder.tokenizer is not None
    tokens = encode_text(text[: CHARACTERS_PER_TOKEN * context], decoder.tokenizer)
    return tokens[: context - 1]


def add_embed(router: APIRouter, service: Service) -> None:
    """Add the endpoints."""

    async def vectors_of(body: OllamaEmbedBody, request: Request) -> tuple[list[Tensor], int]:
        """Return the vectors of a body's texts, and the number of their tokens."""
        use_own_name(body, service)
        rows = await service.read(request, read_texts, body)
        vectors = await embed(service, request, rows) if rows else []
        return vectors, sum(map(len, rows))

    @router.post("/embed")
    async def embed_texts(body: OllamaEmbedBody, request: Request) -> Response:
        read_at = perf_counter()
        vectors, tokens = await vectors_of(body, request)
        about = {
            "model": service.settings.model,
            "total_duration": int(1e9 * (perf_counter() - request.state.arrived)),
            "load_duration": int(1e9 * (read_at - request.state.arrived)),
            "prompt_eval_count": tokens,
        }
        content = await service.readers.call(_embeddings, about, vectors)
        return Response(content, media_type="application/json")

    @router.post("/embeddings")
    async def embed_text(body: OllamaOldEmbedBody, request: Request) -> dict[str, Any]:
        new_body = OllamaEmbedBody.model_construct(
            None, **{name: value for name, value in body if name != "prompt"}, input=body.prompt
        )
        vectors, _ = await vectors_of(new_body, request)
        return {"embedding": vectors[0].tolist() if vectors else []}


def _embeddings(about: dict[str, Any], vectors: Iterable[Tensor]) -> bytes:
    # One by one, because json holds up all threads while it writes.
    lists = [json.dumps(vector.tolist()) for vector in vectors]
    return f'{json.dumps(about)[:-1]},"embeddings":[{",".join(lists)}]}}'.encode()
