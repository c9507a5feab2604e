"""What all recipes share: a target, the texts, and the folders of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.loading import load_model, load_tokenizer
from forerun.methods import AR
from forerun.model.causal_lm import CausalLM, context_of
from forerun.sampling.params import SamplingParams
from forerun.train.loop import claim, save_missing, span
from forerun.train.texts import Texts, check_chats, read_texts, tokenize

ROWS = 64  # windows of a file, decoded together
SOON = 8  # tokens of each window, after which the time of all of them is foretold


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        target: hub id, folder or GGUF file of the target.
        out: folder of the trained weights.
        data: files or folders of text, from which prompts for the target's own output are cut.
        chats: a folder of conversations (`benchmarks.chat.data`), which take the place of `data`.
        work: state that a stopped run continues from, and what trainings may share: own output, labels, drafts.
            By default the folder "work" in `out`.
    """

    target: str
    out: Path
    data: Sequence[str] = ()
    chats: Path | None = None
    work: Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    say: Callable[[str], None] = print

    @property
    def shared(self) -> Path:
        return self.work or self.out / "work"

    @property
    def folder(self) -> Path:
        """Return the folder of this training's own state."""
        return self.shared / "training" / self.out.resolve().name

    @property
    def provenance(self) -> dict[str, Any]:
        source: dict[str, Any] = (
            {"data": list(self.data)} if self.chats is None else {"chats": self.chats.name}
        )
        return {"target": self.target} | source

    def load(
        self, source: str, part: str, dtype: str | None = None, frozen: bool = False
    ) -> PreTrainedModel:
        """Load a model as training needs it; a `frozen` one that is a GGUF file in its own bits if it is for a CPU."""
        plain = (
            not frozen or (self.device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cpu"
        )
        how: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "dtype": dtype,
            "plain": plain,
        }
        return load_model(source, part, device=self.device, **how)

    def prompts(self, least: int) -> tuple[PreTrainedTokenizerBase, np.ndarray | None]:
        """Return the target's tokenizer and the stream of tokens that prompts are cut from, None for conversations.

        Raises ValueError unless just one of the two is given and fits the target, and for less than `least` tokens.
        """
        if bool(self.data) == (self.chats is not None):
            raise ValueError("give --data or --chats" + ", not both" * bool(self.data))
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            self.target, trust_remote_code=self.trust_remote_code
        )
        if self.chats is not None:
            check_chats(self.chats, tokenizer, self.target)
            return tokenizer, None
        stream = tokenize(tokenizer, list(read_texts(self.data)))
        if len(stream) < least:
            raise ValueError(f"--data holds {len(stream)} tokens; give at least {least}")
        return tokenizer, stream

    def claim(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Mark the folders as this run's; raise ValueError if they are another run's.

        `shared` are settings that the shared files depend on, `own` those of this training.
        """
        claim(
            self.shared,
            {"data": list(self.data), "chats": self.chats and str(self.chats), **shared},
        )
        claim(self.folder, own)

    def own_output(
        self,
        target: CausalLM,
        stream: np.ndarray | None,
        *,
        sequences: int,
        prompts: Sequence[int],
        length: int,
        temperatures: Sequence[float],
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[np.ndarray]:
        """Make `sequences` windows [N, length] that begin with tokens of `stream` [n] and continue as the target does.

        Files take the `temperatures` in turn, then the lengths of `prompts`. Existing files are not made again; more
        sequences begin with the same files. Raises ValueError if the folder holds another target's or other settings.
        """
        assert stream is not None
        work, rows = self.shared / "own-output", min(ROWS, max(1, sequences // len(temperatures)))
        settings = {
            "prompts": list(prompts),
            "length": length,
            "temperatures": list(temperatures),
            "top_p": top_p,
        }
        claim(work, settings | {"target": target.fingerprint, "rows": rows, "seed": seed})
        decoder = Decoder(target.model, method=AR())

        def make(part: int) -> dict[str, torch.Tensor]:
            prompt = prompts[part // len(temperatures) % len(prompts)]
            starts = np.random.default_rng([seed, part]).integers(len(stream) - prompt, size=rows)
            begins = [stream[start : start + prompt].tolist() for start in starts]
            params = SamplingParams(
                max_new_tokens=length - prompt,
                temperature=temperatures[part % len(temperatures)],
                top_p=top_p,
                ignore_eos=True,
                seed=seed + part * rows,
            )
            windows, begun = [list(begin) for begin in begins], perf_counter()
            for count, chunk in enumerate(decoder.stream(begins, params), 1):
                windows[chunk.index] += chunk.step.tokens
                if (
                    part == missing[0] and count == SOON * rows
                ):  # long before the first file is there
                    left = (
                        (perf_counter() - begun) / count * len(missing) * rows * (length - prompt)
                    )
                    self.say(
                        f"own output: {len(missing)} files of {rows} windows, about {span(left)}"
                    )
            return {"tokens": torch.tensor(windows, dtype=torch.int32)}

        paths = [work / f"{part:05d}.safetensors" for part in range(-(-sequences // rows))]
        missing = [part for part, path in enumerate(paths) if not path.exists()]
        save_missing(paths, make, f"own output, {rows} sequences each", self.say)
        windows = [load_file(path)["tokens"].numpy() for path in paths]
        return [*windows[:-1], windows[-1][: sequences - rows * (len(paths) - 1)]]


def check_context(
    config: PreTrainedConfig, parts: Sequence[Texts] | None, length: int, model: str
) -> None:
    """Raise ValueError if conversations, or else windows of `length` tokens, are longer than a model's context."""
    what = "a window"
    if parts is not None:
        what, length = "the longest conversation", max(part.tokens.shape[1] for part in parts)
    context = context_of(config.get_text_config(decoder=True))
    if context is not None and length > context:
        raise ValueError(f"{what} is {length} tokens, more than the {model}'s context of {context}")
