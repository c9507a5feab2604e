"""Rules that know what the target will say: how much any length rule could gain. For measurements only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forerun.decode import Generation
from forerun.lengths import LengthPolicy, Look
from forerun.model import CausalLM


@dataclass
class Truth:
    """What is known of prompts, each a tuple of tokens; grows. It holds for one pair of models and for greedy output
    without processors.

    Attributes:
        outputs: what the target says behind the prompt.
        choices: what the draft would say in place of each token of that output; -1 from where it cannot read on.
    """

    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    choices: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class MismatchStop(LengthPolicy):
    """Stops right behind the first token that the target will reject. No rule that has to look at a token to judge it
    can do better.

    Outputs that `truth` lacks, or has too little of, are found by plain decoding in `start`, and are remembered unless
    processors had a part in them: those of another call may be others. Where rounding makes a sequence part from its
    truth, this stops behind every token; what is committed stays the target's.

    Raises ValueError in `start` for sequences that are sampled.
    """

    def __init__(self, target: CausalLM, truth: Truth) -> None:
        self.target, self.truth = target, truth

    def start(self, seqs: Sequence[Generation]) -> None:
        if not all(seq.sampler.greedy for seq in seqs):
            raise ValueError(
                "an oracle works for greedy decoding alone (temperature 0): what will be drawn cannot be known, and "
                "stopping before a token because it would be rejected changes the law of what is drawn behind it"
            )
        self.seqs = list(seqs)
        known = self.truth.outputs
        self.outputs = [[] if seq.sampler.processors else known.get(prompt_of(seq), []) for seq in seqs]
        missing = [row for row, seq in enumerate(seqs) if not _reaches(seq, self.outputs[row])]
        if not missing:
            return
        for row, output in zip(missing, plain(self.target.fresh(), [seqs[row] for row in missing]), strict=True):
            self.outputs[row] = output
            if not seqs[row].sampler.processors:
                known[prompt_of(seqs[row])] = output

    def more(self, look: Look) -> list[bool]:
        going = []
        for row, tokens in zip(look.rows, look.tokens, strict=True):
            at = len(self.seqs[row].tokens) - self.seqs[row].prompt_length + look.depth - 1
            going.append(self.outputs[row][at : at + 1] == tokens[-1:])
        return going

    def keep(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[row] for row in rows]
        self.outputs = [self.outputs[row] for row in rows]


def prompt_of(seq: Generation) -> tuple[int, ...]:
    return tuple(seq.tokens[: seq.prompt_length])


def _reaches(seq: Generation, output: list[int]) -> bool:
    """Whether an output goes as far as the sequence can; criteria can only end it earlier."""
    return len(output) >= seq.limit - seq.prompt_length or not seq.eos.isdisjoint(output)


@torch.inference_mode()
def plain(target: CausalLM, seqs: Sequence[Generation]) -> list[list[int]]:
    """The target's greedy output behind each prompt, up to an end token or the sequence's limit. Sequences may have
    begun it."""
    texts = [list(seq.tokens) for seq in seqs]
    target.start([text[:-1] for text in texts])
    going = [True] * len(seqs)
    while any(going):
        logits = target.extend([text[-1:] if on else [] for text, on in zip(texts, going, strict=True)])
        for row, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
            if going[row]:
                text.append(int(seq.sampler.scores(logits[row], lambda _, text=text: text).argmax()))  # type: ignore[misc]
                going[row] = len(text) < seq.limit and text[-1] not in seq.eos
    return [text[seq.prompt_length :] for seq, text in zip(seqs, texts, strict=True)]
