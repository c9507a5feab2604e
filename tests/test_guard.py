"""The guard under clocks that the tests turn: when it drafts, and that what is said never depends on it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toys import TableLM, joint_law, noisy_copy, p_value, random_table, tiny
from transformers import GenerationConfig

import forerun
from forerun import Decoder, SamplingParams
from forerun.decode import Drafter, Generation, Proposal, Step, decode
from forerun.draft import Draft
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.guard import CHECK, FIRST, LONGEST, SHARE, Guarded, Pace
from forerun.lengths import FixedLength, LengthPolicy, Look
from forerun.methods import AR, SD, Lookup, Method, Parts
from forerun.sampling import Sampler, Verdict

GAMMA = 4
TARGET = random_table(8, 5)
NEVER = -TARGET
PROMPTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 2, 0, 1, 2]]


class Clock:
    """Stands still but for what the models below put on it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ticking(TableLM):
    """A table model whose forwards take time on a clock: `each` seconds, and `more` for every token but the first."""

    def __init__(self, table: Tensor, clock: Clock, each: float, more: float = 0.0) -> None:
        super().__init__(table)
        self.clock, self.each, self.more, self.prompts = clock, each, more, 0

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        super().start(prompts)
        self.clock.now += self.each
        self.prompts += 1

    def _logits(self, trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        self.clock.now += self.each + self.more * (max(len(tokens) for tokens, _ in trees) - 1)
        return super()._logits(trees)


class Bench:
    """A target of one second a forward and a guarded draft beside it, over as many calls as wanted."""

    def __init__(self, draft: Tensor = NEVER, each: float = 0.25, gamma: int = GAMMA) -> None:
        self.pace = Pace(Clock())
        clock = self.pace.clock
        assert isinstance(clock, Clock)
        self.clock, self.gamma = clock, gamma
        self.target, self.draft = Ticking(TARGET, clock, 1.0), Ticking(draft, clock, each)

    def call(self, new: int, prompts: Sequence[Sequence[int]] = PROMPTS[:1]) -> list[Step]:
        seqs = [Generation(list(prompt), len(prompt) + new, index=i) for i, prompt in enumerate(prompts)]
        drafter = Guarded(ChainDrafter(self.draft, FixedLength(self.gamma)), self.pace)
        return [step for batch in decode(self.target, drafter, seqs) for step in batch]


def pauses(steps: Sequence[Step]) -> list[int]:
    """Lengths of the runs of plain steps before, between and behind drafting ones."""
    runs = [0]
    for step in steps:
        if step.drafted:
            runs.append(0)
        else:
            runs[-1] += 1
    return runs


def test_a_useless_draft_is_soon_left_out() -> None:
    bench = Bench()
    steps = bench.call(257)
    # Two plain steps, drafting until more than the allowance of 2 is lost at 1 a step, then single trials.
    assert pauses(steps)[:6] == [2, 0, 0, CHECK, FIRST, 2 * FIRST]
    assert all(step.origins == ("bonus",) for step in steps if not step.drafted)
    assert sum(step.drafted > 0 for step in steps) <= 8
    # A draft that agrees is never left out, but for a look at plain steps now and then.
    steps = Bench(TARGET).call(1000)
    plain = sum(not step.drafted for step in steps)
    assert 3 <= plain < 0.03 * len(steps)


def test_pauses_double_and_are_bounded_by_what_trials_cost() -> None:
    for each, gamma in ((0.25, 4), (0.5, 6)):
        bench = Bench(each=each, gamma=gamma)
        found = [run for run in pauses(bench.call(6000))[1:-1] if run > CHECK]
        # A trial costs the draft's forwards; its first one also reads what the draft missed, at no cost here.
        lost = each * gamma
        assert found[:4] == [FIRST * lost, 2 * FIRST * lost, 4 * FIRST * lost, LONGEST * lost]
        assert set(found[3:]) == {LONGEST * lost}


def test_never_slower_by_much_than_plain_decoding() -> None:
    for each in (0.01, 0.1, 0.25, 1.0):
        for draft in (NEVER, random_table(8, 77), TARGET + 2.0 * random_table(8, 6)):
            bench = Bench(draft, each)
            bench.call(512)
            for _ in range(4):
                begun = bench.clock.now
                bench.call(512)
                assert bench.clock.now - begun < 1.03 * 513  # the prompt included


def test_drafting_comes_back_when_the_text_turns_friendly() -> None:
    bench = Bench()
    bench.call(300)
    assert bench.pace.paused
    bench.draft.table = TARGET
    steps = bench.call(600)
    first = next(i for i, step in enumerate(steps) if step.drafted)
    assert first <= LONGEST
    assert sum(not step.drafted for step in steps[first:]) <= 3  # but for looks at the plain step
    # And goes when it turns hostile: as much as it may lose of its earnings, then a check, then trials.
    bench.draft.table = NEVER
    assert [run for run in pauses(bench.call(200)) if run][:2] == [CHECK, CHECK]


def test_state_survives_calls_and_a_new_text_waits_half_as_long() -> None:
    bench = Bench()
    bench.call(200)
    wait, prompts = bench.pace.wait, bench.draft.prompts
    assert wait > 20
    steps = bench.call(wait // 2)
    assert not any(step.drafted for step in steps)
    # The draft has not even run the prompt of that call.
    assert bench.draft.prompts == prompts and not bench.pace.paused
    # The next one drafts at once, with nothing to learn, and pays for the draft's prompt with a longer pause.
    failures = bench.pace.failures
    steps = bench.call(100)
    assert [step.drafted > 0 for step in steps[:2]] == [True, False] and bench.draft.prompts == prompts + 1
    assert bench.pace.failures == failures + 1


def test_the_clock_is_read_again_when_the_machine_changes() -> None:
    bench = Bench(TARGET, each=0.25)
    bench.call(200)
    # Everything takes four times as long: drafting seems to lose, until the check says that plain steps do as well.
    bench.target.each, bench.draft.each = 4.0, 1.0
    steps = bench.call(200)
    assert sum(not step.drafted for step in steps) <= CHECK + 3
    # And back. Plain steps that seem slow make drafting look good; they are looked at again.
    bench.target.each, bench.draft.each = 1.0, 0.25
    bench.call(1000)
    bench.draft.each = 2.0
    assert sum(step.drafted > 0 for step in bench.call(200)) < 10


def test_a_single_slow_step_decides_nothing() -> None:
    bench = Bench(TARGET)
    bench.call(60)
    begun, forward = bench.draft.each, bench.draft.extend
    calls = 0

    def slow(chains: Sequence[Sequence[int]]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        bench.draft.each = 50.0 if calls == 20 else begun
        return forward(chains)

    bench.draft.extend = slow  # type: ignore[method-assign]
    steps = bench.call(200)
    assert calls > 20 and sum(not step.drafted for step in steps) <= 1


def test_rows_share_a_step_and_each_number_of_rows_has_its_plain_time() -> None:
    bench = Bench(TARGET)
    prompts = [[0], [1, 2, 3], [3, 3]]
    seqs = [Generation(list(prompt), len(prompt) + 30 * (i + 1), index=i) for i, prompt in enumerate(prompts)]
    drafter = Guarded(ChainDrafter(bench.draft, FixedLength(GAMMA)), bench.pace)
    batches = list(decode(bench.target, drafter, seqs))
    plain = [len(batch) for batch in batches if not any(step.drafted for step in batch)]
    # Two for the first number, one for each that follows; the last may be a row's end.
    assert plain[:4] == [3, 3, 2, 1]
    assert len(batches) < 30


class Bursts(Drafter):
    """Proposes the target's own tokens in every other stretch of `length` tokens, else nothing, as lookup does."""

    wants_hidden = False

    def __init__(self, length: int) -> None:
        self.length, self.observed = length, 0

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None: ...

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        drafts = []
        for seq in seqs:
            text = [0, *seq.tokens]
            for _ in range(min(GAMMA, seq.room - 1)):
                text.append(int(TARGET[text[-2], text[-1]].argmax()))
            says = len(seq.tokens) // self.length % 2
            drafts.append(Draft.chain(seq.tokens[-1], text[len(seq.tokens) + 1 :] if says else []))
        return Proposal(drafts)

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        self.observed += 1

    def keep(self, rows: list[int]) -> None: ...


def test_bursts_are_taken_whole_and_silence_costs_nothing() -> None:
    pace = Pace(Clock())
    assert isinstance(pace.clock, Clock)
    target = Ticking(TARGET, pace.clock, 1.0, 0.1)

    def steps(drafter: Drafter) -> list[tuple[int, int]]:
        found = decode(target, drafter, [Generation([0], 401)])
        return [(step.drafted, len(step.tokens)) for batch in found for step in batch]

    plain, guarded = steps(Bursts(40)), steps(Guarded(Bursts(40), pace))
    # Nothing is lost but the two first steps and a look now and then.
    assert len(guarded) <= len(plain) + 4 and not pace.paused


class Recorder(ChainDrafter):
    """Keeps what it is told, and checks that its cache is a beginning of each sequence, short of the last token."""

    def __init__(self, model: TableLM, policy: LengthPolicy, wants_hidden: bool = False) -> None:
        super().__init__(model, policy)
        self.wants_hidden = wants_hidden
        self.started: list[int] = []
        self.told: list[tuple[int, bool]] = []

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        super().start(seqs, hidden)
        self.started.append(sum(len(seq.output) for seq in seqs))

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        super().observe(seqs, drafts, verdicts, hidden)
        self.told.append((max(draft.drafted for draft in drafts), hidden is not None))
        for row, seq in zip(self.model.cache.rows, seqs, strict=True):
            assert row == seq.tokens[: len(row)] and len(row) < len(seq.tokens)


class Scheduled(Pace):
    """Drafts where it is told to, with time at random."""

    def __init__(self, draw: Callable[[], bool], pauses: bool, seed: int = 0) -> None:
        super().__init__(random.Random(seed).random)
        self.draw, self.wait = draw, 4 if pauses else 0

    def drafts(self, rows: int) -> bool:
        self._plain.setdefault(rows, deque([1.0], maxlen=3))
        return self.draw()


@given(st.data())
def test_no_schedule_of_pauses_changes_greedy_output(data: st.DataObject) -> None:
    size = 8
    target = random_table(size, data.draw(st.integers(0, 30)))
    rows, eos = data.draw(st.integers(1, 4)), data.draw(st.integers(0, size))
    limits = [data.draw(st.integers(1, 25)) for _ in range(rows)]

    def outputs(drafter: Drafter) -> list[tuple[list[int], str | None]]:
        seqs = [
            Generation(list(prompt), len(prompt) + limit, eos=frozenset({eos}), index=i)
            for i, (prompt, limit) in enumerate(zip(PROMPTS[:rows], limits, strict=True))
        ]
        for _ in decode(TableLM(target), drafter, seqs):
            pass
        return [(seq.output, seq.finish_reason) for seq in seqs]

    expected = outputs(AR().build(Parts(TableLM(target))))
    draft = TableLM(target + data.draw(st.sampled_from([0.0, 0.4, 2.0])) * random_table(size, 99))
    draw, pauses = (lambda: data.draw(st.booleans())), data.draw(st.booleans())
    for inner in (
        Recorder(draft, FixedLength(3)),
        Recorder(draft, FixedLength(3), True),
        Lookup(4, 2).build(Parts(draft)),
    ):
        assert outputs(Guarded(inner, Scheduled(draw, pauses))) == expected
        if isinstance(inner, Recorder) and inner.wants_hidden:
            assert inner.started == [0]
        elif isinstance(inner, Recorder):
            assert len(inner.started) <= 1
    # The real pace, under a clock that jumps.
    ticks = random.Random(data.draw(st.integers(0, 99)))
    pace = Pace(lambda: ticks.expovariate(1.0))  # which goes backwards as well
    for _ in range(2):
        assert outputs(Guarded(Recorder(draft, FixedLength(3)), pace)) == expected


def test_only_drafts_that_were_made_are_observed_unless_hidden_states_are_wanted() -> None:
    plan = [True, False, False, True, False, True, True, False]
    told = {}
    for wants in (False, True):
        turns = iter(plan * 9)
        drafter = Recorder(TableLM(TARGET), FixedLength(2), wants)
        guarded = Guarded(drafter, Scheduled(lambda turns=turns: next(turns), False))
        assert guarded.wants_hidden == wants
        for _ in decode(TableLM(TARGET), guarded, [Generation([0], 31)]):
            pass
        told[wants] = [drafted for drafted, _ in drafter.told]
    assert told[False] == [drafted for drafted in told[True] if drafted]
    assert told[True][: len(plan)] == [2 if drafts else 0 for drafts in plan]


@pytest.mark.parametrize("method", [SD(3), Lookup(3, 2)])
def test_sampling_with_pauses_keeps_the_targets_law(method: Method) -> None:
    target, draft, prompt, new = random_table(4, 1, 1.3), random_table(4, 2, 1.3), [0, 1, 2, 3, 2, 1, 0, 1], 5
    generator, turns = torch.Generator().manual_seed(0), random.Random(3)
    seqs = []
    # Many small batches, as all rows of one draft or pause together.
    for _ in range(100):
        batch = [Generation(list(prompt), len(prompt) + new, Sampler(False), generator=generator) for _ in range(20)]
        drafter = method.build(Parts(TableLM(target), TableLM(draft)))
        for _ in decode(TableLM(target), Guarded(drafter, Scheduled(lambda: turns.random() < 0.5, False)), batch):
            pass
        seqs += batch
    assert p_value([seq.output[:3] for seq in seqs], joint_law(target, prompt, 3, None)) > 1e-4


def test_sampling_with_a_pace_that_follows_acceptance_keeps_the_targets_law() -> None:
    # Whether the next step drafts depends on what was accepted, as it does under a real clock.
    target, draft, prompt, new = random_table(4, 1, 1.3), random_table(4, 2, 1.3), [0, 1, 2, 3, 2, 1, 0, 1], 5
    generator, pace = torch.Generator().manual_seed(0), Pace(Clock())
    assert isinstance(pace.clock, Clock)
    models = Ticking(target, pace.clock, 1.0), Ticking(draft, pace.clock, 0.35)
    seqs, drafted = [], []
    for _ in range(2000):
        seq = Generation(list(prompt), len(prompt) + new, Sampler(False), generator=generator)
        pace.wait = min(pace.wait, 3)
        for [step] in decode(models[0], Guarded(ChainDrafter(models[1], FixedLength(2)), pace), [seq]):
            drafted.append(step.drafted > 0)
        seqs.append(seq)
    assert 0.1 < sum(drafted) / len(drafted) < 0.9
    assert p_value([seq.output[:3] for seq in seqs], joint_law(target, prompt, 3, None)) > 1e-4


def jumpy(decoder: Decoder, seed: int) -> Decoder:
    """The decoder with a clock of random steps in place of time, for whatever paces it comes to have."""
    ticks, now = random.Random(seed), [0.0]

    def clock() -> float:
        now[0] += ticks.expovariate(1.0)
        return now[0]

    class Paces(dict):  # type: ignore[type-arg]
        def setdefault(self, key: Any, default: Pace) -> Pace:
            default.clock = clock
            return super().setdefault(key, default)

    decoder._paces = Paces()
    return decoder


@pytest.mark.parametrize("method", [SD(3), Lookup(4, 2)])
def test_a_real_model_says_the_same(method: Method) -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.02)
    prompts = [[5, 6, 7, 5, 6], [9], list(range(2, 40))]
    plain = [each.tokens for each in Decoder(target, method=AR()).generate(prompts, max_new_tokens=30)]
    kinds = set()
    for seed in range(4):
        decoder = jumpy(Decoder(target, None, draft, method), seed)
        for rows in (prompts, prompts[::-1], prompts[:1], prompts):
            done = decoder.generate(rows, max_new_tokens=30)
            assert [each.tokens for each in done] == [plain[prompts.index(row)] for row in rows]
            kinds |= {step.drafted > 0 for each in done for step in each.steps}
            assert [origin for each in done for step in each.steps for origin in step.origins if not step.drafted] == [
                "bonus" for each in done for step in each.steps if not step.drafted
            ]
    assert kinds == {True, False}


def is_guarded(decoder: Decoder, params: Any = None, **options: Any) -> bool:
    decoder._paces.clear()
    decoder.generate([3, 4, 5], params, **({} if params else {"max_new_tokens": 4}), **options)
    return bool(decoder._paces)


def test_when_the_guard_is_on() -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.02)
    sampled = GenerationConfig(max_new_tokens=4, do_sample=True)
    for guard, expected in ((None, [True, True, False, False]), (True, [True] * 4), (False, [False] * 4)):
        decoder = forerun.load(target, draft=draft, gamma=2, guard=guard)
        found = [
            is_guarded(decoder),
            is_guarded(decoder, temperature=1.0),
            is_guarded(decoder, temperature=1.0, seed=3),
        ]
        assert [*found, is_guarded(decoder, sampled)] == expected
        assert is_guarded(decoder, seed=3) == expected[0]  # nothing is drawn
        assert not is_guarded(Decoder(target, method=AR(), guard=guard))


def test_seeds_reproduce_whatever_the_clock_says() -> None:
    target = tiny("llama")
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=30)
    texts = []
    for seed, guard in ((1, None), (2, None), (3, False)):
        decoder = jumpy(Decoder(target, None, noisy_copy(target, 0.03), SD(3), guard), seed)
        for _ in range(2):
            decoder.generate([7, 8, 9], max_new_tokens=30)  # greedy, which the guard watches
            texts.append(decoder.generate([3, 4, 5], params).tokens)
    assert all(text == texts[0] for text in texts)


def test_methods_and_ways_of_choosing_have_paces_of_their_own() -> None:
    target = tiny("llama")
    decoder = Decoder(target, None, noisy_copy(target, 0.03), SD(3))
    for options in ({}, {"temperature": 1.0}, {"max_new_tokens": 3}):
        decoder.generate([3, 4, 5], **{"max_new_tokens": 9, **options})
    assert set(decoder._paces) == {(SD(3), True), (SD(3), False)}


def test_streams_share_a_pace() -> None:
    target = tiny("llama")
    decoder = jumpy(Decoder(target, None, noisy_copy(target, 0.02), SD(3)), 0)
    prompts = [[5, 6, 7], [9, 8]]
    plain = [Decoder(target, method=AR()).generate(prompt, max_new_tokens=20).tokens for prompt in prompts]
    streams = [decoder.stream(prompt, max_new_tokens=20) for prompt in prompts]
    said: list[list[int]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            chunk = next(stream, None)
            said[i] += chunk.step.tokens if chunk else ()
    assert said == plain


@pytest.mark.parametrize("sample", [False, True])
def test_transformers_generate(sample: bool) -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.02)
    prompt = torch.tensor([[3, 4, 5]])
    for guard, expected in ((None, not sample), (True, True), (False, False)):
        options = {"max_new_tokens": 8, "do_sample": sample, "pad_token_id": 0, "draft": draft, "guard": guard}
        torch.manual_seed(0)
        target.generate(prompt, custom_generate=forerun.custom_generate, **options)
        decoder = vars(target)[forerun.hf._KEPT].decoder
        assert bool(decoder._paces) == expected
        decoder._paces.clear()


class Looking(LengthPolicy):
    """Wants both models' hidden states."""

    wants_draft = wants_target = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def more(self, look: Look) -> list[bool]:
        assert look.hidden is not None and len(look.hidden) == len(look.rows)
        return [look.depth < 3] * len(look.rows)

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        assert hidden is not None and hidden.shape[:2] == (len(drafts), max(map(len, drafts)))
        self.seen.append(tuple(draft.drafted for draft in drafts))


def test_hidden_states_come_through() -> None:
    decoder = Decoder(tiny("llama"), None, noisy_copy(tiny("llama"), 0.02), SD(3))
    assert decoder.draft is not None
    policy, turns = Looking(), random.Random(1)
    drafter = Guarded(ChainDrafter(decoder.draft.fresh(), policy), Scheduled(lambda: turns.random() < 0.5, True))
    seqs = [Generation(prompt, len(prompt) + 12, index=i) for i, prompt in enumerate(([5, 6, 7], [9], [2, 3]))]
    count = sum(1 for _ in decode(decoder.target.fresh(), drafter, seqs))
    assert len(policy.seen) == count and {0, 3} <= {n for drafted in policy.seen for n in drafted}
    expected = Decoder(tiny("llama"), method=AR()).generate(
        [seq.tokens[: seq.prompt_length] for seq in seqs], max_new_tokens=12
    )
    assert [seq.output for seq in seqs] == [each.tokens for each in expected]


def test_looks_at_the_plain_step_cost_a_small_share() -> None:
    bench = Bench(TARGET, each=0.1)
    steps = bench.call(20000)
    lost = sum(not step.drafted for step in steps[2:])
    assert 0 < lost <= SHARE * bench.clock.now * 1.5
