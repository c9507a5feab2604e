"""Length policies: each stops where its rule says, whatever the batch."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from math import prod, sqrt

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from benchmarks.baselines.entropy import SVIP, AdaEDL
from benchmarks.baselines.heuristic import Heuristic
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.engine import Step
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import RowOutcome
from forerun.methods import Confidence, Cumulative, Method, Parts
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import StepSituation, forecast
from forerun.planning.length import best_length
from forerun.planning.stop_rules import (
    BestLength,
    FixedLength,
    LengthPolicy,
    StopRule,
    Within,
)
from forerun.sampling.probabilities import argmax_of
from forerun.sampling.sampler import Sampler
from tests.support.toys import TableLM, decode, fit, random_table, tokens_of

V, FITS = 8, 1e-4
TARGET = random_table(V, 1, 1.3)
DRAFT = TARGET + random_table(V, 2, 0.7)
PROMPTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 2, 0, 1, 2], [5], [6, 7]]
LIMITS = [30, 7, 19, 3, 26, 12]  # rows that end at different times
ENDS = frozenset({4})
TOP_P = LogitsProcessorList([hf.TopPLogitsWarper(0.8)])  # leaves scores of -inf
RULES: dict[str, Method] = {
    "heuristic": Heuristic(3),
    "confidence": Confidence(0.35, 5),
    "cumulative": Cumulative(0.15, 5, floor=0.1),
    "svip": SVIP(0.5, most=5),
    "adaedl": AdaEDL(0.5, step=1.0, most=5),
}


def plain(asked: Iterable[Request]) -> list[list[int]]:
    return [tokens_of(steps) for steps in decode(TableLM(TARGET), PlainDrafter(), asked)]


def built(chosen: Method) -> ChainDrafter:
    drafter = chosen.build(Parts(TableLM(TARGET), TableLM(DRAFT)))
    assert isinstance(drafter, ChainDrafter)
    return drafter


def run(drafter: ChainDrafter, asked: abc.Sequence[Request]) -> list[list[Step]]:
    rows = decode(TableLM(TARGET), drafter, asked)
    # Nothing is left of sequences that have ended.
    states = [state for state in vars(drafter.policy).values() if isinstance(state, dict)]
    assert not drafter.model.rows and not drafter.model.prompt and not any(states)
    return rows


class Watched(LengthPolicy):
    """Passes everything on, and notes the length of each draft.

    For each sequence it keeps the length that a draft had, and the one that it could have had.
    """

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy = policy
        self.admit, self.drop = policy.admit, policy.drop  # type: ignore[method-assign]
        self.drafts: dict[int, list[tuple[list[int], int, int]]] = {}

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return self.policy.begin(seqs, rows)

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        self.policy.observe(outcomes)
        for outcome in outcomes:
            seq = outcome.sequence
            draft = outcome.draft
            verdict = outcome.verdict
            # The sequence has grown by the accepted tokens and one more, or was cut at its end.
            self.drafts.setdefault(seq.id, []).append((draft.tokens, verdict.accepted, seq.limit))


def distributions(
    text: abc.Sequence[int], drafted: abc.Sequence[int], sampler: Sampler
) -> list[torch.Tensor]:
    text = [0, *text]
    laws = []
    for token in drafted:
        laws.append(
            sampler.scores(DRAFT[text[-2], text[-1]][None], lambda _: [])[0].double().softmax(-1)
        )
        text.append(token)
    return laws


class Rule:
    """The rules once more, by their definitions: whether a draft goes on after its tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threshold = 0.5
        self.rate = 0.9
        self.length = 3

    def more(self, tokens: abc.Sequence[int], laws: abc.Sequence[torch.Tensor]) -> bool:
        probabilities = [float(law[token]) for law, token in zip(laws, tokens, strict=True)]
        entropy = float(torch.special.entr(laws[-1]).sum())
        return {
            "heuristic": len(tokens) < self.length,
            "confidence": probabilities[-1] >= 0.35 and len(tokens) < 5,
            "cumulative": prod(probabilities) >= 0.15 and len(tokens) < 5,
            "svip": 1 - sqrt(0.15 * entropy) >= 0.5 and len(tokens) < 5,
            "adaedl": 1 - sqrt(0.2 * entropy) >= self.threshold and len(tokens) < 5,
        }[self.name]

    def saw(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)
        self.rate = (self.rate + accepted / drafted) / 2
        if self.rate < 0.9:
            self.threshold += 0.1
        elif accepted != 5:
            self.threshold -= 0.1


SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(False), "top-p": Sampler(False, TOP_P)}


def check(
    name: str, prompt: abc.Sequence[int], output: abc.Sequence[int], drafts, sampler: Sampler
) -> set[int]:
    """Every draft of a sequence ends where the rule says; the lengths of the drafts."""
    rule = Rule(name)
    text = [*prompt, *output]
    at = len(prompt)
    lengths = set()
    for (root, *drafted), accepted, limit in drafts:
        assert root == text[at - 1]
        if (
            name == "cumulative" and sampler.greedy
        ):  # the last token is left out if the product is below the floor
            whole = list[int]()
            product = 1.0
            while product >= 0.15 and len(whole) < min(5, limit - at - 1):
                scores = DRAFT[tuple([0, *text[:at], *whole][-2:])]
                whole = [*whole, int(scores.argmax())]
                product = product * float(scores.softmax(-1).max())
            assert drafted == whole[: len(whole) - (product < 0.1)]
            drafted = whole
        laws = distributions(text[:at], drafted, sampler)
        for count in range(1, len(drafted)):
            assert rule.more(drafted[:count], laws[:count])
        assert len(drafted) == limit - at - 1 or not rule.more(drafted, laws)
        lengths.add(len(drafted))
        rule.saw(len(drafted), accepted)
        at += accepted + 1
    return lengths


@pytest.mark.parametrize("mode", [*SAMPLERS, "mixed"])
@pytest.mark.parametrize("name", RULES)
def test_drafts_end_where_the_rule_says(name: str, mode: str) -> None:
    drafter = built(RULES[name])
    watched = drafter.policy = Watched(drafter.policy)
    samplers = [SAMPLERS[mode]] * 6 if mode != "mixed" else [*SAMPLERS.values()] * 2
    sources = [
        None if sampler.greedy else torch.Generator().manual_seed(i)
        for i, sampler in enumerate(samplers)
    ]
    given = zip(PROMPTS, LIMITS, samplers, sources, strict=True)
    asked = [
        Request(prompt, limit, sampler, generator=source)
        for prompt, limit, sampler, source in given
    ]
    outputs = [tokens_of(steps) for steps in decode(TableLM(TARGET), drafter, asked)]
    lengths = set()
    for id, (request, output) in enumerate(zip(asked, outputs, strict=True)):
        lengths |= check(name, request.tokens, output, watched.drafts[id], request.sampler)
    assert len(lengths) >= 3  # it does depend


@pytest.mark.parametrize("name", RULES)
def test_sequences_that_join_and_leave_between_steps_are_what_they_are_alone(name: str) -> None:
    """Drafts and output of six prompts in three modes, two rows at a time.

    Greedy output is the target's.
    """
    samplers = [*SAMPLERS.values()] * 2

    def asked() -> list[Request]:
        return [
            Request(prompt, limit, sampler, ENDS, seed=None if sampler.greedy else 5, stream=i)
            for i, (prompt, limit, sampler) in enumerate(
                zip(PROMPTS, LIMITS, samplers, strict=True)
            )
        ]

    together = decode(TableLM(TARGET), built(RULES[name]), asked(), max_rows=2)
    assert (
        len({row[0].number for row in together}) >= 4
        and max(step.rows for row in together for step in row) == 2
    )
    assert {row[-1].finish_reason for row in together} == {"stop", "length"}
    for row, request, wanted in zip(together, asked(), plain(asked()), strict=True):
        (alone,) = run(built(RULES[name]), [request])
        assert [(step.drafted, step.tokens) for step in row] == [
            (step.drafted, step.tokens) for step in alone
        ]
        assert not request.sampler.greedy or tokens_of(row) == wanted


@pytest.mark.parametrize("processors", [None, TOP_P], ids=["none", "top-p"])
@pytest.mark.parametrize("name", RULES)
def test_rules_keep_the_distribution_in_batches_of_all_lengths(
    name: str, processors: LogitsProcessorList | None
) -> None:
    sampler = Sampler(False, processors)
    generator = torch.Generator().manual_seed(3)
    asked = [
        Request(prompt, 3 + i % 5, sampler, generator=generator)
        for i, prompt in enumerate(PROMPTS[:3] * 450)
    ]
    rows = run(built(RULES[name]), asked)
    for start, prompt in enumerate(PROMPTS[:3]):
        assert fit(rows[start::3], TARGET, prompt, 2, processors) > FITS


def test_argmax_of_is_argmax_at_ties_and_nan_too() -> None:
    scores = torch.tensor(
        [[[0.0, 2.0, 2.0], [-torch.inf, -1.0, -3.0]], [[torch.nan, 1.0, 2.0], [3.0, 1.0, 2.0]]]
    )
    assert argmax_of(scores).tolist() == scores.argmax(-1).tolist() == [[1, 1], [0, 0]]
    assert argmax_of(scores[1, 1]).item() == 0 and argmax_of(scores[:, :, 1:]).tolist() == [
        [0, 0],
        [1, 1],
    ]
    assert argmax_of(scores[0].bfloat16()).tolist() == [1, 1]


CHEAP = Costs({1: 10.0, 64: 10.5}, {1: 1.0, 64: 1.1})  # verifying is nearly free
DEAR = Costs({1: 10.0, 2: 11.0, 64: 650.0}, {1: 4.0, 64: 256.0})  # but for one row


def test_the_best_length_follows_from_costs_rows_and_acceptance() -> None:
    for costs in (CHEAP, DEAR):
        for rows in (1, 4):
            lengths = [
                best_length(costs.steps(rows, 16), [chance] * 16)
                for chance in (0.0, 0.3, 0.6, 0.9, 1.0)
            ]
            assert lengths[0] == 0 and lengths == sorted(lengths)
    assert (
        best_length(CHEAP.steps(1, 16), [1.0] * 16) == 16
        and best_length(CHEAP.steps(1, 16), [1.0, 0.0, 1.0]) == 1
    )
    assert (
        best_length(DEAR.steps(1, 16), [0.9] * 16) > 0 == best_length(DEAR.steps(4, 16), [1.0] * 16)
    )


def test_an_automatic_length_learns_from_verdicts_greedy_and_sampled_apart() -> None:
    seq = Sequence(Request([0], 99))
    policy = BestLength(CHEAP)

    def length(seq: Sequence) -> int:
        rule = policy.begin([seq], 1)
        assert isinstance(rule, Within)
        return rule.limits.max_tokens

    begun = length(seq)
    for accepted, expected in ((0, 1), (16, 16), (0, 1)):
        for _ in range(300):
            verdict = Verdict(list(range(accepted + 1)), 0, min(accepted + 1, 16), accepted < 16)
            policy.observe([RowOutcome(seq, Draft.chain(0, [0] * 16), verdict)])
        assert length(seq) == expected != begun
    assert length(Sequence(Request([0], 99, Sampler(False)))) == begun


def test_a_place_that_was_never_tried_is_expected_to_be_as_good_as_the_one_before_it() -> None:
    seq = Sequence(Request([0], 99))
    policy = BestLength(CHEAP)
    for _ in range(300):
        policy.observe([RowOutcome(seq, Draft.chain(0, [0]), Verdict([0, 1], 0, 1, False))])
    assert (
        all(each > 0.9 for each in policy.chooser.estimates(True))
        and policy.chooser.estimates(False)[0] == 0.7
    )


def test_drafts_that_costs_rule_out_are_not_made() -> None:
    drafter = ChainDrafter(TableLM(DRAFT), FixedLength(2), costs=DEAR)
    assert forecast(drafter, StepSituation(1)).pays and not forecast(drafter, StepSituation(4)).pays
    unknown = ChainDrafter(TableLM(DRAFT), FixedLength(2))
    assert forecast(unknown, StepSituation(4)).pays
    # A token of a prompt takes 4 ms, and a drafted one saves few.
    short, long = (StepSituation(1, 100, unread=100, remaining=new) for new in (10, 1000))
    assert forecast(drafter, long).pays and not forecast(drafter, short).pays
