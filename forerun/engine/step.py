"""What passes between the engine, its drafter and its callers: proposals and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forerun.engine.draft import Draft
from forerun.engine.target import Capture

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.sequence import Sequence
    from forerun.sampling.logprobs import Logprob


@dataclass(frozen=True)
class Proposal:
    """What a drafter answers: one draft a sequence, and what they cost together."""

    drafts: list[Draft]
    forwards: int = 0  # draft model forwards, each for all sequences at once
    forward_seconds: float = 0.0
    policy_seconds: float = 0.0

    @classmethod
    def together(cls, drafts: list[Draft], parts: list[Proposal]) -> Proposal:
        """These drafts, at the cost of all parts that they come from."""
        return cls(
            drafts,
            sum(each.forwards for each in parts),
            sum(each.forward_seconds for each in parts),
            sum(each.policy_seconds for each in parts),
        )


class Drafter(Protocol):
    """Where drafts come from: what a method's `build` makes. Only `propose` has to be written; a subclass inherits the
    rest.

    Its state belongs to a sequence: every call may be about others of those that were admitted.

    Attributes:
        wants_hidden: whether it is given the target's hidden states.
        feature: which ones (`forerun.engine.target.Capture`).
        spread: nodes that a draft may have beyond a chain that fills the sequence's room.
    """

    wants_hidden: bool = False
    feature: Capture = "head"
    spread: int = 0

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        """A sequence joins. `hidden` [n - 1, d]: the target's states over all of its n tokens but the last, if they
        are wanted. Runs its prompt: after each chunk of at most `chunk` tokens yields how many it ran."""
        return ()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """One draft each, at most `seq.remaining - 1` deep (the target adds one token itself)."""
        raise NotImplementedError

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        """What became of the drafts; the sequences have grown by now. `hidden[r]` [N, d]: the target's states at the
        nodes of each draft, if they are wanted."""
        return

    def drop(self, seq: Sequence) -> None:
        """A sequence leaves: it has ended, or was never admitted to the end."""
        return


def observe_rows(
    drafter: Drafter,
    rows: list[int],
    seqs: list[Sequence],
    drafts: list[Draft],
    verdicts: list[Verdict],
    hidden: list[Tensor] | None,
) -> None:
    """Has a drafter observe those rows of a step that are its own, if any are."""
    if rows:
        drafter.observe(
            [seqs[row] for row in rows],
            [drafts[row] for row in rows],
            [verdicts[row] for row in rows],
            [hidden[row] for row in rows] if hidden is not None else None,
        )


@dataclass(frozen=True)
class Step:
    """One target forward, as one sequence saw it. Seconds are those of all its rows.

    Attributes:
        id: of the request.
        number: of the engine's step; steps of one number shared the forward.
        rows: how many sequences did.
        tokens: tokens committed, cut at the end of the sequence.
        origins: where each came from: draft, lookup, ..., correction or bonus.
        rejected: drafted tokens that were not accepted.
        drafted, tested, accepted: numbers of proposed tokens; of those that the target looked at, the first rejection
            included and nothing after it; of those that it accepted.
        draft_forwards: forwards of the draft model.
        draft_seconds, policy_seconds, verify_seconds: drafting without its length policy, that policy, and the target's
            forward with its verdict.
        forward_seconds: of all these, inside forwards of the two models; what is left of `seconds` is overhead. On a
            GPU forwards return before they are done, and this is the time to start them.
        finish_reason: of the sequence, if this is its last step.
        logprobs: of the tokens, if the request asks for them.
        prompt_logprobs: of the prompt's tokens after the first, on a sequence's first step, if it asks for them.
        waited: seconds that the sequence stood in the queue.
        error: what ended it: its processor or criterion raised that, or its step alone.
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
