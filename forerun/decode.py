"""The decode loop that every method runs on, and the records that it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from forerun.draft import Draft
from forerun.model import CausalLM
from forerun.sampling import Sampler, Verdict, accept, accept_greedy


@dataclass
class Generation:
    """One sequence while it is decoded.

    Attributes:
        tokens: prompt and output so far; grows.
        prompt_length: how many of them are the prompt.
        limit: total length at which it ends.
        sampler: how tokens follow from logits.
        eos: tokens that end it.
        criteria: Hugging Face stopping criteria, asked behind every token.
        generator: source of randomness of this sequence alone, so that its neighbours do not matter.
        finish_reason: None while it runs, then "stop" (end token or criterion) or "length".
    """

    tokens: list[int]
    limit: int
    sampler: Sampler = field(default_factory=Sampler)
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList | None = None
    generator: torch.Generator | None = None
    index: int = 0
    finish_reason: str | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.tokens and self.limit > len(self.tokens)
        self.prompt_length = len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: Sequence[int]) -> int:
        """Appends tokens up to the first that ends the sequence; returns how many."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.eos or self._stopped():
                self.finish_reason = "stop"
            elif not self.room:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)

    def _stopped(self) -> bool:
        if not self.criteria:
            return False
        return bool(self.criteria(torch.tensor([self.tokens]), None).any())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Proposal:
    """What a drafter answers: one draft a sequence, and what they cost together."""

    drafts: list[Draft]
    forwards: int = 0  # draft model forwards, each for all sequences at once
    forward_seconds: float = 0.0
    policy_seconds: float = 0.0


class Drafter(Protocol):
    """A method. It is told of sequences by position: the i-th draft belongs to the i-th sequence.

    Attributes:
        wants_hidden: whether `observe` is to be given the target's hidden states.
    """

    wants_hidden: bool

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        """New sequences; nothing of them has been seen. `hidden` [B, T, d]: the target's LM-head inputs over all of
        their tokens but the last, padded, where they are wanted and there are such."""
        ...

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        """One draft each, at most `seq.room - 1` deep (the target adds one token itself)."""
        ...

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        """What became of the drafts; the sequences have grown by now. `hidden` [B, N, d]: the target's LM-head inputs
        at the nodes of each draft, padded, where they are wanted."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Only these sequences go on, in this order."""
        ...


@dataclass(frozen=True)
class Step:
    """One target forward, as one sequence saw it. Seconds are those of the whole batch.

    Attributes:
        index: which sequence of the batch.
        tokens: tokens committed, cut at the end of the sequence.
        origins: where each came from: draft, lookup, ..., correction or bonus.
        drafted, tested, accepted: proposed tokens; those the target looked at, the first rejection included and
            nothing behind it; those it kept.
        draft_forwards: forwards of the draft model.
        draft_seconds, policy_seconds, verify_seconds: drafting without its length policy, that policy, and the target's
            forward with its verdict.
        forward_seconds: of all these, inside forwards of the two models; what is left of `seconds` is overhead. On a
            GPU forwards return before they are done, and this is the time to start them.
    """

    index: int
    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    drafted: int
    tested: int
    accepted: int
    draft_forwards: int
    draft_seconds: float
    policy_seconds: float
    verify_seconds: float
    forward_seconds: float
    seconds: float


@torch.inference_mode()
def decode(target: CausalLM, drafter: Drafter, seqs: Sequence[Generation]) -> Iterator[list[Step]]:
    """Decodes all sequences to their end; yields one Step for each running sequence after every target forward.

    Between steps the target has run all tokens of each sequence but the last.
    """
    seqs = list(seqs)
    target.keeps_hidden = drafter.wants_hidden
    target.start([seq.tokens[:-1] for seq in seqs])
    drafter.start(seqs, target.hidden)
    while seqs:
        begun = perf_counter()
        proposal = drafter.propose(seqs)
        drafts = proposal.drafts
        proposed = perf_counter()
        logits = target.forward(drafts)
        forwarded = perf_counter()
        verdicts = judge(seqs, drafts, logits)
        target.commit([verdict.path for verdict in verdicts])
        verified = perf_counter()
        counts = []
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            counts.append(seq.extend([*(draft.tokens[node] for node in verdict.path[1:]), verdict.token]))
        drafter.observe(seqs, drafts, verdicts, target.hidden)
        running = _closed_up([row for row, seq in enumerate(seqs) if seq.finish_reason is None])
        if len(running) < len(seqs):
            target.keep(running)
            drafter.keep(running)
        seconds = perf_counter() - begun
        yield [
            Step(
                index=seq.index,
                tokens=tuple(seq.tokens[len(seq.tokens) - count :]),
                origins=_origins(draft, verdict)[:count],
                drafted=draft.drafted,
                tested=verdict.tested,
                accepted=verdict.accepted,
                draft_forwards=proposal.forwards,
                draft_seconds=proposed - begun - proposal.policy_seconds,
                policy_seconds=proposal.policy_seconds,
                verify_seconds=verified - proposed,
                forward_seconds=proposal.forward_seconds + forwarded - proposed,
                seconds=seconds,
            )
            for seq, draft, verdict, count in zip(seqs, drafts, verdicts, counts, strict=True)
        ]
        seqs = [seqs[row] for row in running]


def _closed_up(rows: list[int]) -> list[int]:
    """Rows in the order in which the fewest change their places: the last ones take those of the missing."""
    behind = iter([row for row in rows if row >= len(rows)])
    there = set(rows)
    return [place if place in there else next(behind) for place in range(len(rows))]


def judge(seqs: Sequence[Generation], drafts: Sequence[Draft], logits: Sequence[Tensor]) -> list[Verdict]:
    """The target's verdicts on drafts, from its logits [N_r, V] of each."""
    if all(seq.sampler.likeliest for seq in seqs):
        found = iter(torch.cat([row.argmax(-1) for row in logits]).tolist())  # a GPU is waited for once
        return [accept_greedy(draft, list(islice(found, len(draft)))) for draft in drafts]
    return [_judge(*row) for row in zip(seqs, drafts, logits, strict=True)]


def _judge(seq: Generation, draft: Draft, logits: Tensor) -> Verdict:
    def prefix(node: int) -> list[int]:
        return seq.tokens[:-1] + [draft.tokens[i] for i in draft.path(node)]

    scores = seq.sampler.scores(logits, prefix)
    return accept(draft, scores, seq.sampler.greedy, seq.generator)


def _origins(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    return (*(draft.origins[node] for node in verdict.path[1:]), "correction" if verdict.rejected else "bonus")
