"""Sequences with a seed: what they are sampled is the target's choice alone."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from forerun import Decoder
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.engine.sequence import Request, Sequence
from forerun.engine.stats import summarise
from forerun.engine.step import Proposal
from forerun.methods import method
from forerun.planning.stop_rules import FixedLength
from forerun.sampling.sampler import Sampler
from forerun.sampling.seeded import FLOOR, SeededStream
from tests.support.table_drafters import DRAFTERS, PROCESSORS
from tests.support.toys import (
    DRAFT,
    PROMPT,
    TARGET,
    TableLM,
    decode,
    fit,
    noisy_copy,
    random_table,
    tiny,
    tokens_of,
)


def counts(distribution: torch.Tensor, trials: int) -> np.ndarray:
    stream = SeededStream(7)
    return np.bincount(
        [stream.at(i).sample(distribution) for i in range(trials)], minlength=len(distribution)
    )


def test_a_token_is_sampled_with_its_probability() -> None:
    distribution = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05])
    totals = counts(distribution, 20000)
    there = distribution > 0
    assert not totals[~there.numpy()].any()
    assert chisquare(totals[there], distribution[there].double().numpy() * 20000).pvalue > 1e-4


def test_improbable_tokens_are_sampled_as_well() -> None:
    """Those below the floor get one time together."""
    rare = torch.full((6000,), 0.5 / 6000)
    assert float(rare[0]) < FLOOR
    totals = counts(torch.cat([torch.tensor([0.5]), rare]), 6000)
    parts = np.append(totals[0], totals[1:].reshape(6, 1000).sum(1))
    assert chisquare(parts, np.array([0.5, *[1 / 12] * 6]) * 6000).pvalue > 1e-4
    assert (totals[1:] > 0).sum() > 2000
    alone = counts(torch.full((6000,), 1 / 6000), 3000)
    assert chisquare(alone.reshape(6, 1000).sum(1)).pvalue > 1e-4


@pytest.mark.parametrize("heat", [0.8, 1.0, 30.0])
def test_like_distributions_agree(heat: float) -> None:
    """At least as often as the paper promises, also where most tokens are improbable."""
    size = 20000
    maker = torch.Generator().manual_seed(0)
    scores = -torch.arange(1, size + 1).float().log()
    p = (scores / heat).softmax(-1)
    q = (p.log() + 0.1 * torch.randn(size, generator=maker)).softmax(-1)
    apart = float((p - q).abs().sum() / 2)
    samplers = [SeededStream(1).at(position) for position in range(400)]
    agreed = sum(each.sample(p) == each.sample(q) for each in samplers) / len(samplers)
    assert agreed > (1 - apart) / (1 + apart) - 0.05


def test_positions_streams_and_seeds_are_independent() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.3])
    for kind in range(3):
        table = np.zeros((3, 3))
        for i in range(4000):
            one = SeededStream(i).at(3)
            other = (SeededStream(i).at(4), SeededStream(i, 1).at(3), SeededStream(i + 1).at(3))[
                kind
            ]
            table[one.sample(probabilities), other.sample(probabilities)] += 1
        assert chi2_contingency(table).pvalue > 1e-4


def asked(rows: int, processors: str, seed: int = 5) -> list[Request]:
    return [
        Request(PROMPT, 5, Sampler(False, PROCESSORS[processors]), seed=seed, stream=row)
        for row in range(rows)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processors", PROCESSORS)
def test_output_follows_the_targets_distribution(processors: str) -> None:
    rows = decode(TableLM(TARGET), PlainDrafter(), asked(1200, processors))
    assert fit(rows, processors=PROCESSORS[processors]) > 1e-4


@cache
def plain(processors: str) -> list[list[int]]:
    """What plain decoding says to the requests of the next test."""
    rows = decode(TableLM(TARGET), PlainDrafter(), asked(150, processors))
    return [tokens_of(row) for row in rows]


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "ar"])
def test_every_method_gives_the_tokens_of_plain_decoding(drafter: str, processors: str) -> None:
    rows = decode(TableLM(TARGET), DRAFTERS[drafter](TableLM(DRAFT)), asked(150, processors))
    assert [tokens_of(row) for row in rows] == plain(processors)
    steps = [step for row in rows for step in row]
    assert sum(step.drafted for step in steps) > 0
    if drafter != "lookahead":  # it has nothing to propose on so short texts
        assert sum(step.accepted for step in steps) > 0


@pytest.mark.parametrize("name", ["ar", "sd", "suffix", "ouroboros"])
def test_a_text_that_is_resumed_goes_on_as_it_would_have(name: str) -> None:
    """A text that is resumed elsewhere goes on as it would have.

    Another server gets the prompt and what was sampled so far.
    """
    target = tiny("llama")
    decoder = Decoder(target, None, noisy_copy(target, 0.02), method(name), False)
    prompt, options = (
        [3, 4, 5, 3, 4],
        {"temperature": 0.8, "top_p": 0.95, "seed": 11, "ignore_eos": True},
    )
    whole = decoder.generate(prompt, max_new_tokens=40, **options).tokens
    for cut in (1, 17, 30):
        rest = decoder.generate([*prompt, *whole[:cut]], max_new_tokens=40 - cut, **options).tokens
        assert rest == whole[cut:]


def test_draft_and_target_use_the_same_numbers() -> None:
    """Otherwise two distributions that are nearly one would seldom agree."""
    target = random_table(8, 5)

    class Strangers(ChainDrafter):
        def propose(self, seqs: list[Sequence]) -> Proposal:
            streams = [seq.seeded for seq in seqs]
            for seq in seqs:
                seq.seeded = SeededStream(99, seq.id)
            proposal = super().propose(seqs)
            for seq, stream in zip(seqs, streams, strict=True):
                seq.seeded = stream
            return proposal

    rates = {}
    for kind in (ChainDrafter, Strangers):
        drafter = kind(TableLM(target + 0.2 * random_table(8, 6)), FixedLength(3))
        rows = decode(
            TableLM(target),
            drafter,
            [Request([0, 1], 40, Sampler(False), seed=i) for i in range(40)],
        )
        rates[kind] = summarise([step for row in rows for step in row], 1.0).alpha
    assert rates[ChainDrafter] > 0.8 > 0.6 > rates[Strangers]


def test_a_row_without_a_seed_goes_by_the_rule_that_accepts_more() -> None:
    target = random_table(8, 5)
    rates = {}
    for seed in (3, None):
        drafter = ChainDrafter(TableLM(target + random_table(8, 6)), FixedLength(3))
        torch.manual_seed(0)
        requests = [Request([0, 1], 40, Sampler(False), seed=seed, stream=i) for i in range(60)]
        rows = decode(TableLM(target), drafter, requests)
        rates[seed] = summarise([step for row in rows for step in row], 1.0).alpha
    assert rates[None] > 1.05 * rates[3]


def test_tokens_differ_between_rows_and_seeds() -> None:
    requests = [*asked(40, "none", 1), *asked(40, "none", 2)]
    rows = [tuple(tokens_of(row)) for row in decode(TableLM(TARGET), PlainDrafter(), requests)]
    assert Counter(rows).most_common(1)[0][1] < 12
    streams = [SeededStream(seed, stream) for seed in range(20) for stream in range(20)]
    assert len({stream.at(position) for stream in streams for position in range(20)}) == 8000
