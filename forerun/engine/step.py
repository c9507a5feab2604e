"""What passes between the engine, its drafter and its callers: proposals and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forerun.engine.draft import Draft

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
    rests: bool = False  # whether drafts are left out for some steps, as they were slower

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
    """Where drafts come from: what a method's `build` makes. A subclass has to write `propose` alone.

    State belongs to a sequence: each call may be about another set of those that were admitted.
    """

    wants_hidden: bool = False  # whether it gets the target's hidden states
    spread: int = 0  # nodes that a draft may have beyond a chain of the sequence's remaining tokens

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        """Admit a sequence and run its prompt; yield the size of each chunk of at most `chunk` tokens. `hidden`
        [n - 1, d]: the target's states over all of its n tokens but the last, if they are wanted."""
        return ()

    def pays(self, rows: int, unread: Sequence | None = None) -> bool:
        """Return whether drafts are expected to pay in a step of that many rows, by costs, if these are known.
        `unread`: a sequence that has yet to be admitted, and must make good its prompt's time in what is left of it."""
        return True

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each, at most `seq.remaining - 1` deep (the target adds one token itself)."""
        raise NotImplementedError

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        """Note what became of the drafts; the sequences have grown by now. `hidden[r]` [N, d]: the target's states at
        the nodes of each draft, if they are wanted."""
        return

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence: it has ended, or was never admitted to the end."""
        return


def observe_rows(
    drafter: Drafter,
    rows: list[int],
    seqs: list[Sequence],
    drafts: list[Draft],
    verdicts: list[Verdict],
    hidden: list[Tensor] | None,
) -> None:
    """Have a drafter observe those rows of a step that are its own, if any are."""
    if rows:
        drafter.observe(
            [seqs[row] for row in rows],
            [drafts[row] for row in rows],
            [verdicts[row] for row in rows],
            [hidden[row] for row in rows] if hidden is not None else None,
        )


@dataclass(frozen=True)
class Step:
    """One target forward, as one sequence saw it. Seconds are those of all its rows."""

    id: int  # of the request
    number: int  # of the engine's step; steps of one number shared the forward
    rows: int  # sequences that shared it
    tokens: tuple[int, ...] = ()  # committed, cut at the end of the sequence
    origins: tuple[str, ...] = ()  # of each token: draft, lookup, ..., correction or bonus
    rejected: tuple[int, ...] = ()  # drafted tokens that were not accepted
    drafted: int = 0  # tokens proposed
    tested: int = 0  # tokens looked at: the accepted ones and the level of the first rejection, nothing after it
    accepted: int = 0
    rests: bool = False  # as in its Proposal
    draft_forwards: int = 0
    draft_seconds: float = 0.0  # drafting without its length policy
    policy_seconds: float = 0.0  # the length policy
    verify_seconds: float = 0.0  # the target's forward with its verdict
    # Of all these, inside forwards of the two models; on a GPU, the time to start them. The rest is overhead.
    forward_seconds: float = 0.0
    seconds: float = 0.0
    logprobs: tuple[Logprob, ...] = ()  # of the tokens, if the request asks for them
    prompt_logprobs: tuple[Logprob, ...] | None = None  # of the prompt, likewise, in its first step
    waited: float = 0.0  # seconds that the sequence stood in the queue
    finish_reason: str | None = None  # of the sequence, in its last step
    error: BaseException | None = None  # what ended it: its processor or criterion raised that, or its step alone
