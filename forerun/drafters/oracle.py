"""A chain of exactly those tokens that the target will accept."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.drafters.chain import ChainDrafter
from forerun.lengths.oracle import MismatchStop, prompt_of
from forerun.model import CausalLM


class OracleDrafter(ChainDrafter):
    """Knows before it drafts how many of the draft's tokens the target will accept, and drafts these and no more: not
    even one where the first would be rejected. Hence a drafter: a policy is asked behind a token, never before.

    What the draft would say in place of each token of the target's output does not depend on where steps begin, so one
    forward over the known output finds it in `start`. Where rounding tells that forward from drafting, the policy
    stops behind the mismatch. Raises ValueError in `start` for sequences that are sampled.
    """

    policy: MismatchStop

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        super().start(seqs, hidden)
        self.runs = [self._runs(seq, output) for seq, output in zip(seqs, self.policy.outputs, strict=True)]

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        return super().propose([_within(seq, runs) for seq, runs in zip(seqs, self.runs, strict=True)])

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.runs = [self.runs[row] for row in rows]

    def _runs(self, seq: Generation, output: list[int]) -> list[int]:
        """From each token of the output on: how many the draft says as the target does."""
        key, choices = prompt_of(seq), self.policy.truth.choices
        if seq.sampler.processors:
            said = self._said(seq, output)
        else:
            if len(choices.get(key, ())) < len(output):
                choices[key] = self._said(seq, output)
            said = choices[key]
        runs = [0] * (len(output) + 1)
        for at in reversed(range(len(output))):
            runs[at] = runs[at + 1] + 1 if said[at] == output[at] else 0
        return runs

    def _said(self, seq: Generation, output: list[int]) -> list[int]:
        """What the draft says in place of each token of the output; -1 from where it cannot read on."""
        readable = [*prompt_of(seq), *output[:-1]][: self.model.context]
        unknown = (at for at, token in enumerate(readable) if not self._knows([token]))
        readable = readable[: next(unknown, None)]
        first = seq.prompt_length
        if len(readable) < first:
            return [-1] * len(output)
        model: CausalLM = self.model.fresh()
        model.start([readable[: first - 1]])
        logits = self._fitted(model.extend([readable[first - 1 :]])[0])
        said = seq.sampler.scores(logits, lambda i: readable[: first + i]).argmax(-1).tolist()
        return said + [-1] * (len(output) - len(said))


def _within(seq: Generation, runs: list[int]) -> Generation:
    """The sequence as if it ended one token behind those that will be accepted: its drafts are no longer."""
    at = len(seq.tokens) - seq.prompt_length
    twin = copy.copy(seq)
    twin.limit = min(seq.limit, len(seq.tokens) + 1 + (runs[at] if at < len(runs) else 0))
    return twin
