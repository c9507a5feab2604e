"""What all recipes are given: a target, where the texts come from, where results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from forerun.api.loading import load_model, load_tokenizer
from forerun.model.causal_lm import CausalLM, context_of
from forerun.train.loop import claim
from forerun.train.own_output import own_output
from forerun.train.processes import Processes, processes
from forerun.train.texts import Texts, check_chats, read_texts, tokenize


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        target: hub id, folder or GGUF file of the target.
        out: folder of the trained weights.
        data: files or folders of text, from which prompts for the target's own output are cut.
        chats: a folder of conversations (`forerun.train.chat_data`), which take the place of `data`.
        work: holds what a stopped run needs to go on, and what several trainings may share: own output, labels, drafts.
            A folder of that name in `out` by default.
        sharing: the processes that train together, as `accelerate launch` starts them.
    """

    target: str
    out: Path
    data: Sequence[str] = ()
    chats: Path | None = None
    work: Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    say: Callable[[str], None] = print
    sharing: Processes = field(default_factory=processes)

    @property
    def shared(self) -> Path:
        return self.work or self.out / "work"

    @property
    def folder(self) -> Path:
        """Where this training itself keeps its state."""
        return self.shared / "training" / self.out.resolve().name

    @property
    def provenance(self) -> dict[str, Any]:
        source: dict[str, Any] = {"data": list(self.data)} if self.chats is None else {"chats": self.chats.name}
        return {"target": self.target} | source

    def load(self, source: str, part: str, dtype: str | None = None) -> PreTrainedModel:
        """Load a model as training needs it."""
        how: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "dtype": dtype, "plain": True}
        return load_model(source, part, device=self.sharing.device(self.device), **how)

    def prompts(self, least: int) -> tuple[PreTrainedTokenizerBase, np.ndarray | None]:
        """Return the target's tokenizer and the stream of tokens that prompts are cut from, None for conversations.

        Raises ValueError unless just one of the two is given and fits the target, and for less than `least` tokens.
        """
        if bool(self.data) == (self.chats is not None):
            raise ValueError("give --data or --chats" + ", not both" * bool(self.data))
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.target, trust_remote_code=self.trust_remote_code)
        if self.chats is not None:
            check_chats(self.chats, tokenizer, self.target)
            return tokenizer, None
        stream = tokenize(tokenizer, list(read_texts(self.data, tokenizer)))
        if len(stream) < least:
            raise ValueError(f"--data holds {len(stream)} tokens; give at least {least}")
        return tokenizer, stream

    def claim(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Mark the folders as this run's; raise ValueError where they are others'. `shared` are settings that what is
        shared depends on, `own` those of this training."""
        claim(self.shared, {"data": list(self.data), "chats": self.chats and str(self.chats), **shared})
        claim(self.folder, own)

    def own_output(self, target: CausalLM, stream: np.ndarray | None, **how: Any) -> list[np.ndarray]:
        """Make the target's own output in the first process, which the others then read."""
        assert stream is not None
        if not self.sharing.is_first:
            self.sharing.wait()
        windows = own_output(target, stream, self.shared / "own-output", say=self.say, **how)
        if self.sharing.is_first:
            self.sharing.wait()
        return windows


def check_context(config: PreTrainedConfig, parts: Sequence[Texts] | None, length: int, model: str) -> None:
    """Raise ValueError where conversations, or else windows of so many tokens, are longer than a model's context."""
    what = "a window"
    if parts is not None:
        what, length = "the longest conversation", max(part.tokens.shape[1] for part in parts)
    context = context_of(config.get_text_config(decoder=True))
    if context is not None and length > context:
        raise ValueError(f"{what} is {length} tokens, more than the {model}'s context of {context}")
