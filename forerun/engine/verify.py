"""The target's verdicts on the drafts of many sequences."""

from __future__ import annotations

from collections import abc
from itertools import islice

from torch import Tensor

from forerun.engine.acceptance import Verdict, accept, accept_greedy, accept_seeded
from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.failures import UNATTRIBUTABLE
from forerun.sampling.probabilities import best_of
from forerun.sampling.threads import one_thread


def judge(
    seqs: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], logits: abc.Sequence[Tensor]
) -> tuple[list[Verdict], list[Tensor]]:
    """Return the target's verdict on each draft, from its logits [N_r, V], and the processed scores [N_r, V].

    An exception of a sequence's processors is stored in `seq.error`, with a verdict that accepts nothing. So is a
    ValueError for scores that are NaN.
    """
    greedy = [row for row, seq in zip(logits, seqs, strict=True) if seq.sampler.is_argmax]
    tokens, values = best_of(greedy) if greedy else ([], [])  # one wait for a GPU
    argmax, highest = iter(tokens), iter(values)
    verdicts, scores = [], []
    for seq, draft, row in zip(seqs, drafts, logits, strict=True):
        best = None
        if seq.sampler.is_argmax:
            best = list(islice(argmax, len(draft))), list(islice(highest, len(draft)))
        verdict, row = _judge(seq, draft, row, best)
        verdicts.append(verdict)
        scores.append(row)
    return verdicts, scores


def _judge(
    seq: Sequence, draft: Draft, logits: Tensor, best: tuple[list[int], list[float]] | None
) -> tuple[Verdict, Tensor]:
    """Return one verdict and its scores. `best`: argmax and largest logit of each node, if tokens are chosen by
    these."""

    def prefix(node: int) -> list[int]:
        return seq.tokens[:-1] + [draft.tokens[i] for i in draft.path(node)]

    try:
        if best is not None:
            return accept_greedy(draft, *best), logits
        with one_thread(logits.numel()):
            scores = seq.sampler.scores(logits, prefix)
            if seq.seeded is not None:
                return accept_seeded(draft, scores, seq.source), scores
            return accept(draft, scores, seq.greedy, seq.generator), scores
    except UNATTRIBUTABLE:
        raise
    except BaseException as error:
        seq.error = error
        return Verdict([0], 0, 0, False), logits


def committed(draft: Draft, verdict: Verdict) -> list[int]:
    return [*(draft.tokens[node] for node in verdict.path[1:]), verdict.token]


def scores_after(scores: Tensor, verdict: Verdict, i: int) -> Tensor:
    """Return the scores [V] that gave the i-th committed token."""
    return scores[verdict.path[i]].float()


def origins(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    return (
        *(draft.origins[node] for node in verdict.path[1:]),
        "correction" if verdict.rejected else "bonus",
    )
