"""What the engine exchanges with its drafter and its callers: proposals and steps."""

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
    from forerun.engine.target import Capture
    from forerun.sampling.probabilities import Logprob


@dataclass(frozen=True)
class Proposal:
    """One draft for each sequence, and their cost."""

    drafts: list[Draft]
    forwards: int = 0  # draft model forwards, each for all sequences at once
    forward_seconds: float = 0.0
    policy_seconds: float = 0.0
    prompt_seconds: float = 0.0  # of prompts that were read for these drafts; no part of a step
    rests: bool = False  # whether drafts are left out for some steps, as they were slower
    memo: Any = None  # the drafter's own notes, which its `observe` of the same step gets back

    @classmethod
    def together(cls, drafts: list[Draft], parts: list[Proposal], memo: Any = None) -> Proposal:
        """Return these drafts with the added costs of the parts that they come from."""
        return cls(
            drafts,
            sum(each.forwards for each in parts),
            sum(each.forward_seconds for each in parts),
            sum(each.policy_seconds for each in parts),
            sum(each.prompt_seconds for each in parts),
            any(each.rests for each in parts) and not any(draft.drafted for draft in drafts),
            memo,
        )


@dataclass(frozen=True, eq=False)
class RowOutcome:
    """What a step came to for one sequence.

    Attributes:
        sequence: it has grown by the step's tokens already.
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

    State belongs to a sequence: each call may be about another set of the admitted ones.
    """

    wants_hidden: Capture = ""  # the hidden states of the target that it is given
    spread: int = 0  # the most nodes of a draft beyond a chain of the remaining tokens
    reads: int | None = None  # the last tokens of a prompt that it reads; None: all

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        """Admit a sequence of n tokens and run its prompt. Yield the size of each chunk, at most `chunk` tokens.
        `hybrid` runs this between later steps or never, so the text may grow meanwhile.
        `hidden` [n - 1, d]: the target's states over all tokens but the last, if wanted."""
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each, at most `seq.remaining - 1` deep, as the target adds one token."""
        raise NotImplementedError

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        """Record the outcomes of a step. There is at least one.

        Args:
            outcomes: one for each sequence that the drafter is to learn about. A drafter that wants
                hidden states gets those of every sequence in every step, because they come only once.
            memo: `Proposal.memo` of this step, or None if `propose` was not called in it.
        """
        return

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, or whose admission was broken off."""
        return


@dataclass(frozen=True)
class Step:
    """A sequence's part of one target forward. Seconds are those of all its rows."""

    id: int  # of the request
    number: int  # of the engine's step; steps with one number share the forward
    rows: int  # sequences that share it
    tokens: tuple[int, ...] = ()  # committed, up to the sequence's end
    origins: tuple[str, ...] = ()  # of each token: draft, lookup, ..., correction or bonus
    rejected: tuple[int, ...] = ()  # drafted tokens that were not accepted
    drafted: int = 0  # tokens proposed
    tested: int = 0  # accepted tokens, and the level of the first rejection
    accepted: int = 0
    rests: bool = False  # as in its Proposal
    draft_forwards: int = 0
    draft_seconds: float = 0.0  # drafting without its length policy
    policy_seconds: float = 0.0  # the length policy
    verify_seconds: float = 0.0  # the target's forward with its verdict
    # Of these, inside forwards of the two models (on a GPU, to launch them). The rest is overhead.
    forward_seconds: float = 0.0
    seconds: float = 0.0
    logprobs: tuple[Logprob, ...] = ()  # of the tokens, if requested
    prompt_logprobs: tuple[Logprob, ...] | None = (
        None  # of the prompt, if requested, in the first step
    )
    waited: float = 0.0  # seconds in the queue
    finish_reason: str | None = None  # of the sequence, in its last step
    error: BaseException | None = (
        None  # what ended it, raised by its processor or criterion, or by a step of it alone
    )
