"""The target's verdicts on the drafts of many sequences."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import partial
from itertools import islice

from torch import Tensor

from forerun.engine.acceptance import Verdict, accept, accept_greedy, accept_seeded
from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.engine.step import RowOutcome
from forerun.failures import UNATTRIBUTABLE, NotNumbersError
from forerun.sampling.probabilities import best_of
from forerun.sampling.threads import one_thread


def judge(
    seqs: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], logits: abc.Sequence[Tensor]
) -> tuple[list[Verdict], list[Tensor]]:
    """Return the target's verdict on each draft, and the processed scores [N_r, V].

    An exception of a sequence's processors is stored in `seq.error`, with a verdict that accepts
    nothing. So is a NotNumbersError for scores that are NaN.

    Args:
        seqs: the sequences of the step.
        drafts: their drafts.
        logits: the target's logits [N_r, V] at the nodes of each draft.
    """
    argmax_logits = [row for row, seq in zip(logits, seqs, strict=True) if seq.sampler.is_argmax]
    tokens: list[int] = []
    values: list[float] = []
    if argmax_logits:
        tokens, values = best_of(argmax_logits)  # of all rows at once, to wait for a GPU only once
    argmax = iter(tokens)
    highest = iter(values)
    verdicts = []
    scores = []
    for seq, draft, row in zip(seqs, drafts, logits, strict=True):
        best = None
        if seq.sampler.is_argmax:
            size = len(draft)
            best = (list(islice(argmax, size)), list(islice(highest, size)))
        nodes = _scorable(seq, draft)
        verdict, row_scores = _judge_row(seq, draft, row, best, nodes)
        verdicts.append(verdict)
        scores.append(row_scores)
    return verdicts, scores


def _scorable(seq: Sequence, draft: Draft) -> list[int]:
    """Return the nodes at which scores can be had, each after its parent, the root first.

    A sequence's constraint may need longer for the others than the step may wait.
    """
    constraint = seq.sampler.constraint
    if constraint is None:
        return list(range(len(draft)))
    nodes = [0]
    for node in sorted(range(1, len(draft)), key=draft.depths.__getitem__):
        has_parent = draft.parents[node] in nodes
        if has_parent and constraint.is_ready(_text_at(seq, draft, node), waits=True):
            nodes.append(node)
    return sorted(nodes)


def _text_at(seq: Sequence, draft: Draft, node: int) -> list[int]:
    """Return the text before the token that follows a node."""
    return seq.tokens[:-1] + [draft.tokens[i] for i in draft.path(node)]


def _judge_row(
    seq: Sequence,
    draft: Draft,
    logits: Tensor,
    best: tuple[list[int], list[float]] | None,
    nodes: list[int],
) -> tuple[Verdict, Tensor]:
    """Return the verdict on one draft, and its processed scores.

    Args:
        seq: the sequence.
        draft: its draft.
        logits: [N, V] the target's logits at its nodes.
        best: the argmax and the largest logit of each node if tokens are chosen by these.
        nodes: those at which there are scores. Where others are left out, logits stay as they are.
    """
    try:
        if best is not None:
            return accept_greedy(draft, *best), logits
        with one_thread(logits.numel()):
            if len(nodes) < len(draft):
                return _judge_part(seq, draft, logits, nodes)
            scores = seq.sampler.scores(logits, partial(_text_at, seq, draft))
            return _accept(seq, draft, scores), scores
    except UNATTRIBUTABLE:
        raise
    except BaseException as error:
        seq.error = error
        return Verdict([0], 0, 0, False), logits


def _accept(seq: Sequence, draft: Draft, scores: Tensor) -> Verdict:
    """Return the verdict on a draft, given the processed scores [N, V] at its nodes."""
    if seq.seeded is not None:
        return accept_seeded(draft, scores, seq.source)
    return accept(draft, scores, seq.greedy, seq.generator)


def _judge_part(
    seq: Sequence, draft: Draft, logits: Tensor, nodes: list[int]
) -> tuple[Verdict, Tensor]:
    """Return the verdict on a draft that has scores at some nodes alone, and the scores.

    The draft is cut behind the first node of each path that has none. That is exact, because it
    depends on the tokens up to this node and not on those behind it, like a rule of length. A path
    that comes to such a node ends with its token, because the token after it cannot be chosen yet.
    """
    kept = [node for node in range(len(draft)) if node == 0 or draft.parents[node] in nodes]
    part = draft.part(kept)
    scores = logits.float().clone()
    scores[nodes] = seq.sampler.scores(logits[nodes], lambda row: _text_at(seq, draft, nodes[row]))
    verdict = _accept(seq, part, scores[kept])
    path = [kept[node] for node in verdict.path]
    argmax = best_of([scores])[0]
    if path[-1] in nodes:
        return replace(verdict, path=path, argmax=argmax), scores
    accepted = len(path) - 2
    return Verdict(path[:-1], draft.tokens[path[-1]], accepted, False, argmax), scores


def end_drafting_of_nan(outcomes: abc.Sequence[RowOutcome]) -> list[Sequence]:
    """Return the sequences whose scores are NaN although they had a draft, without their error.

    They are decoded without drafts from now on, and the caller runs this step of theirs again. A
    drafted token may be the cause, because in one forward it may spoil the scores before it too.

    Call it before the sequences grow. A user's criterion, which is called then, may raise the same
    error, and must end its sequence.
    """
    spoilt = []
    for outcome in outcomes:
        seq = outcome.sequence
        if isinstance(seq.error, NotNumbersError) and outcome.draft.drafted:
            seq.clear_error()
            seq.prompt_logprobs = None  # because the prompt is read again, and reported then
            seq.request = replace(seq.request, plain=True)
            spoilt.append(seq)
    return spoilt


def committed(draft: Draft, verdict: Verdict) -> list[int]:
    """Return the tokens that a verdict adds: the accepted ones, and the one after them."""
    return [*(draft.tokens[node] for node in verdict.path[1:]), verdict.token]


def scores_after(scores: Tensor, verdict: Verdict, i: int) -> Tensor:
    """Return the scores [V] that gave the i-th committed token."""
    return scores[verdict.path[i]].float()


def origins(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    """Return the origin of each committed token."""
    accepted = (draft.origins[node] for node in verdict.path[1:])
    return (*accepted, "correction" if verdict.rejected else "bonus")
