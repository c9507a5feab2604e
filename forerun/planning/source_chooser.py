"""Who drafts a row: suffixes, another drafter, or nobody. Chosen by expected ms. Ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.planning.cost_model import Costs, CostSource, Forwards
from forerun.planning.forecast import Forecast, StepSituation
from forerun.planning.length import EXPECTED_ACCEPTANCE, LONGEST_CHAIN, best_length

if TYPE_CHECKING:
    from forerun.engine.draft import Draft
    from forerun.engine.sequence import Sequence

# Suffix counts promise 1, 2, 3, or more tokens. These shares of them are expected to be accepted.
PRIOR_TRUE_SHARES = (0.3, 0.35, 0.45, 0.6)
PRIOR_STEPS = 4.0  # the weight of what is expected, in steps
STEP_DECAY = 0.98  # the weight of a step, relative to the next one
PRIOR_OTHER_SHARE = 0.5  # the expected share of tokens for which the other drafter is wanted
EXPECTED_REST = 128  # tokens that are expected to come, beside as many as have come

PHRASE_DECAY = 0.9  # the weight of a forward with phrases, relative to the next one
PLAIN_STEPS_WITHOUT_PHRASES = 32  # steps after which phrases are tried again


@dataclass(frozen=True)
class Savings:
    """What a step is expected to save, in ms.

    Attributes:
        suffix: a step with the suffix draft, compared with a plain step.
        other: a token of the other drafter, if it has read all of the text, compared with the
            suffix draft or the plain step, whichever is better.
    """

    suffix: float
    other: float


@dataclass(frozen=True)
class Choice:
    """Who is to draft a row.

    Attributes:
        takes_suffix: whether the suffix draft is better than none.
        asks_other: whether the other drafter is called. If it has no draft, the suffix draft or
            none is taken.
        wants_other: whether the other drafter would be called if it had read all of the text.
    """

    takes_suffix: bool
    asks_other: bool
    wants_other: bool


@dataclass(frozen=True)
class SourceOutcome:
    """The outcome of a step for one row.

    Attributes:
        suffix: the suffix draft that was found.
        score: the number of accepted tokens that its counts promised.
        used: the draft that was verified, from any source.
        committed: the tokens by which the row has grown.
        forwards: of the other drafter.
        ms: of the step, by the table of costs.
        wanted: whether the other drafter would have been called if it had read all of the text.
    """

    suffix: Draft
    score: float
    used: Draft
    committed: list[int]
    forwards: int
    ms: float
    wanted: bool


@dataclass(frozen=True)
class OtherTotals:
    """Decaying totals of the other drafter's steps.

    Attributes:
        steps: in which it drafted or ran.
        drafted: tokens that it drafted.
        forwards: that it ran.
        tokens: that were committed.
    """

    steps: float
    drafted: float
    forwards: float
    tokens: float

    def times(self, factor: float) -> OtherTotals:
        """Return these totals times a factor."""
        return OtherTotals(
            factor * self.steps,
            factor * self.drafted,
            factor * self.forwards,
            factor * self.tokens,
        )

    def plus(self, step: OtherTotals) -> OtherTotals:
        """Return the totals after one more step."""
        return OtherTotals(
            STEP_DECAY * self.steps + step.steps,
            STEP_DECAY * self.drafted + step.drafted,
            STEP_DECAY * self.forwards + step.forwards,
            STEP_DECAY * self.tokens + step.tokens,
        )


class SourceChooser:
    """Weigh a suffix draft, the other drafter and a plain step by their expected ms.

    Value a token at the recent mean ms per token, so that a slow drafter is not called where
    suffixes soon supply the same tokens.

    Suffix counts promise too many tokens. So a score is multiplied by the share of promises of its
    size that came true lately. Every step shows this share, whoever drafted.

    Keep decaying means of the other drafter's tokens, time and yield. While it is not called, they
    return to what is expected of it. Unmeasured forwards count as 0 ms.

    A draft model or a head first reads what it has not read of a text. This step or the tokens to
    come must make good that time. Of the tokens to come, the other drafter is expected to supply
    the share for which it was wanted lately.
    """

    def __init__(self, costs: CostSource, other: Forwards | None = None) -> None:
        """Take a table of costs.

        Args:
            costs: gives the table.
            other: what the other drafter runs; None if it runs no model and no head.
        """
        self._costs = costs
        measured = {"draft": bool(costs.table.draft), "head": bool(costs.table.head)}
        self.forwards: Forwards | None = other if other is not None and measured[other] else None
        single = StepSituation(rows=1)
        step_ms = [self.step_ms(single, count, count) for count in range(LONGEST_CHAIN + 1)]
        length = best_length(step_ms, [EXPECTED_ACCEPTANCE] * LONGEST_CHAIN)
        tokens = sum(EXPECTED_ACCEPTANCE**place for place in range(length + 1))
        self._prior = OtherTotals(1.0, length, length, tokens).times(PRIOR_STEPS)
        self.other = self._prior
        self.other_share = PRIOR_OTHER_SHARE
        # Of all steps, whoever drafted.
        self._ms = PRIOR_STEPS * step_ms[length]
        self._tokens = self._prior.tokens
        # Of suffix drafts, by the number of promised tokens: 1, 2, 3, or more.
        self.promised = [PRIOR_STEPS * size for size in range(1, len(PRIOR_TRUE_SHARES) + 1)]
        self.came_true = []
        for share, promised in zip(PRIOR_TRUE_SHARES, self.promised, strict=True):
            self.came_true.append(share * promised)

    def situation(self, seq: Sequence, rows: int, read: int) -> StepSituation:
        """Return the situation of a row, of whose text the other drafter has read `read` tokens."""
        length = len(seq.tokens)
        remaining = min(seq.remaining, EXPECTED_REST + length - seq.prompt_length)
        return StepSituation(rows, length, seq.greedy, length - read, remaining)

    def choose(self, situation: StepSituation, suffix: Draft, score: float) -> Choice:
        """Choose who drafts a row, for which a suffix draft of this score was found."""
        savings = self.savings(situation, suffix, score)
        asks_other = self.forecast(situation, savings.other).pays
        return Choice(savings.suffix > 0, asks_other, savings.other > 0)

    def savings(self, situation: StepSituation, suffix: Draft, score: float) -> Savings:
        """Return what a suffix draft of this score, and the other drafter, are expected to save."""
        size = _size(score)
        expected = min(score * self.came_true[size] / self.promised[size], suffix.drafted)
        token_value = self._ms / self._tokens
        plain_ms = self.step_ms(situation)
        by_suffix = token_value * expected - self.step_ms(situation, suffix.drafted) + plain_ms
        drafted = self.other.drafted / self.other.steps
        forwards = self.other.forwards / self.other.steps
        tokens = self.other.tokens / self.other.steps
        by_other = token_value * (tokens - 1) - self.step_ms(situation, drafted, forwards)
        by_other += plain_ms
        return Savings(by_suffix, (by_other - max(by_suffix, 0.0)) / tokens)

    def forecast(self, situation: StepSituation, saved: float) -> Forecast:
        """Return the forecast of the other drafter, whose tokens save `saved` ms each."""
        middle = situation.context - situation.unread / 2
        reading = self._read_ms(situation.rows, middle) * situation.unread
        # What it does not draft itself of the tokens to come, it has to read.
        share = self.other_share
        later = share * saved - (1 - share) * self._read_ms(situation.rows, situation.context)
        now = saved * self.other.tokens / self.other.steps
        return Forecast(saved, now + max(0.0, later) * situation.remaining, reading)

    def step_ms(self, situation: StepSituation, drafted: float = 0, forwards: float = 0) -> float:
        """Return the ms of a step whose rows draft `drafted` tokens each, by the table of costs.

        Args:
            situation: the step.
            drafted: the tokens that each row drafts; a mean need not be whole.
            forwards: those of the other drafter.
        """
        rows = situation.rows
        table = self._costs.table if situation.greedy else self._costs.table.sampled
        costs = table.at(situation.context, rows)
        if self.forwards == "head":
            forward_ms = costs.head_ms(rows)
        elif self.forwards == "draft":
            forward_ms = costs.drafting(rows)
        else:
            forward_ms = 0.0
        return forwards * forward_ms + costs.verify(rows * (drafted + 1))

    def observe(self, outcome: SourceOutcome) -> None:
        """Record what a step came to."""
        if outcome.suffix.drafted:
            self._observe_suffix(outcome)
        self.other = self.other.plus(self._other_step(outcome))
        committed = len(outcome.committed)
        self._ms = STEP_DECAY * self._ms + outcome.ms
        self._tokens = STEP_DECAY * self._tokens + committed
        self.other_share += (1 - STEP_DECAY**committed) * (outcome.wanted - self.other_share)

    def _observe_suffix(self, outcome: SourceOutcome) -> None:
        size = _size(outcome.score)
        pairs = list(zip(outcome.suffix.tokens[1:], outcome.committed, strict=False))
        right = 0
        while right < len(pairs) and pairs[right][0] == pairs[right][1]:
            right += 1
        # If all of the row's new tokens are right, the rest of the draft is not known to be wrong.
        tested = outcome.suffix.drafted if right < len(pairs) else right
        promised = outcome.score * tested / outcome.suffix.drafted
        self.promised[size] = STEP_DECAY * self.promised[size] + promised
        self.came_true[size] = STEP_DECAY * self.came_true[size] + right

    def _other_step(self, outcome: SourceOutcome) -> OtherTotals:
        """Return the other drafter's part of a step; without one, a small part of the prior."""
        is_by_other = outcome.used is not outcome.suffix
        # It may have run and proposed nothing.
        if not outcome.forwards and not (is_by_other and outcome.used.drafted):
            return self._prior.times(1 - STEP_DECAY)
        drafted = outcome.used.drafted if is_by_other else 0
        tokens = len(outcome.committed) if is_by_other else 1
        return OtherTotals(1, drafted, outcome.forwards, tokens)

    def _read_ms(self, rows: int, context: float) -> float:
        """Return the ms in which the other drafter reads one token of each row."""
        if self.forwards is None:
            return 0.0
        return self._costs.table.at(context).reading(rows, by_head=self.forwards == "head")


class PhraseChooser:
    """Choose whether forwards of the draft model try phrases (`forerun.drafters.phrases`).

    They do where forwards with phrases draft more tokens per ms than plain ones, by what they
    gave so far. If they do not, they are tried again from time to time.

    Attributes:
        tokens: the decaying mean of tokens that a forward with phrases drafted.
    """

    def __init__(self, costs: Costs | None, span: int, guesses: int) -> None:
        """Begin with the expectation that whole phrases are drafted.

        Args:
            costs: the table; without one, phrases are always tried.
            span: tokens of a phrase.
            guesses: phrases that a forward tries.
        """
        self.costs = costs
        self.tokens = 1.0 + span
        self._forward_tokens = 1 + span * guesses
        self._plain_steps = 0

    def tries_phrases(self, situation: StepSituation) -> bool:
        """Return whether a step's forwards try phrases."""
        if self.costs is None:
            return True
        rows = situation.rows
        costs = self.costs.at(situation.context, rows)
        phrase_ms = costs.drafting(rows * self._forward_tokens)
        if self.tokens * costs.drafting(rows) > phrase_ms:
            return True
        self._plain_steps = (self._plain_steps + 1) % PLAIN_STEPS_WITHOUT_PHRASES
        return not self._plain_steps

    def observe(self, tokens: int) -> None:
        """Record how many tokens a forward with phrases drafted."""
        self.tokens += (1 - PHRASE_DECAY) * (tokens - self.tokens)


def _size(score: float) -> int:
    """Return the index of the promises of this size: of 1, 2, 3, or more tokens."""
    return min(max(int(score), 1), len(PRIOR_TRUE_SHARES)) - 1
