"""forerun: faster decoding for Hugging Face causal language models, without changing a token of what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api import Chunk, Completion, Decoder, load
    from forerun.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Chunk", "Completion", "Decoder", "SamplingParams", "load"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; nobody should wait for them to be told of a typing error.
    import importlib

    if name in __all__:
        return getattr(importlib.import_module("forerun.params" if name == "SamplingParams" else "forerun.api"), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
