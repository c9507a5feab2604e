"""The loop with every method on table models: exact distributions, counts, ends and seeds."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as hf

from benchmarks.baselines.lookup import Lookup
from forerun import Decoder
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Proposal, Step
from forerun.engine.sequence import Request, Sequence
from forerun.engine.stats import Stats, summarise
from forerun.methods import AR, SD, Parts
from forerun.planning.stop_rules import DraftState, Fixed, FixedLength
from forerun.sampling.probabilities import last_probabilities
from forerun.sampling.sampler import Sampler
from tests.support import toys
from tests.support.table_drafters import DRAFTERS, METHODS, PROCESSORS
from tests.support.toys import (
    DRAFT,
    PROMPT,
    TARGET,
    TableLM,
    decode,
    fit,
    noisy_copy,
    random_table,
    sampled,
    tiny,
    tokens_of,
)

FITS, BROKEN = 1e-4, 1e-6
ROWS = 600


def fits(
    drafter: Drafter,
    processors: LogitsProcessorList | None = None,
    table: Tensor = TARGET,
    rows: int = ROWS,
) -> float:
    """p-value of the joint distribution of the first output tokens, many sequences at once."""
    return fit(sampled(lambda: drafter, rows, 1, processors, TableLM(table)), processors=processors)


@pytest.mark.slow
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampling_follows_the_targets_distribution(drafter: str, processors: str) -> None:
    assert fits(DRAFTERS[drafter](TableLM(DRAFT)), PROCESSORS[processors]) > FITS


def by_tokens(proposal: Proposal) -> Proposal:
    return replace(proposal, drafts=[replace(draft, block=False) for draft in proposal.drafts])


def test_verification_of_a_block_accepts_more() -> None:
    target = random_table(8, 5)
    tau = {}
    for is_block in (True, False):
        generator = torch.Generator().manual_seed(0)
        asked = [Request(PROMPT, 60, Sampler(False), generator=generator)] * 40
        drafter = ChainDrafter(TableLM(target + random_table(8, 6)), FixedLength(4))
        propose = drafter.propose
        if not is_block:
            drafter.propose = lambda seqs, propose=propose: by_tokens(propose(seqs))
        tau[is_block] = stats_of(decode(TableLM(target), drafter, asked)).tau
    assert tau[True] > 1.03 * tau[False]


def stats_of(rows: abc.Sequence[abc.Sequence[Step]]) -> Stats:
    return summarise([step for row in rows for step in row], 1.0)


def test_another_distribution_is_seen() -> None:
    # The same harness with a target whose logits are off by a little.
    assert fits(PlainDrafter(), table=TARGET + 0.3 * DRAFT) < BROKEN


class StopWhenUnsure(Fixed):
    """Stops after a token that the draft itself found improbable."""

    def __init__(self, least: float, gamma: int = 4) -> None:
        self.least, self.gamma = least, gamma

    def more(self, state: DraftState) -> list[bool]:
        found = last_probabilities(state.scores, state.tokens)
        return [state.depth < self.gamma and probability >= self.least for probability in found]


class DropsTheLast(ChainDrafter):
    """Drops the token that the policy stopped at: the mistake that LengthPolicy warns of.

    `points`: which drafts then count as point masses: "none", those that "lost" a token, or "all".
    """

    def __init__(self, model: TableLM, policy: StopWhenUnsure, points: str) -> None:
        super().__init__(model, policy)
        self.points = points

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts = []
        for draft in super().propose(seqs).drafts:
            root, *tokens = draft.tokens
            q = draft.q
            lost = bool(tokens) and float(draft.q[-1, tokens[-1]]) < self.policy.least
            if lost:
                tokens, q = tokens[:-1], q[:-1]
            points = self.points == "all" or (self.points == "lost" and lost)
            drafts.append(Draft.chain(root, tokens, None if points else q))
        return Proposal(drafts)


@pytest.mark.parametrize("points", [None, "all"])
def test_a_policy_that_stops_after_a_token_keeps_the_distribution(points: str | None) -> None:
    """And one that drops the token, if all drafts are point masses."""
    policy = StopWhenUnsure(0.4)
    drafter = (
        ChainDrafter(TableLM(DRAFT), policy)
        if points is None
        else DropsTheLast(TableLM(DRAFT), policy, points)
    )
    assert fits(drafter) > FITS


@pytest.mark.slow
@pytest.mark.parametrize("points", ["none", "lost"])
def test_dropping_a_token_that_was_looked_at_breaks_the_distribution(points: str) -> None:
    # "lost" is no cure: drafts that keep their q were selected by their tokens, which no longer
    # follow q. It is a small mistake.
    rows = 2 * ROWS if points == "lost" else ROWS
    assert fits(DropsTheLast(TableLM(DRAFT), StopWhenUnsure(0.4), points), rows=rows) < BROKEN


PROMPTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(
    ("draft", "gamma"), [("always", 3), ("always", 5), ("never", 3), ("sometimes", 3)]
)
def test_tau_of_drafts_that_agree_always_never_and_sometimes(draft: str, gamma: int) -> None:
    target = random_table(8, 5)
    table = {"always": target, "never": -target, "sometimes": target + 0.7 * random_table(8, 6)}[
        draft
    ]
    drafter = ChainDrafter(TableLM(table), FixedLength(gamma))
    rows = decode(
        TableLM(target), drafter, [Request(prompt, 4 * (gamma + 1)) for prompt in PROMPTS]
    )
    stats = stats_of(rows)
    origins = {step.origins for row in rows for step in row[:-1]}
    if draft == "always":
        assert (stats.tau, stats.alpha, stats.utilisation) == (gamma + 1, 1.0, 1.0)
        assert origins == {("draft",) * gamma + ("bonus",)}
    elif draft == "never":
        assert (stats.tau, stats.alpha) == (1.0, 0.0) and origins == {("correction",)}
    else:
        assert 1.2 < stats.tau < gamma + 0.8 and 0.1 < stats.alpha < 0.9


def check_steps(rows: abc.Sequence[abc.Sequence[Step]]) -> None:
    """The counts of a step explain its tokens."""
    for row in rows:
        assert [step.finish_reason is not None for step in row] == [False] * (len(row) - 1) + [True]
        for step in row:
            assert 0 <= step.accepted <= step.tested <= min(step.drafted, step.accepted + 1)
            assert len(step.origins) == len(step.tokens) >= 1
            assert len(step.rejected) == step.drafted - step.accepted
            ends = [origin for origin in step.origins if origin in ("correction", "bonus")]
            if len(step.tokens) == step.accepted + 1:
                assert (
                    ends
                    == [step.origins[-1]]
                    == ["correction" if step.tested > step.accepted else "bonus"]
                )
            else:  # cut, which only the end of a sequence may do
                assert step is row[-1] and len(step.tokens) <= step.accepted and not ends


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_steps_add_up(drafter: str, is_greedy: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(list(prompt), 1 + i, Sampler(is_greedy), frozenset({i % 9}), generator=generator)
        for i, prompt in enumerate([*PROMPTS, PROMPT] * 6)
    ]
    rows = decode(TableLM(TARGET), DRAFTERS[drafter](TableLM(TARGET + DRAFT)), requests)
    check_steps(rows)
    assert (max(step.accepted for row in rows for step in row) > 0) == (drafter != "ar")
    assert {row[-1].finish_reason for row in rows} == {"stop", "length"}


class EndsWith(StoppingCriteria):
    """Stops after a pair of tokens."""

    def __init__(self, pair: tuple[int, int]) -> None:
        self.pair = pair

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return torch.tensor([tuple(row[-2:].tolist()) == self.pair for row in input_ids])


def cut(
    prompt: abc.Sequence[int], output: abc.Sequence[int], eos: int, pair: tuple[int, int]
) -> tuple[list[int], str]:
    """What is left of plain output, and why it ends."""
    for count, token in enumerate(output, 1):
        if token == eos or (*prompt, *output[:count])[-2:] == pair:
            return list(output[:count]), "stop"
    return list(output), "length"


@given(st.data())
def test_ends_inside_a_chunk_cut_where_plain_decoding_stops(data: st.DataObject) -> None:
    size = 8
    target = random_table(size, data.draw(st.integers(0, 50)))
    gamma = data.draw(st.integers(1, 7))
    noise = data.draw(st.sampled_from([0.0, 0.3]))
    limits = [data.draw(st.integers(1, 14)) for _ in PROMPTS]
    eos = data.draw(st.integers(0, size))
    pair = (data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1)))
    plain = decode(TableLM(target), PlainDrafter(), [Request(prompt, 14) for prompt in PROMPTS])
    expected = [
        cut(prompt, tokens_of(steps)[:limit], eos, pair)
        for prompt, steps, limit in zip(PROMPTS, plain, limits, strict=True)
    ]
    ends: dict[str, Any] = {
        "eos": frozenset({eos}),
        "criteria": StoppingCriteriaList([EndsWith(pair)]),
    }
    for method in (AR(), SD(gamma), Lookup(gamma, 2)):
        drafter = method.build(
            Parts(TableLM(target), TableLM(target + noise * random_table(size, 99)))
        )
        requests = [
            Request(prompt, limit, **ends) for prompt, limit in zip(PROMPTS, limits, strict=True)
        ]
        rows = decode(TableLM(target), drafter, requests)
        # Rows end at different times here; each must be what it is alone.
        assert [(tokens_of(row), row[-1].finish_reason) for row in rows] == expected
        check_steps(rows)


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_cut_text_and_tokens(method: str) -> None:
    tokenizer = toys.tiny_tokenizer()
    target = tiny("llama", vocab=len(tokenizer))
    decoder = Decoder(target, tokenizer, noisy_copy(target, 0.01), METHODS[method], guard=False)
    # The output is ASCII, and the prompt ends in what it cannot hold, so stop strings lie in the
    # output.
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    odd = [token for token, text in enumerate(texts) if not text.isprintable() or "\ufffd" in text]
    processors = LogitsProcessorList([hf.SuppressTokensLogitsProcessor(odd)])
    options: Any = {"logits_processor": processors, "max_new_tokens": 30}
    prompt = tokenizer.encode("def add(a, b):\n")
    plain = Decoder(target, tokenizer, None, AR()).generate(prompt, **options)
    for at in (0, 7, 20):
        stop = plain.text[at : at + 3]
        options["stop"] = [stop, "\n\n"]
        end = next(n for n in range(1, 31) if stop in tokenizer.decode(plain.tokens[:n]))
        done = decoder.generate(prompt, **options)
        assert done.tokens == plain.tokens[:end] and done.finish_reason == "stop"
        assert done.text == plain.text[: plain.text.find(stop)]
        assert "".join(chunk.text for chunk in decoder.stream(prompt, **options)) == done.text
