"""What llama.cpp's server says of itself: GET /props and GET /slots.

Members that have no counterpart here are left out. Prompts are never shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from forerun import __version__
from forerun.engine.sequence import Phase, Sequence
from forerun.sampling.params import SamplingParams
from forerun.server.errors import ApiError
from forerun.server.model_facts import ModelFacts
from forerun.server.requests import CHAT_TOKENS

if TYPE_CHECKING:
    from forerun.server.app import Service

_TEMPERATURE = 1.0  # of a request that does not say it, as in OpenAI's API
_NO_SEED = -1
# Parameters that have the same name in llama.cpp's server.
_SAME_NAME = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


def add_llamacpp(app: FastAPI, service: Service) -> None:
    """Add the endpoints to an app."""

    @app.get("/props")
    async def props() -> dict[str, Any]:
        facts = ModelFacts(service.decoder())
        return {
            "default_generation_settings": {"n_ctx": facts.context, "params": _defaults()},
            "total_slots": service.worker.engine.max_rows,
            "model_alias": service.settings.model,
            "model_path": facts.path,
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,  # whether POST /props changes anything
            "endpoint_metrics": True,
            "chat_template": facts.template,
            "bos_token": facts.token("bos_token"),
            "eos_token": facts.token("eos_token"),
            "build_info": f"forerun {__version__}",
        }

    @app.get("/slots")
    async def slots(fail_on_no_slot: str = "") -> list[dict[str, Any]]:
        decoder = service.decoder()
        engine = service.worker.engine
        admitted = list(engine.scheduler.admitted)  # because the engine's thread changes it
        active = [seq for seq in admitted if seq.phase in (Phase.PREFILLING, Phase.RUNNING)]
        if fail_on_no_slot and len(active) >= engine.max_rows:
            raise ApiError(503, "no slot is free", code="no_slot")
        free: list[Sequence | None] = [None] * (engine.max_rows - len(active))
        drafts = decoder.method.name != "ar"
        context = decoder.target.context
        return [
            {"id": number, "n_ctx": context, **_slot(seq, drafts)}
            for number, seq in enumerate([*active, *free])
        ]


def _defaults() -> dict[str, Any]:
    """Return the parameters of a chat that gives none."""
    params = vars(SamplingParams())
    return {
        "n_predict": CHAT_TOKENS,
        "max_tokens": CHAT_TOKENS,
        "seed": _NO_SEED,
        "temperature": _TEMPERATURE,
        "repeat_penalty": params["repetition_penalty"],
        **{name: params[name] for name in _SAME_NAME},
    }


def _slot(seq: Sequence | None, drafts: bool) -> dict[str, Any]:
    """Return what is said of a slot, which a sequence has taken or none has.

    A sequence may move to another slot when one before it ends; its `id_task` stays.
    """
    if seq is None:
        return {"speculative": drafts, "is_processing": False}
    request = seq.request
    decoded = len(seq.tokens) - seq.prompt_length
    remaining = seq.limit - seq.prompt_length - decoded
    return {
        "speculative": drafts and not request.plain,
        "is_processing": True,
        "id_task": seq.id,
        "n_prompt_tokens": seq.prompt_length,
        "params": {
            "n_predict": request.max_new_tokens,
            "max_tokens": request.max_new_tokens,
            "seed": _NO_SEED if request.seed is None else request.seed,
        },
        "next_token": [
            {"has_next_token": remaining > 0, "n_remain": remaining, "n_decoded": decoded}
        ],
    }
