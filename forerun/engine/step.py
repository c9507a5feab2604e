"""What the engine exchanges with its drafter and its callers: proposals, outcomes and steps."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forerun.engine.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Sequence
    from forerun.engine.target import Capture, ChunkSize
    from forerun.sampling.probabilities import Logprob


@dataclass(frozen=True)
class Proposal:
    """One draft for each sequence, and what drafting cost.

    Attributes:
        drafts: in the order of the sequences.
        forwards: the number of forwards of the draft model or the head, each for all sequences that
            still draft.
        forward_seconds: the time of these forwards.
        policy_seconds: the time of the length policy.
        prompt_seconds: the time of reading prompts for these drafts, which is not counted as a
            part of the step.
        rests: whether nothing was drafted because the guard has paused drafting.
        memo: the drafter's own notes. The engine hands them back to `observe` of the same step.
        forward_rows: the number of rows of each of these forwards, with one new token each. 0 if
            their time must not correct the table of costs.
        by_head: whether the forwards are those of a head.
    """

    drafts: list[Draft]
    forwards: int = 0
    forward_seconds: float = 0.0
    policy_seconds: float = 0.0
    prompt_seconds: float = 0.0
    rests: bool = False
    memo: Any = None
    forward_rows: int = 0
    by_head: bool = False

    @classmethod
    def together(cls, drafts: list[Draft], parts: list[Proposal], memo: Any = None) -> Proposal:
        """Return these drafts with the added costs of the parts that they come from."""
        ran = [part for part in parts if part.forwards]
        is_alone = len(ran) == 1  # else nobody knows which of them took how long
        is_resting = any(part.rests for part in parts)
        return cls(
            drafts=drafts,
            forwards=sum(part.forwards for part in parts),
            forward_seconds=sum(part.forward_seconds for part in parts),
            policy_seconds=sum(part.policy_seconds for part in parts),
            prompt_seconds=sum(part.prompt_seconds for part in parts),
            rests=is_resting and not any(draft.drafted for draft in drafts),
            memo=memo,
            forward_rows=ran[0].forward_rows if is_alone else 0,
            by_head=is_alone and ran[0].by_head,
        )


@dataclass(frozen=True, eq=False)
class RowOutcome:
    """The outcome of a step for one sequence.

    Attributes:
        sequence: the sequence, which already has the step's tokens.
        draft: what was proposed for it.
        verdict: the target's verdict on the draft.
        hidden: [N, d] the target's states at the draft's nodes, or None if they are not wanted.
    """

    sequence: Sequence
    draft: Draft
    verdict: Verdict
    hidden: Tensor | None = None


class Drafter(Protocol):
    """The source of drafts that a method builds. A subclass must implement `propose` alone.

    Keep state that outlives a step by the sequence's id, because each call may be about another
    set of the admitted sequences. A sequence also grows in steps in which the drafter is not
    called. Notes for `observe` of the same step go into `Proposal.memo`.

    Attributes:
        wants_hidden: which hidden states of the target it is given; "" for none.
        extra_nodes: by how many nodes a tree may be larger than the longest chain, which has a node
            for each remaining token. The KV budget reserves them.
        reads: how many of a prompt's last hidden states it reads; None for all.
    """

    wants_hidden: Capture = ""
    extra_nodes: int = 0
    reads: int | None = None

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterable[int]:
        """Admit a sequence and run its prompt, and yield the number of tokens of each chunk.

        A 0 is yielded after another piece of work on the prompt.

        Other sequences may run between two chunks. A drafter around this one, such as `hybrid`, may
        begin or continue the admission in a later step, when the text has grown, or never.

        Args:
            seq: the sequence.
            hidden: [m, d] the target's states over the m tokens before the last one, if wanted. It
                has at least `reads` of them, unless the prompt is shorter or begins like a known
                text whose states are not kept (`forerun.model.prompts`).
            chunk: the most tokens of a chunk, which follow the engine's load. Ask for them before
                each (`forerun.engine.target.next_size`).
        """
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each sequence.

        A draft is at most `seq.remaining - 1` deep, because the target adds one token. So it is
        empty (`Draft.root`) before the last token. It is also empty where

        - the drafter finds nothing: no suffix occurs earlier, the draft model cannot read the text,
          a prompt is not read yet, a plan has no nodes, or a grammar forbids the first token;
        - a drafter around this one (`forerun.planning`) does not ask it.

        The engine asks no drafter for a request that is `plain`.
        """
        raise NotImplementedError

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        """Record the outcomes of a step. There is at least one.

        Args:
            outcomes: one for each sequence that the drafter is to learn about. A drafter that wants
                hidden states gets those of every sequence in every step, because they come only
                once.
            memo: `Proposal.memo` of this step, or None if `propose` was not called in it.
        """
        return

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that has ended or failed or has become `plain`.

        It may never have been admitted, or be forgotten already.
        """
        return


@dataclass(frozen=True)
class Step:
    """One sequence's part of a target forward. Seconds are those of the forward's rows together.

    Attributes:
        id: the request's.
        number: the number of the engine's step. Steps with the same number share a forward.
        rows: the number of sequences that share the forward.
        tokens: the committed tokens, up to the sequence's end.
        origins: the origin of each token: "draft", "lookup", ..., "correction" or "bonus".
        rejected: the drafted tokens that were not accepted.
        drafted: the number of proposed tokens.
        tested: the number of accepted tokens, and one more if the next level was rejected.
        accepted: the number of accepted tokens.
        rests: as in the Proposal.
        draft_forwards: the number of forwards of the draft model.
        draft_seconds: the time of drafting, without the length policy.
        policy_seconds: the time of the length policy.
        verify_seconds: the time of the target's forward and of its verdict.
        forward_seconds: the part of these times that was spent in forwards of both models; on a
            GPU, in launching them. The rest is overhead.
        seconds: the time of the whole step.
        logprobs: the tokens' log probabilities, if requested.
        prompt_logprobs: those of the prompt, if requested, in the first step.
        waited: the seconds that the request was in the queue.
        finish_reason: why the sequence ended, in its last step.
        error: the exception that ended the sequence. It was raised by the sequence's processor or
            criterion, or by a step that ran this sequence alone.
    """

    id: int
    number: int
    rows: int
    tokens: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    rejected: tuple[int, ...] = ()
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    rests: bool = False
    draft_forwards: int = 0
    draft_seconds: float = 0.0
    policy_seconds: float = 0.0
    verify_seconds: float = 0.0
    forward_seconds: float = 0.0
    seconds: float = 0.0
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] | None = None
    waited: float = 0.0
    finish_reason: str | None = None
    error: BaseException | None = None
