"""Rules that know the target's output: how much any length rule could gain. For measurements only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.generation import Generation
from forerun.lengths import LengthPolicy, LengthRule, Look


@dataclass
class Truth:
    """Known outputs by prompt, a tuple of tokens; grows. They hold for one pair of models and for greedy output without
    processors.

    Attributes:
        outputs: the target's output after the prompt.
        choices: the draft's own choice in place of each token of that output; -1 from where it cannot read on.
        find: decodes plainly: the output of a sequence from its prompt on, up to an end token or its limit. Needed for
            prompts that `outputs` lacks.
    """

    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    choices: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    find: Callable[[Generation], list[int]] | None = None


class MismatchStop(LengthPolicy, LengthRule):
    """Stops right after the first token that the target will reject. No rule that has to look at a token to judge it
    can do better.

    Outputs that `truth` lacks, or has too little of, are asked of `truth.find` in `admit`. They are remembered unless
    processors had a part in them: those of another request may differ. Where rounding makes a sequence part from its
    truth, this stops after every token; what is committed stays the target's.

    Raises ValueError in `admit` for a sampled sequence, and for an unknown one without `truth.find`.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.outputs: dict[int, list[int]] = {}

    def admit(self, seq: Generation) -> None:
        if not seq.greedy:
            raise ValueError(
                "an oracle works for greedy decoding alone (temperature 0): what will be sampled cannot be known, and "
                "stopping before a token because it would be rejected changes the distribution of what follows"
            )
        output = [] if seq.sampler.processors else self.truth.outputs.get(prompt_of(seq), [])
        if not _reaches(seq, output):
            if self.truth.find is None:
                raise ValueError(
                    f"the truth of a prompt of {seq.prompt_length} tokens is unknown, and nothing finds it"
                )
            output = self.truth.find(seq)
            if not seq.sampler.processors:
                self.truth.outputs[prompt_of(seq)] = output
        self.outputs[seq.id] = output

    def drop(self, seq: Generation) -> None:
        self.outputs.pop(seq.id, None)

    def begin(self, seqs: Sequence[Generation], rows: int) -> LengthRule:
        return self

    def more(self, look: Look) -> list[bool]:
        going = []
        for seq, tokens in zip(look.seqs, look.tokens, strict=True):
            at = len(seq.tokens) - seq.prompt_length + look.depth - 1
            going.append(self.outputs[seq.id][at : at + 1] == tokens[-1:])
        return going


def prompt_of(seq: Generation) -> tuple[int, ...]:
    return tuple(seq.tokens[: seq.prompt_length])


def _reaches(seq: Generation, output: list[int]) -> bool:
    """Whether an output goes as far as the sequence can; criteria can only end it earlier."""
    return len(output) >= seq.limit - seq.prompt_length or not seq.eos.isdisjoint(output)
