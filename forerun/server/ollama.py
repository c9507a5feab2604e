"""Ollama's API: its bodies are read as those of chats and plain prompts under other names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from forerun.api.decoder import Decoder
from forerun.server.errors import ApiError, blame
from forerun.server.model_facts import ModelFacts
from forerun.server.ollama_answers import OllamaAnswer, record, renamed
from forerun.server.ollama_embeddings import add_embed
from forerun.server.ollama_messages import check_images, conversation
from forerun.server.ollama_models import add_models, check_context, use_own_name
from forerun.server.ollama_schemas import (
    OllamaBody,
    OllamaChatBody,
    OllamaErrorBody,
    OllamaGenerateBody,
    Options,
)
from forerun.server.requests import Prepared, prepare_chat, prepare_completion, read_tools
from forerun.server.schemas import ChatBody, CompletionBody, Thinking
from forerun.text.chat import has_template
from forerun.text.thinking import has_marks, thinking_switch

if TYPE_CHECKING:
    from forerun.server.app import Service

CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"
RECORDS = "application/x-ndjson"
# Ollama's defaults. Its penalty of 1.1 looks at the last 64 tokens only, so it is left out.
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_NO_LIMIT = -1


def prepare(body: OllamaBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the request of a body. Raises ApiError, which names a chat's fields."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    if isinstance(body, OllamaGenerateBody):
        with blame("images"):
            check_images(body.images)
        if _is_plain(body, decoder):
            return _prepare_plain(body, decoder)
    return prepare_chat(_chat_body(body, decoder), decoder, parser)


def _check(body: OllamaBody, decoder: Decoder, parser: str | None) -> None:
    """Check a body that asks for nothing. Raises ApiError, which names a chat's fields."""
    if isinstance(body, OllamaGenerateBody):
        with blame("images"):
            check_images(body.images)
    read_tools(_chat_body(body, decoder), decoder, parser)


def _is_plain(body: OllamaGenerateBody, decoder: Decoder) -> bool:
    """Return whether a prompt is continued. A model without a chat template answers no other."""
    return bool(body.raw or body.suffix) or not (has_template(decoder.tokenizer) or body.system)


def _prepare_plain(body: OllamaGenerateBody, decoder: Decoder) -> Prepared:
    for name in ("system", "think"):
        if vars(body)[name]:
            raise ApiError(400, f"{name} cannot be given where no chat template is used", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plain_body = CompletionBody.model_construct(
        prompt=body.prompt or "",
        suffix=body.suffix,
        logprobs=logprobs,
        **_sampling(body, decoder),
    )
    return prepare_completion(plain_body, decoder)


def _chat_body(body: OllamaBody, decoder: Decoder) -> ChatBody:
    """Return a chat's body that asks for the same. Raises ApiError."""
    return ChatBody.model_construct(
        messages=_messages(body),
        tools=body.tools if isinstance(body, OllamaChatBody) else None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **_sampling(body, decoder),
        **_thinking(body.think, decoder),
    )


def _messages(body: OllamaBody) -> Any:
    """Return the conversation of a body; that of a prompt has a message or two."""
    if isinstance(body, OllamaChatBody):
        with blame("messages"):
            return conversation(body.messages)
    assert isinstance(body, OllamaGenerateBody)
    messages = [{"role": "user", "content": body.prompt or ""}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return messages


def _sampling(body: OllamaBody, decoder: Decoder) -> dict[str, Any]:
    """Return the options and the form of a body as fields of a chat. Raises ApiError.

    Options have the names of a chat's fields, but for the most new tokens. What has no such name
    changes no answer.
    """
    options = body.options or Options()
    check_context(options, decoder)
    given = vars(options) | {"max_tokens": options.num_predict}
    fields = {name: value for name, value in given.items() if name in ChatBody.model_fields}
    for name, default in {**_DEFAULTS, "max_tokens": _NO_LIMIT}.items():
        if fields[name] is None:
            fields[name] = default
    with blame("format"):
        return fields | {"response_format": _response_format(body.format)}


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None or given == "":
        return None
    if given == "json":
        return {"type": "json_object"}
    if not isinstance(given, dict):
        raise ValueError('format must be "json" or a JSON schema')
    return {"type": "json_schema", "json_schema": {"schema": given}}


def _thinking(think: Any, decoder: Decoder) -> dict[str, Any]:
    """Return the fields of a chat that ask for thoughts. Raises ApiError.

    A model whose template only names their marks thinks without being asked.
    """
    if think is None:
        return {}
    if isinstance(think, str) and 0 < len(think) <= 40:
        return {"reasoning_effort": think}
    if not isinstance(think, bool):
        raise ApiError(400, "think must be true, false or a level such as low", "think")
    template = ModelFacts(decoder).template
    if think and thinking_switch(template) is None and has_marks(template):
        return {}
    return {"thinking": Thinking(type="enabled" if think else "disabled")}


class _Route(APIRoute):
    """A route whose bodies are JSON whatever their Content-Type says, as curl's says nothing of it.

    Not those from pages of other sites, which have an Origin: a browser asks the server whether
    they may send JSON, but does not ask for other types.
    """

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return what handles a request, as FastAPI asks."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Any:
            if "origin" not in request.headers:
                headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
                headers.append((b"content-type", b"application/json"))
                request = Request({**request.scope, "headers": headers}, request.receive)
            return await handle(request)

        return handle_json


def add_ollama(app: FastAPI, service: Service) -> None:
    """Add the endpoints of Ollama's API to an app."""
    router = APIRouter(prefix="/api", route_class=_Route)
    _add_answers(router, service)
    add_embed(router, service)
    add_models(router, service)
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": OllamaErrorBody},
        "5XX": {"model": OllamaErrorBody},
    }
    app.include_router(router, responses=errors)


def _add_answers(router: APIRouter, service: Service) -> None:
    records: dict[int | str, dict[str, Any]] = {200: {"content": {RECORDS: {}}}}

    async def answer(body: OllamaBody, request: Request, is_empty: bool) -> Response:
        """Answer a body. If it asks nothing, say that the model is loaded, as Ollama does."""
        use_own_name(body, service)
        if body.stream is None:
            body.stream = True
        parser = service.settings.tool_parser
        try:
            if is_empty:
                await service.read(request, partial(_check, parser=parser), body)
                return _loaded(body, service.settings.model)
            read = partial(prepare, parser=parser)
            response = await service.answer(body, request, read, OllamaAnswer)
        except ApiError as error:
            raise renamed(error) from None
        if body.stream:
            response.headers["Content-Type"] = RECORDS
        return response

    @router.post("/chat", responses=records)
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        return await answer(body, request, body.messages is None or body.messages == [])

    @router.post("/generate", responses=records)
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        return await answer(body, request, not (body.prompt or body.suffix))


def _loaded(body: OllamaBody, model: str) -> Response:
    content = record(model, isinstance(body, OllamaChatBody), {}, {"done_reason": "load"})
    return Response(content, media_type="application/json")
