"""Options of `forerun.load`: how models are loaded, and how the engine runs them.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.kinds import check_kind

if TYPE_CHECKING:
    import torch

DEFAULT_PREFIX_BYTES = 2**28


@dataclass(frozen=True)
class ModelOptions:
    """How target and draft are loaded.

    Attributes:
        dtype: the dtype of weights, as in transformers. Default: float32 on a CPU, the
            checkpoint's elsewhere.
        weights: the format that the target's weights are stored in on a CPU: "float32",
            "bfloat16", "int8" or "int4" (blocks of 32 weights with a scale and a minimum). With few
            bits the rounded model is the target, so it is that model's output that drafts do not
            change. Default, "auto": as a GGUF file has them, else by `dtype`.
        draft_weights: likewise of the draft, where any number of bits is lossless. Default, "auto":
            8 bits on a CPU.
        draft_vocabulary: the draft computes logits of N tokens only, the most frequent ones, and of
            those that stand in the text. That is faster, and as lossless. The tokens are those of
            the draft's list of frequent tokens (`forerun train draft --hot`); without a list they
            are those with the lowest ids, because BPE merges frequent tokens first. Default: the
            whole list, if the draft has one. 0: all tokens.
        device: the device to load to. Default: cuda if there is one, else the CPU.
        trust_remote_code: passed on to transformers.
        fast: False runs transformers' own forwards, without C (see forerun/backends).
    """

    dtype: str | torch.dtype | None = None
    weights: str | None = None
    draft_weights: str | None = None
    draft_vocabulary: int | None = None
    device: str | None = None
    trust_remote_code: bool = False
    fast: bool = True

    def __post_init__(self) -> None:
        for weights in (self.weights, self.draft_weights):
            check_kind(weights)
        if self.draft_vocabulary is not None and self.draft_vocabulary < 0:
            raise ValueError(f"draft_vocabulary must be at least 0, not {self.draft_vocabulary}")

    @property
    def are_usual(self) -> bool:
        """Whether models run as they did when the settings that ship with forerun were chosen."""
        return self.fast and self.draft_vocabulary is None


@dataclass(frozen=True)
class EngineOptions:
    """How a decoder's engine runs.

    Attributes:
        max_rows: the sequences that are decoded at once; others wait.
        max_queue: the sequences that may wait, None for any number.
        kv_memory: the bytes for keys and values of the target, None for no bound.
        prefix_bytes: the bytes of keys and values of earlier prompts, so that the part that a new
            prompt shares with one of them is not computed again. 0 for none. A draft model takes
            bytes of its own for as many positions. Default: 256 MiB; `forerun serve` derives it
            from the model and the free memory.
        guard: leave drafts out while they do not pay (see forerun/planning/guard.py), unless it is
            False. Which steps draft then depends on measured times. So do tokens that are sampled
            without a seed.
        share_outputs: whether a request may draft from the outputs and phrases of earlier requests.
            `forerun serve` turns it off by default, because a client may ask for rejected drafts,
            which would show words of the answers to other clients.
        prompt_cache: a folder for keys, values and hidden states of texts, so that they are not
            computed again after a restart; None for none. It must belong to the user alone. Its
            files hold the tokens of texts as well.
        prompt_cache_bytes: the bytes of that folder, for all models and processes that use it; the
            least recently used files are deleted first.
    """

    max_rows: int = 64
    max_queue: int | None = None
    kv_memory: int | None = None
    prefix_bytes: int | None = None
    guard: bool | None = None
    share_outputs: bool = True
    prompt_cache: str | Path | None = None
    prompt_cache_bytes: int = 2**32

    def __post_init__(self) -> None:
        if self.prompt_cache_bytes < 1:
            raise ValueError(
                f"prompt_cache_bytes must be at least 1, not {self.prompt_cache_bytes}"
            )
        if self.prefix_bytes is not None and self.prefix_bytes < 0:
            raise ValueError(f"prefix_bytes must be at least 0, not {self.prefix_bytes}")

    @property
    def prefix_limit(self) -> int:
        """The bytes of a model's earlier prompts, given or not."""
        return DEFAULT_PREFIX_BYTES if self.prefix_bytes is None else self.prefix_bytes


_Options = TypeVar("_Options", ModelOptions, EngineOptions)


def split_options(
    options: Mapping[str, Any], models: ModelOptions | None, engine: EngineOptions | None
) -> tuple[ModelOptions, EngineOptions, dict[str, Any]]:
    """Return the options of models and of the engine, and the remaining ones.

    A field that is given singly in `options` replaces that of `models` or `engine`.
    """
    rest = dict(options)
    model_options = _updated(models or ModelOptions(), rest)
    engine_options = _updated(engine or EngineOptions(), rest)
    return model_options, engine_options, rest


def _updated(given: _Options, options: dict[str, Any]) -> _Options:
    """Return options with the fields that `options` has, which are taken out of it."""
    names = [field.name for field in fields(given) if field.name in options]
    return type(given)(**vars(given) | {name: options.pop(name) for name in names})
