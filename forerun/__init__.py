"""forerun: faster decoding for Hugging Face causal language models.

It does not change a token of what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api.custom_generate import custom_generate
    from forerun.api.load import Chunk, Completion, Decoder, load
    from forerun.api.options import EngineOptions, ModelOptions
    from forerun.engine.engine import Engine
    from forerun.engine.sequence import Request
    from forerun.sampling.params import SamplingParams

__version__ = "0.2.0"
__all__ = [
    "Chunk",
    "Completion",
    "Decoder",
    "Engine",
    "EngineOptions",
    "ModelOptions",
    "Request",
    "SamplingParams",
]
__all__ += ["custom_generate", "load"]
_HOMES = {
    "Engine": "forerun.engine.engine",
    "EngineOptions": "forerun.api.options",
    "ModelOptions": "forerun.api.options",
    "Request": "forerun.engine.sequence",
    "SamplingParams": "forerun.sampling.params",
    "custom_generate": "forerun.api.custom_generate",
}


def __getattr__(name: str) -> Any:
    # Imported late, because torch and transformers take seconds to import: a user of the command
    # line should not wait that long to be told of a typing error.
    import importlib

    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, "forerun.api.load")), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
