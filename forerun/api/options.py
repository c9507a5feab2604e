"""Options of `forerun.load`: how models are loaded, and how the engine runs them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.kinds import check_kind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelOptions:
    """How target and draft are loaded.

    Attributes:
        dtype: as in transformers. Default: float32 on a CPU, what the checkpoint has elsewhere.
        weights: what the target's are stored as on a CPU: "float32", "bfloat16", "int8", "int4" (blocks of 32 with a
            scale and a least value). The model in few bits is the target then, and what is decoded is its output.
            Default, "auto": as a GGUF file has them, else by `dtype`.
        draft_weights: likewise of the draft, where any bits are lossless. Default, "auto": 8 bits on a CPU.
        draft_vocabulary: the draft gives logits to N tokens only, the most frequent ones, and to those that stand in
            the text: faster, and as lossless. By the draft's own list of frequent tokens (`forerun train draft --hot`),
            else by their ids, in which BPE has the frequent ones first. Default: all of that list, if the draft has
            one. 0: all tokens.
        device: default: cuda if there is one.
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
        """Whether models run as those did that settings which come with forerun were chosen on."""
        return self.fast and self.draft_vocabulary is None


@dataclass(frozen=True)
class EngineOptions:
    """How a decoder's engine runs.

    Attributes:
        max_rows: sequences that are decoded at once; others wait.
        max_queue: sequences that may wait, None for any number.
        kv_memory: bytes for keys and values of the target, None for no bound.
        prefix_bytes: bytes, of each model, for keys and values of earlier prompts, so that what a new prompt shares
            with one of them is not computed again. 0 for none.
        guard: leave drafts out while they do not pay (see forerun/planning/guard.py), unless it is False. Which steps
            those are depends on the time they take; what is sampled without a seed then does so too.
        share_outputs: whether a request may draft from the outputs and phrases of earlier ones. Rejected drafts, which
            a server's client may ask for, would otherwise hold words of answers to other clients.
        prompt_cache: a folder for keys, values and hidden states of texts, so that they are not
            computed again after a restart either; None for none. It must be the user's own. Its
            files hold the tokens of texts as well.
        prompt_cache_bytes: bytes of that folder, for all models and processes that use it; the
            least recently used files go first.
    """

    max_rows: int = 64
    max_queue: int | None = None
    kv_memory: int | None = None
    prefix_bytes: int = 2**28
    guard: bool | None = None
    share_outputs: bool = True
    prompt_cache: str | Path | None = None
    prompt_cache_bytes: int = 2**32

    def __post_init__(self) -> None:
        if self.prompt_cache_bytes < 1:
            raise ValueError(
                f"prompt_cache_bytes must be at least 1, not {self.prompt_cache_bytes}"
            )


def split_options(
    options: Mapping[str, Any], models: ModelOptions | None, engine: EngineOptions | None
) -> tuple[ModelOptions, EngineOptions, dict[str, Any]]:
    """Return both kinds of options, with fields that are given singly in their place, and all other options."""
    rest = dict(options)
    found: list[Any] = []
    for given, kind in ((models, ModelOptions), (engine, EngineOptions)):
        single = {field.name: rest.pop(field.name) for field in fields(kind) if field.name in rest}
        found.append(kind(**vars(given or kind()) | single))
    return found[0], found[1], rest
