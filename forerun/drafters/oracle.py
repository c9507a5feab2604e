"""A chain of exactly those tokens that the target will accept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from torch import Tensor

from forerun.drafters.chain import ChainDrafter
from forerun.generation import Generation
from forerun.lengths.oracle import MismatchStop, prompt_of
from forerun.model import CausalLM


class OracleDrafter(ChainDrafter):
    """Knows before it drafts how many of the draft's tokens the target will accept, and drafts these and no more: not
    even one where the first would be rejected. Hence a drafter: a policy is asked after a token, never before.

    The draft's choice in place of each token of the target's output does not depend on where steps begin, so one
    forward over the known output finds it in `admit`. Where rounding makes that forward differ from drafting, the
    policy stops after the mismatch. Raises ValueError in `admit` for a sampled sequence.
    """

    policy: MismatchStop

    def __init__(self, model: CausalLM, policy: MismatchStop, vocab_size: int | None = None) -> None:
        super().__init__(model, policy, vocab_size)
        self.runs: dict[int, list[int]] = {}  # from each token of the output on: how many the draft chooses as well

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from super().admit(seq, hidden, chunk)
        output, known = self.policy.outputs[seq.id], self.policy.truth.choices
        choices = [] if seq.sampler.processors else known.get(prompt_of(seq), [])
        if len(choices) < len(output):
            choices = self._choices(seq, output)
            if not seq.sampler.processors:
                known[prompt_of(seq)] = choices
        runs = [0] * (len(output) + 1)
        for at in reversed(range(len(output))):
            runs[at] = runs[at + 1] + 1 if choices[at] == output[at] else 0
        self.runs[seq.id] = runs

    def drop(self, seq: Generation) -> None:
        super().drop(seq)
        self.runs.pop(seq.id, None)

    def _depth(self, seq: Generation) -> int:
        runs, at = self.runs[seq.id], len(seq.tokens) - seq.prompt_length
        return min(super()._depth(seq), runs[at] if at < len(runs) else 0)

    def _choices(self, seq: Generation, output: list[int]) -> list[int]:
        """The draft's choice in place of each token of the output; -1 from where it cannot read on."""
        readable = [*prompt_of(seq), *output[:-1]][: self.model.context]
        readable = list(takewhile(lambda token: self._knows([token]), readable))
        first = seq.prompt_length
        if len(readable) < first:
            return [-1] * len(output)
        model = self.model.fresh()
        for _ in model.prefill(readable[: first - 1], first):
            pass
        model.join(0, len(readable))
        logits = self._fitted(model.extend([0], [readable[first - 1 :]])[0])
        choices = seq.sampler.scores(logits, lambda i: readable[: first + i]).argmax(-1).tolist()
        return choices + [-1] * (len(output) - len(choices))
