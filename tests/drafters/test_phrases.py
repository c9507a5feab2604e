"""Pools of phrases, and what drafting by phrases says and costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.lookahead import Lookahead, LookaheadDrafter
from forerun import Decoder
from forerun.drafters import phrases, pools
from forerun.drafters.pacer import PacerStop
from forerun.drafters.phrases import OuroborosDrafter, PhraseMemo, PhraseNote
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.pools import PhrasePool
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import RowOutcome
from forerun.methods import Method, Ouroboros, Pacer, PacerOuroboros, Parts
from forerun.planning.stop_rules import FixedLength, LengthPolicy
from forerun.sampling.sampler import Sampler
from tests.support import toys
from tests.support.toys import (
    COSTS,
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


def contents(pool: PhrasePool) -> dict[int, list[tuple[int, ...]]]:
    return {key: pool.get(key) for key in range(20) if pool.get(key)}


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=3, max_size=3)),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_a_pool_keeps_the_newest(puts: list[tuple[int, list[int]]], most: int) -> None:
    """Against a log that is read backwards."""
    pool = PhrasePool(3, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "KEYS", 4)
        for key, phrase in puts:
            pool.add(key, phrase)
    recent = list(dict.fromkeys(key for key, _ in reversed(puts)))
    for key in range(6):
        mine = list(dict.fromkeys(tuple(phrase) for own, phrase in reversed(puts) if own == key))
        if key not in recent[:4]:
            assert pool.get(key) == []
        elif (
            recent.index(key) < 4 and len(recent) <= 4
        ):  # a key that was thrown out and came back has lost its past
            assert pool.get(key) == mine[:most] and pool.get(key, 1) == mine[:1]
    assert len(pool) == sum(map(len, contents(pool).values())) <= 4 * most


def test_a_text_is_learnt_as_it_grows() -> None:
    text = Random(0).choices(range(9), k=50)
    whole = PhrasePool(4, 3)
    parts = PhrasePool(4, 3)
    assert whole.learn(text) == 46
    at = 0
    for end in (2, 10, 11, 30, 50):
        at = parts.learn(text[:end], at)
    assert contents(parts) == contents(whole) and whole.get(text[45])[0] == tuple(text[46:50])
    whole.drop(text[45], text[46:50])
    assert tuple(text[46:50]) not in whole.get(text[45])


WAYS: dict[str, Method] = {
    "ouroboros": Ouroboros(guesses=3, ngram=3, suffixes=2, gamma=5),
    "no suffixes": Ouroboros(guesses=2, ngram=4, suffixes=0, gamma=7),
    "pacer-ouroboros": PacerOuroboros(ngram=3, suffixes=2, most=9),
    "lookahead": Lookahead(3, 3, 3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3", "mistral"])
def test_greedy_output_is_that_of_plain_decoding(architecture: str, way: str) -> None:
    """Batch 1 and 4, with cold pools and warm ones."""
    target = tiny(architecture)
    small = noisy_copy(target, 0.03)
    prompts = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]
    plain = Decoder(target).generate(prompts, max_new_tokens=24, ignore_eos=True)
    decoder = Decoder(
        target, None, small, WAYS[way], False, **toys.parts_of(WAYS[way].name, target, small)
    )
    for _ in range(2):
        done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == [row.tokens for row in plain]
        assert sum(row.stats.drafted for row in done) > 0
        assert (
            decoder.generate(prompts[2], max_new_tokens=24, ignore_eos=True).tokens
            == plain[2].tokens
        )
    (pool,) = decoder.pools.values()
    assert len(pool) > 20


def few(most: int) -> OuroborosDrafter:
    """One whose phrases pay for few greedy rows alone."""
    made = drafter(pacer=True)
    made.chooser.tries_phrases = lambda situation: situation.rows <= most  # type: ignore[method-assign]
    return made


def test_steps_with_many_greedy_rows_go_without_phrases() -> None:
    """Which is decided at each step; sampled and seeded rows go by phrases always."""
    sampler = Sampler(False)
    requests = [Request(PROMPT, new) for new in (9, 18, 30)]
    requests += [Request(PROMPT, 40, sampler, seed=1), Request(PROMPT, 40, sampler)]
    made = few(2)
    steps = list[tuple[list[str], list[str]]]()
    propose = made.propose
    made.propose = lambda seqs: steps.append(([], [])) or propose(seqs)  # type: ignore[method-assign]
    for way, grow in enumerate((made._grow_by_phrases, made._grow)):

        def noted(chains, *rest, way=way, grow=grow):
            steps[-1][way].extend("greedy" if chain.seq.greedy else "sampled" for chain in chains)
            return grow(chains, *rest)

        setattr(made, grow.__name__, noted)
    outputs = [tokens_of(steps) for steps in decode(TableLM(TARGET), made, requests)]
    assert steps[0] == (["sampled"] * 2, ["greedy"] * 3)
    for by_phrases, in_step in steps:
        assert "greedy" not in by_phrases or (not in_step and by_phrases.count("greedy") <= 2)
        assert set(in_step) <= {"greedy"} and len(in_step) != 2
    assert {by_phrases.count("greedy") for by_phrases, _ in steps} == {0, 1, 2}
    # Greedy rows say what the target says, and a seeded row what it says alone.
    plain = decode(TableLM(TARGET), PlainDrafter(), requests[:3])
    alone = decode(TableLM(TARGET), few(2), requests[3:4])
    assert outputs[:4] == [tokens_of(steps) for steps in (*plain, *alone)]
    assert not made.rows and not made.policy.past and not made.model.rows


def test_a_row_keeps_its_state_between_both_ways() -> None:
    """A sequence's notes do not depend on how it is drafted.

    They are its echoes, its runs of accepted tokens and the draft's cache.
    """
    made = few(1)
    engine = Engine(TableLM(TARGET), made, max_rows=2)
    first = engine.add(Request(PROMPT, 60))
    ways = []
    for turn in range(12):
        if turn == 4:
            engine.add(Request([2, 1], 6))
        engine.step()
        (seq,) = [seq for seq in engine.running if seq.id == first]
        ways.append(len(engine.running))
        row = made.model.rows[first]
        assert row == seq.tokens[: len(row)] and len(row) < len(seq.tokens)
    assert 2 in ways[4:] and ways[-1] == 1
    assert made.policy.past[first].echo._known > len(PROMPT) + 5 and made.rows[first].read > len(
        PROMPT
    )


def test_the_policy_of_pacer_ouroboros_is_priced_by_how_rows_are_drafted() -> None:
    parts = Parts(TableLM(TARGET), TableLM(DRAFT), LAYER, COSTS)
    by_phrases, plain = (chosen.policy(parts) for chosen in (PacerOuroboros(), Pacer()))
    assert isinstance(by_phrases, PacerStop) and isinstance(plain, PacerStop)
    assert plain.costs == COSTS
    assert by_phrases.costs is not None and by_phrases.costs.target == COSTS.target
    assert by_phrases.costs.draft == {1: 0.3 * COSTS.drafting(1 + 1 * 8)}


@pytest.mark.parametrize(("ms", "least", "most"), [(1.01, 60, 70), (1000.0, 1, 3), (10.0, 4, 60)])
def test_phrases_rest_where_forwards_with_them_draft_less_a_ms(
    ms: float, least: int, most: int
) -> None:
    """Phrases end by their costs alone or by their yield, and are tried again.

    `ms` is the time of a forward of 64 tokens, where one token takes 1 ms.
    """
    made = drafter(suffixes=0)
    ways = []
    made.chooser.costs = replace(COSTS, draft={1: 1.0, 64: ms}, chained=0.0)
    for way, grow in enumerate((made._grow, made._grow_by_phrases)):
        setattr(
            made, grow.__name__, lambda *given, way=way, grow=grow: ways.append(way) or grow(*given)
        )
    (steps,) = decode(TableLM(TARGET), made, [Request(PROMPT, 400)])
    assert tokens_of(steps) == tokens_of(
        decode(TableLM(TARGET), PlainDrafter(), [Request(PROMPT, 400)])[0]
    )
    assert len(ways) >= 70 and least <= sum(ways[:70]) <= most
    assert (made.rows, made._open) == ({}, set())


LAYER = toys.random_layer()


def drafter(pacer: bool = False, pool: PhrasePool | None = None, **settings) -> OuroborosDrafter:
    made = {"guesses": 3, "ngram": 3, "suffixes": 2} | settings
    chosen = PacerOuroboros(**made) if pacer else Ouroboros(**{"gamma": 5} | made)
    policy: LengthPolicy = FixedLength(made.get("gamma", 5))
    if pacer:
        policy = PacerStop(LAYER, 2, 7, costs=COSTS)
    return OuroborosDrafter(chosen, TableLM(DRAFT), policy, len(DRAFT), pool)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("pacer", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
def test_sampling_follows_the_targets_distribution(batch: int, pacer: bool) -> None:
    rows = sampled(lambda: drafter(pacer=pacer), batch, 800 // batch)
    assert fit(rows) > 1e-4
    assert sum(step.drafted for steps in rows for step in steps) > len(rows)


def test_sampled_sequences_have_pools_of_their_own() -> None:
    asked = [Request(PROMPT, 12, Sampler(False), seed=3)]
    for kind in (drafter, lambda pool: LookaheadDrafter(2, 3, 2, pool)):
        pool = PhrasePool(2, 3)
        made = kind(pool=pool)
        (first,) = decode(TableLM(TARGET), made, asked)
        assert not len(pool)
        decode(TableLM(TARGET), made, [Request(PROMPT, 20)])
        assert len(pool) > 5
        (again,) = decode(TableLM(TARGET), made, asked)
        assert tokens_of(first) == tokens_of(again) and not made.rows


@pytest.mark.parametrize("count", [1, 2, 3])
def test_phrases_behind_a_draft_fill_all_the_room_that_is_left(count: int) -> None:
    """A phrase fills what the draft leaves free.

    The draft ends `count` tokens short of what the sequence may draft, so as many tokens fit.
    """
    made = drafter(guesses=0, suffixes=1, gamma=2)
    seq = Sequence(Request([0], 2 + count + 1))
    list(made.admit(seq, None, 8))
    (steps,) = decode(TableLM(DRAFT), PlainDrafter(), [Request([0], 2)])  # what the draft will say
    made.rows[0].pool.add(tokens_of(steps)[-1], (1, 3))
    draft = made.propose([seq]).drafts[0]
    assert draft.tokens[3:] == [1, 3][:count] and max(draft.depths) == 2 + min(2, count)
    made.drop(seq)
    assert not made.rows and not made.model.rows


def test_the_targets_verdict_becomes_phrases() -> None:
    made = drafter(guesses=0, suffixes=2)
    seen = list[Verdict]()
    made.policy.observe = lambda outcomes: seen.extend(outcome.verdict for outcome in outcomes)  # type: ignore[method-assign]
    seq = Sequence(Request([0, 1], 38))
    list(made.admit(seq, None, 8))
    row = made.rows[0]
    row.pool.add(3, (1, 1))

    def drafted() -> tuple[Draft, PhraseMemo]:
        chain = phrases._Phrased(seq, 9, [2, 2, 2, 3])
        draft = made._with_suffixes(chain)
        return draft, PhraseMemo({0: PhraseNote(4, chain.suffixes)})

    first, memo = drafted()
    assert first.tokens == [1, 2, 2, 2, 3, 1, 1] and first.origins[-2:] == ["phrase"] * 2

    def verdict(accepted: int) -> Verdict:
        return Verdict(
            list(range(accepted + 1)), 0, accepted + 1, True, [10 + node for node in range(7)]
        )

    made.observe([RowOutcome(seq, first, verdict(1))], memo)
    # From the rejected token on: the target's token after each; and after the end as well.
    assert row.pool.get(2) == [(13, 14), (12, 13)] and row.pool.get(3) == [(14, 15)]
    assert [(observed.accepted, observed.rejected) for observed in seen] == [(1, True)]
    # A step that drafted nothing.
    made.observe([RowOutcome(seq, Draft.root(1), Verdict([0], 0, 0, False, [5]))], None)
    last, memo = drafted()
    made.observe([RowOutcome(seq, last, verdict(4))], memo)
    assert (seen[2].accepted, seen[2].rejected) == (
        4,
        False,
    )  # the phrase was rejected, not the chain


@pytest.mark.slow
def test_tokens_that_the_draft_lacks() -> None:
    """Phrases with such are not for it, after the chain they may be."""
    target = random_table(6, 3, 1.3)
    draft = random_table(4, 4, 1.3)
    pools = []

    def lacking() -> OuroborosDrafter:
        made = drafter()
        made.model = TableLM(draft)  # type: ignore[assignment]
        made.vocab_size = 6
        drop = made.drop
        made.drop = lambda seq: pools.append(made.rows[seq.id].pool) or drop(seq)  # type: ignore[method-assign]
        return made

    rows = sampled(lacking, 1, 800, target=TableLM(target))
    assert any(max(phrase) > 3 for pool in pools for key in range(6) for phrase in pool.get(key))
    assert fit(rows, target) > 1e-4


def test_phrases_outlive_the_call_where_they_may() -> None:
    target = tiny("llama")
    made = [
        Decoder(target, None, noisy_copy(target, 0.03), Ouroboros(warm=warm), False)
        for warm in (True, False)
    ]
    text = [5, 6, 7, 5, 6]
    first, second = [
        made[0].generate(text, max_new_tokens=40).stats.draft_forwards for _ in range(2)
    ]
    assert second < first
    assert (
        len({made[1].generate(text, max_new_tokens=40).stats.draft_forwards for _ in range(2)}) == 1
    )
    assert not made[1].pools
    # What is sampled may not depend on what came before.
    sampled = [
        made[0].generate(text, max_new_tokens=20, temperature=1.0, seed=3).tokens for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
