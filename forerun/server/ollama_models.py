"""What Ollama's API says about models."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from forerun.api.decoder import Decoder
from forerun.server.errors import ApiError
from forerun.server.model_facts import ModelFacts
from forerun.server.ollama_schemas import OllamaShowBody, Options
from forerun.server.schemas import Body

if TYPE_CHECKING:
    from forerun.server.app import Service

# The version of Ollama whose API this is. Clients compare it with the lowest that they support.
API_VERSION = "0.12.11"
# A model is not unloaded after a time. Clients want a time all the same.
NEVER = "9999-12-31T23:59:59Z"
# Settings of a model, and their names in GGUF files after the architecture.
_SETTINGS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}


def add_models(router: APIRouter, service: Service) -> None:
    """Add the endpoints that tell of models."""

    def facts() -> ModelFacts:
        return ModelFacts(service.decoder(), service.settings.tool_parser)

    async def models(describe: Callable[[ModelFacts, str], Any]) -> dict[str, Any]:
        model = await service.readers.call(describe, facts(), service.settings.model)
        return {"models": [model]}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return await models(_listed)

    @router.get("/ps")
    async def loaded_models() -> dict[str, Any]:
        return await models(_running)

    @router.post("/show")
    async def show(body: OllamaShowBody, request: Request) -> dict[str, Any]:
        body.model = body.model or body.name
        use_own_name(body, service)
        await service.read(request, _check_nothing, body)
        return await service.readers.call(_shown, facts())

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": API_VERSION}


def use_own_name(body: Body, service: Service) -> None:
    """Let a body name the model as the service does: Ollama's names may end in `:latest`."""
    name = service.settings.model
    if body.model in (f"{name}:latest", ""):
        body.model = name


def check_context(options: Options, decoder: Decoder) -> None:
    """Raise ApiError if a longer context is asked for than the model has."""
    context = decoder.target.context
    if options.num_ctx is not None and context is not None and options.num_ctx > context:
        message = f"num_ctx is {options.num_ctx}, but the model's context has {context} tokens"
        raise ApiError(400, message, "num_ctx")


def _check_nothing(body: Body, decoder: Decoder) -> None:
    """Stand in for reading a body of which `Service.read` checks all there is."""


def timestamp(time: datetime) -> str:
    """Return a time in UTC as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def _listed(facts: ModelFacts, name: str) -> dict[str, Any]:
    """Return a model as the lists of models have it."""
    changed_at = facts.changed_at
    times = {} if changed_at is None else {"modified_at": timestamp(changed_at)}
    return {
        "name": name,
        "model": name,
        **times,
        "size": facts.weight_bytes,
        "digest": facts.digest,
        "details": _details(facts),
    }


def _running(facts: ModelFacts, name: str) -> dict[str, Any]:
    """Return a model as the list of loaded models has it."""
    model = _listed(facts, name)
    model.pop("modified_at", None)
    return model | {
        "expires_at": NEVER,
        "size_vram": facts.weight_bytes if facts.is_on_gpu else 0,
        "context_length": facts.context,
    }


def _shown(facts: ModelFacts) -> dict[str, Any]:
    """Return a model as `POST /api/show` describes it."""
    settings = facts.decoder.target.config.to_dict()
    info: dict[str, Any] = {
        "general.architecture": facts.family,
        "general.parameter_count": facts.parameters,
    }
    if facts.context is not None:
        info[f"{facts.family}.context_length"] = facts.context
    for setting, name in _SETTINGS.items():
        if settings.get(setting) is not None:
            info[f"{facts.family}.{name}"] = settings[setting]
    can = {"tools": facts.calls_tools, "insert": facts.fills_in, "thinking": facts.thinks}
    changed_at = facts.changed_at
    times = {} if changed_at is None else {"modified_at": timestamp(changed_at)}
    return {
        "template": facts.template,
        "details": _details(facts),
        "model_info": info,
        "capabilities": ["completion", *(name for name, is_able in can.items() if is_able)],
        **times,
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.container,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": _size(facts.parameters),
        "quantization_level": facts.weight_format,
    }


def _size(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 1.5B."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    if count >= 10**6:
        return f"{count / 10**6:.2f}M"
    return f"{count / 1000:.1f}K"
