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

WINDOWS_PER_FILE = 64  # they are decoded together
# Tokens of each window after which the run says how long all windows will take.
TOKENS_BEFORE_FORECAST = 8


@dataclass(frozen=True)
class OwnOutput:
    """Settings of windows of the target's own output.

    A window begins with a prompt, which is cut from a text, and goes on with the target's output.
    The files of windows take the `temperatures` in turn, then the lengths of `prompts`.

    Attributes:
        sequences: the number of windows.
        prompts: lengths of the prompts in tokens.
        length: length of a window in tokens.
        temperatures: of the output.
        top_p: of the output.
        seed: decides the prompts and the output.
    """

    sequences: int
    prompts: Sequence[int]
    length: int
    temperatures: Sequence[float]
    top_p: float = 1.0
    seed: int = 0

    @property
    def rows(self) -> int:
        """Return the number of windows in a file."""
        return min(WINDOWS_PER_FILE, max(1, self.sequences // len(self.temperatures)))

    def prompt_length(self, part: int) -> int:
        """Return the length of the prompts in file number `part`."""
        return self.prompts[part // len(self.temperatures) % len(self.prompts)]

    def cut_prompts(self, stream: np.ndarray, part: int) -> list[list[int]]:
        """Return the prompts of file number `part`, cut from a stream [n] of tokens."""
        length = self.prompt_length(part)
        rng = np.random.default_rng([self.seed, part])
        starts = rng.integers(len(stream) - length, size=self.rows)
        return [stream[start : start + length].tolist() for start in starts]

    def params(self, part: int) -> SamplingParams:
        """Return how the output of file number `part` is sampled."""
        return SamplingParams(
            max_new_tokens=self.length - self.prompt_length(part),
            temperature=self.temperatures[part % len(self.temperatures)],
            top_p=self.top_p,
            ignore_eos=True,
            seed=self.seed + part * self.rows,
        )


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        target: hub id, folder or GGUF file of the target.
        out: folder of the trained weights.
        data: files or folders of text, from which prompts for the target's own output are cut.
        chats: a folder of conversations (`benchmarks.training.chats`), used instead of `data`.
        work: folder of the state that a stopped run continues from, and of what trainings may
            share: own output, labels and drafts. By default it is the folder "work" in `out`.
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
        """Return the folder of what trainings may share."""
        return self.work or self.out / "work"

    @property
    def folder(self) -> Path:
        """Return the folder of this training's own state."""
        return self.shared / "training" / self.out.resolve().name

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what the weights were trained for and on, for their recipe."""
        if self.chats is None:
            return {"target": self.target, "data": list(self.data)}
        return {"target": self.target, "chats": self.chats.name}

    def load(
        self, source: str, part: str, dtype: str | None = None, frozen: bool = False
    ) -> PreTrainedModel:
        """Load a model as training needs it.

        On a CPU a `frozen` model that is a GGUF file keeps its own bits.
        """
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return load_model(
            source,
            part,
            dtype=dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            plain=not frozen or device != "cpu",
        )

    def prompts(self, least: int) -> tuple[PreTrainedTokenizerBase, np.ndarray | None]:
        """Return the target's tokenizer, and the stream of tokens that prompts are cut from.

        With conversations the stream is None.

        Raises:
            ValueError: there is neither data nor conversations, or both; conversations do not fit
                the target; the data has less than `least` tokens.
        """
        if self.data and self.chats is not None:
            raise ValueError("give --data or --chats, not both")
        if not self.data and self.chats is None:
            raise ValueError("give --data or --chats")
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

    def claim(self, shared: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        """Mark the folders as this run's.

        Args:
            shared: settings that the shared files depend on.
            training: settings of this training.

        Raises:
            ValueError: a folder is another run's.
        """
        data = {"data": list(self.data), "chats": self.chats and str(self.chats)}
        claim(self.shared, data | dict(shared))
        claim(self.folder, training)

    def own_output(
        self, target: CausalLM, stream: np.ndarray | None, output: OwnOutput
    ) -> list[np.ndarray]:
        """Make windows of the target's own output, as arrays [N, length].

        The windows begin with tokens of `stream` [n]. Files that exist are not made again, and a
        larger number of sequences begins with the same files.

        Raises:
            ValueError: the folder holds windows of another target or with other settings.
        """
        assert stream is not None
        folder = self.shared / "own-output"
        settings = {
            "prompts": list(output.prompts),
            "length": output.length,
            "temperatures": list(output.temperatures),
            "top_p": output.top_p,
            "target": target.fingerprint,
            "rows": output.rows,
            "seed": output.seed,
        }
        claim(folder, settings)
        count = -(-output.sequences // output.rows)
        paths = [folder / f"{part:05d}.safetensors" for part in range(count)]
        missing = [part for part, path in enumerate(paths) if not path.exists()]
        decoder = Decoder(target.model, method=AR())

        def make(part: int) -> dict[str, torch.Tensor]:
            windows = output.cut_prompts(stream, part)
            new_tokens = output.length - output.prompt_length(part)
            started_at = perf_counter()
            chunks = decoder.stream([list(window) for window in windows], output.params(part))
            for number, chunk in enumerate(chunks, 1):
                windows[chunk.index] += chunk.step.tokens
                # Long before the first file is there.
                if part == missing[0] and number == TOKENS_BEFORE_FORECAST * output.rows:
                    seconds = (perf_counter() - started_at) / number
                    left = span(seconds * len(missing) * output.rows * new_tokens)
                    self.say(
                        f"own output: {len(missing)} files of {output.rows} windows, about {left}"
                    )
            return {"tokens": torch.tensor(windows, dtype=torch.int32)}

        save_missing(paths, make, f"own output, {output.rows} sequences each", self.say)
        windows = [load_file(path)["tokens"].numpy() for path in paths]
        in_last = output.sequences - output.rows * (count - 1)
        return [*windows[:-1], windows[-1][:in_last]]


def check_context(
    config: PreTrainedConfig, parts: Sequence[Texts] | None, length: int, model: str
) -> None:
    """Raise ValueError if the texts are longer than a model's context.

    Args:
        config: the model's.
        parts: conversations, if these are the texts.
        length: length of a window in tokens, if windows are the texts.
        model: the model's name in the message.
    """
    what = "a window"
    if parts is not None:
        what = "the longest conversation"
        length = max(part.tokens.shape[1] for part in parts)
    context = context_of(config.get_text_config(decoder=True))
    if context is not None and length > context:
        raise ValueError(f"{what} is {length} tokens, more than the {model}'s context of {context}")
