"""Suffix drafting: what is counted, what is drafted after a match, and what outlives a request."""

from __future__ import annotations

from collections import Counter, abc
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from forerun import Decoder
from forerun.drafters.automaton import Automaton
from forerun.drafters.hybrid import HybridDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.drafters.pools import SuffixMemory
from forerun.drafters.suffix import LEAD, SuffixDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.engine import Engine, Proposal
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Drafter, RowOutcome
from forerun.engine.target import Capture, ChunkSize, EngineChunks, next_size
from forerun.methods import AR, SD, Hybrid, Parts, Suffix, method
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import StepSituation
from forerun.planning.guard import Guard, GuardedDrafter
from forerun.planning.source_chooser import SourceChooser, SourceOutcome
from forerun.sampling.sampler import Constraint, Sampler
from tests.support.failures import interrupt_once
from tests.support.toys import (
    DRAFT,
    TARGET,
    TableLM,
    drain,
    fit,
    noisy_copy,
    piecemeal,
    random_head,
    random_layer,
    refuses,
    sampled,
    tiny,
)

texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class Brute:
    """All stretches of some texts, counted one by one."""

    def __init__(self, kept: abc.Sequence[abc.Sequence[int]]) -> None:
        spans = [
            tuple(text[i:j])
            for text in kept
            for i in range(len(text))
            for j in range(i + 1, len(text) + 1)
        ]
        self.counts = Counter(spans)

    def match(self, text: abc.Sequence[int]) -> int:
        return next((n for n in range(len(text), 0, -1) if self.counts[tuple(text[-n:])]), 0)

    def after(self, stretch: tuple[int, ...], tokens: int = 3) -> dict[int, int]:
        """How often each token follows the longest suffix of a stretch that any token follows."""
        for start in range(len(stretch)):
            found = {token: self.counts[*stretch[start:], token] for token in range(tokens)}
            if any(found.values()):
                return {token: count for token, count in found.items() if count}
        return {}


def grown(kept: abc.Sequence[abc.Sequence[int]]) -> Automaton:
    automaton = Automaton()
    for text in kept:
        last = 0
        for token in text:
            last = automaton.extend(last, token)
    return automaton


@given(st.lists(texts, min_size=1, max_size=6), texts)
def test_stretches_are_counted(kept: list[list[int]], other: list[int]) -> None:
    """All of them, present or not, as a count one by one does."""
    automaton = grown(kept)
    brute = Brute(kept)
    for stretch in Brute([*kept, other]).counts:
        state: int | None = 0
        for token in stretch:
            state = automaton.follows[state].get(token) if state is not None else None
        assert (automaton.counts[state] if state is not None else 0) == brute.counts[stretch]
    assert len(automaton.links) <= 2 * sum(map(len, kept)) + 1


@given(texts)
def test_a_text_knows_its_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = Automaton()
    last = 0
    for token in text:
        last = automaton.extend(last, token)
    brute = Brute([text])
    longest = next(
        (n for n in range(len(text) - 1, 0, -1) if brute.counts[tuple(text[-n:])] > 1), 0
    )
    assert automaton.longest[automaton.links[last]] == longest


@given(
    st.lists(texts, max_size=5),
    texts,
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sets(st.integers(0, 2), max_size=1),
)
def test_drafts_follow_the_counts(
    kept: list[list[int]], text: list[int], most: int, least: float, ends: set[int]
) -> None:
    automaton = grown(kept)
    brute = Brute(kept)
    state, length = automaton.match(text)
    assert length == brute.match(text) and (state == 0) == (length == 0)
    tokens, probabilities = automaton.grow(state, most, least, ends)
    path = tuple(text[len(text) - length :])
    sure = 1.0
    for token, probability in zip(tokens, probabilities, strict=True):
        after = brute.after(path)
        sure *= after[token] / sum(after.values())
        assert (
            after[token] == max(after.values())
            and probability == pytest.approx(sure)
            and sure >= least
        )
        path = (*path, token)
    assert ends.isdisjoint(tokens[:-1]) and len(tokens) <= most
    after = brute.after(path)
    if length and after and len(tokens) < most and not (tokens and tokens[-1] in ends):
        assert sure * max(after.values()) / sum(after.values()) < least  # it was not worth going on


def test_of_tokens_that_came_as_often_the_newest_is_drafted() -> None:
    automaton = grown([[7, 1], [7, 2], [7, 3]])
    state, _ = automaton.match([7])
    assert automaton.grow(state, 1, 0.0)[0] == [3]


def test_a_text_in_circles_takes_no_longer_and_longer() -> None:
    automaton = Automaton()
    last = 0
    for _ in range(2000):
        last = automaton.extend(last, 7)
    assert sum(automaton.counts) <= 256 * 2000
    assert automaton.grow(automaton.match([7] * 20)[0], 9, 0.3)[0] == [7] * 9


def begun(
    drafter: Drafter, tokens: abc.Sequence[int], room: int = 20, *options: Any, **more: Any
) -> Sequence:
    seq = Sequence(Request(list(tokens), room, *options, **more))
    list(drafter.admit(seq, None, 16))
    return seq


def proposed(
    tokens: list[int], room: int = 20, eos: abc.Sequence[int] = (), **options
) -> list[int]:
    chosen = Suffix(**{"factor": 1.0, "offset": 3.0} | options)
    drafter = chosen.build(Parts(TableLM(TARGET)))
    seq = begun(drafter, tokens, room, eos=frozenset(eos))
    return drafter.propose([seq]).drafts[0].tokens[1:]


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], [4, 5, 6, 7, 8, 9]),  # 3 tokens matched, and 3 more
        (
            [1, 2, 9, 4, 2, 7, 1, 2],
            [9, 4, 2, 7, 1],
        ),  # the longer match, though a shorter one is nearer
        ([5, 1, 5, 2, 5, 1, 5], [2, 5, 1, 5, 2, 5]),  # the end of the text is a period
        ([7, 7, 7], [7] * 5),
        ([5, 1, 5, 1, 8, 5, 2, 9, 5], [1, 8, 5, 2]),  # what came most often, not what came last
    ],
)
def test_lengths_follow_the_match(tokens: list[int], draft: list[int]) -> None:
    assert proposed(tokens) == draft


def test_what_limits_a_draft() -> None:
    assert proposed([7, 7, 7], room=3) == [7, 7] and proposed([7, 7, 7], room=1) == []
    assert (
        proposed([7, 7, 7], most=2) == [7, 7] and proposed([7, 7, 7], factor=0.0, offset=0.5) == []
    )
    assert proposed([1, 2, 3, 9, 1], eos=[3]) == [2, 3]
    # 5 is followed by 1, 2 and 3, then by anything: probabilities 1/3 and then 1.
    text = [5, 1, 6, 5, 2, 7, 5, 3, 8, 5]
    assert proposed(text, least=0.4) == [] and proposed(text, least=0.3) == [3, 8, 5]


class Only(Constraint):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def fitting(self, tokens: abc.Sequence[int], chain: abc.Sequence[int]) -> int:
        return next((at for at, token in enumerate(chain) if token > 6), len(chain))


def test_a_grammar_cuts_a_draft() -> None:
    drafter = SuffixDrafter(Suffix(offset=4.0, least=0.1))
    text = [5, 1, 6, 5, 2, 7, 5, 1, 8, 5]
    for processors, drafted in ((None, [1, 8, 5]), (LogitsProcessorList([Only()]), [1])):
        (draft,) = drafter.propose([begun(drafter, text, 20, Sampler(True, processors))]).drafts
        assert draft.tokens[1:4] == drafted and set(draft.origins[1:]) == {"lookup"}


@given(texts, st.integers(1, 20))
def test_reading_token_by_token_equals_reading_at_once(tokens: list[int], begin: int) -> None:
    drafter = SuffixDrafter(Suffix(offset=3.0, least=0.1))
    assert piecemeal(drafter, tokens, begin) == proposed(tokens, room=100, least=0.1)
    assert not drafter.rows


def ended(tokens: list[int], prompt: int, reason: str | None = "stop") -> Sequence:
    seq = Sequence(Request(tokens[:prompt], 100))
    seq.tokens = list(tokens)
    seq.finish_reason = reason
    return seq


def test_outputs_are_drafted_from_later() -> None:
    memory = SuffixMemory(100)
    drafter = SuffixDrafter(Suffix(offset=3.0, least=0.1), memory)
    for reason in (None, "error"):  # a step that was undone; a processor that raised
        drafter.drop(ended([1, 2, 3, 4], 2, reason))
    drafter.drop(ended([1, 2], 2))
    assert not len(memory)
    drafter.drop(ended([*range(20, 40), 1, 2, 3, 4, 5, 6], 22))
    assert memory.texts == [(*range(22 + LEAD - 2, 40), 1, 2, 3, 4, 5, 6)[-LEAD - 4 :]]
    seq = begun(drafter, [9, 8, 2, 3], 20, Sampler(False))
    assert drafter.propose([seq]).drafts[0].tokens[1:] == [4, 5, 6]


def test_outputs_are_read_when_somebody_may_draft() -> None:
    """So requests that end while drafts do not pay cost nothing."""
    memory = SuffixMemory(100)
    drafter = SuffixDrafter(Suffix(), memory)
    for _ in range(2):
        drafter.drop(ended([1, 2, 3, 4], 2))
        drafter.drop(ended([5, 6, 7], 2))
        assert sum(map(len, memory._kept.unread)) == len(memory) == 7
    begun(drafter, [8, 9])
    assert memory.automaton.place == len(memory) == 7 and not memory._kept.unread


def test_a_text_is_not_read_where_no_token_is_worth_its_place() -> None:
    """In a step of two rows here. In one of one row, the suffix is found all the same."""
    costs = Costs({1: 1.0, 2: 1.1, 4: 2.2}, {})
    drafter = SuffixDrafter(Suffix(offset=2.0), None, costs)
    seq = begun(drafter, [1, 2, 3, 1, 2], 9)
    assert [drafter.find(seq, 2)[0].drafted, drafter.rows[seq.id].known] == [0, 0]
    assert drafter.find(seq, 1)[0].tokens[1:3] == [3, 1]


def test_of_the_text_and_the_memory_the_higher_score_wins() -> None:
    memory = SuffixMemory(100)
    drafter = SuffixDrafter(Suffix(least=0.1), memory)
    memory.add([1, 2, 3, 4, 5])
    memory.add([9, 9])
    for text, draft, score in (
        ([3, 7, 8, 0, 1, 2, 3], [4, 5], 2.0),  # three tokens match there, one here
        ([1, 2, 3, 7, 8, 1, 2, 3], [7, 8, 1], 3.0),  # as many match, and more came after them
        ([3, 7, 8, 0, 3], [7], 1.0),  # the same score: this text's
    ):
        found, known = drafter.find(begun(drafter, text), 1)
        assert (found.tokens[1:], known) == (draft, pytest.approx(score))


@given(st.lists(texts, max_size=12), st.integers(1, 60))
@example([[number] * 3 for number in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 7)], 20)
def test_the_oldest_texts_are_forgotten(puts: list[list[int]], most: int) -> None:
    memory = SuffixMemory(most)
    seen = list[tuple[int, ...]]()
    for text in puts:
        before = memory.texts
        memory.add(text)
        cut = tuple(text[-most:])
        seen = [*(earlier for earlier in seen if earlier != cut), cut]
        kept = memory.texts
        assert kept == seen[len(seen) - len(kept) :] and len(memory) == sum(map(len, kept)) <= most
        if len({*before, cut}) > len(kept):  # if some were forgotten, half of the room is not free
            assert len(memory) + len(seen[-len(kept) - 1]) > most // 2
    fresh = grown(kept if puts else [])
    for text in puts:  # as if nothing else had ever been there
        (state, length), (other, same) = (
            automaton.match(text) for automaton in (memory.automaton, fresh)
        )
        assert length == same and memory.automaton.counts[state] == fresh.counts[other]


# The methods.

PROMPTS = [[5, 6, 7, 5, 6], [9], [11, 12, 11, 12, 11], list(range(2, 42))]


def greedy(chosen, draft=None, **options) -> list[list[int]]:
    made = Decoder(tiny("llama"), None, draft, chosen, False, **options)
    rows = made.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    for prompt, row in zip(PROMPTS[1:3], rows[1:3], strict=True):  # alone, and the output in memory
        assert made.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens == row.tokens
    return [row.tokens for row in rows]


@pytest.mark.slow
def test_greedy_output_is_that_of_plain_decoding() -> None:
    wanted = greedy(AR())
    assert greedy(Suffix()) == wanted
    small = noisy_copy(tiny("llama"), 0.03)
    for other in (
        "auto",
        "sd",
        "cumulative",
        "ouroboros",
        "benchmarks.baselines.lookahead:Lookahead:guesses=2",
    ):
        assert (
            greedy(Hybrid(threshold=2.0, other=other), small)
            == greedy(Hybrid(other=other), small)
            == wanted
        )
    for kind in ("lyanna", "eagle"):
        head = random_head(CausalLM(tiny("llama")), kind=kind)
        assert greedy(Hybrid(threshold=2.0, other=kind), head=head) == wanted


def test_sampling_follows_the_targets_distribution() -> None:
    """With a memory that grows from batch to batch."""
    memory = SuffixMemory(500)
    suffixes = SuffixDrafter(Suffix(factor=2.0, offset=1.0, most=8, least=0.1), memory)
    costs = Costs(target={1: 30.0, 400: 50.0}, draft={1: 3.0, 400: 9.0})
    for chooser, kept, drafted in ((None, 250, 200), (SourceChooser(costs, "draft"), 250, 150)):
        made = HybridDrafter(
            suffixes, SD(2).build(Parts(TableLM(TARGET), TableLM(DRAFT))), 2.0, chooser
        )
        rows = sampled(lambda made=made: made, 50, 20)
        origins = Counter(origin for steps in rows for step in steps for origin in step.origins)
        assert fit(rows) > 1e-4
        assert len(memory) > kept and min(origins["lookup"], origins["draft"]) > drafted


def test_the_text_and_the_memory_both_save_forwards() -> None:
    target = tiny("llama")
    plain, cold, warm = (
        Decoder(target, method=method, guard=False)
        for method in (AR(), Suffix(warm=False), Suffix())
    )

    def forwards(decoder: Decoder) -> int:
        return sum(
            row.stats.target_forwards
            for row in decoder.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        )

    assert forwards(cold) == forwards(cold) < forwards(plain)
    first = forwards(warm)
    second = forwards(warm)
    assert first <= forwards(cold) and second < first / 2 and not cold.pools
    # It does not change what is sampled with a seed.
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}
    outputs = {
        tuple(decoder.generate(PROMPTS[0], **options).tokens) for decoder in (warm, warm, cold)
    }
    assert len(outputs) == 1


def test_auto_is_what_the_decoder_has() -> None:
    target = tiny("llama")
    small = noisy_copy(target, 0.03)
    layer = random_layer(target, small)
    head = random_head(CausalLM(target), kind="eagle")
    assert Decoder(target, method=Hybrid()).method == Hybrid()
    assert isinstance(Decoder(target, method=Hybrid(), guard=False).engine.drafter, SuffixDrafter)
    for name, part in (("sd", {}), ("pacer", {"pre_verifier": layer}), ("eagle", {"head": head})):
        decoder = Decoder(target, None, small, Hybrid(), **part)
        assert decoder.method == Hybrid(other=name)
        both = Decoder(
            target, None, small, SD(), sampling_method=Hybrid(), **part
        )  # which brings its parts along
        for each in (decoder, both):
            assert (each.head is not None) == ("head" in part) and each.pre_verifier is part.get(
                "pre_verifier"
            )
        assert (
            len(
                both.generate([[1, 2, 3]], temperature=1.0, max_new_tokens=6, ignore_eos=True)[
                    0
                ].tokens
            )
            == 6
        )
    late = Decoder(target, None, small, SD(), guard=False).replace(method=Hybrid())
    assert isinstance(late.engine.drafter, HybridDrafter)
    refuses("method 'hybrid' needs a draft model", Decoder, target, method=Hybrid(other="sd"))
    refuses("needs a head", Decoder, target, method=Hybrid(other="lyanna"))


class Fixed(PlainDrafter):
    def __init__(self, wants_hidden: Capture = "") -> None:
        self.wants_hidden = wants_hidden
        self.asked: list[list[int]] = []
        self.seen: list[list[int]] = []
        self.read: list[int] = []

    def admit(self, seq: Sequence, hidden: Any, chunk: ChunkSize) -> abc.Iterator[int]:
        left = len(seq.tokens)
        while left:
            self.read.append(min(left, next_size(chunk)))
            left -= self.read[-1]
            yield self.read[-1]

    def propose(self, seqs: list[Sequence]) -> Proposal:
        self.asked.append([seq.id for seq in seqs])
        return super().propose(seqs)

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        self.seen.append([outcome.sequence.id for outcome in outcomes])
        for outcome in outcomes:
            assert (outcome.hidden is not None) == bool(self.wants_hidden)


def beside(other: Drafter) -> HybridDrafter:
    return HybridDrafter(SuffixDrafter(Suffix(least=0.1)), other, 3.0)


@pytest.mark.parametrize("wants_hidden", ["", "head"])
def test_the_other_one_sees_the_steps_that_it_has_to_see(wants_hidden: Capture) -> None:
    """And its guard judges only steps of its own."""
    other = Fixed(wants_hidden)
    pace = Guard()
    judged = list[int]()
    pace.record = lambda rows, *rest: judged.append(rows)  # type: ignore[method-assign]
    for inner in (other, GuardedDrafter(Fixed(wants_hidden), pace)):
        engine = Engine(CausalLM(tiny("llama")), beside(inner))
        ids = [engine.add(Request(prompt, 8)) for prompt in ([3, 4, 5, 6, 7, 3, 4, 5], [21])]
        engine.step()
    assert (
        other.asked[0] == ids[1:]
        and other.seen[0] == (ids if wants_hidden else ids[1:])
        and not judged
    )
    engine.abort(ids[0])
    engine.step()
    assert judged == [1]


def test_suffixes_draft_where_the_other_one_has_nothing() -> None:
    """Suffixes draft in a pause of the other one's guard, and where it drafts nothing.

    A guard's plain steps stay plain.
    """
    pace = Guard()
    guarded = GuardedDrafter(Fixed(), pace)
    for other, wanted in (
        (Fixed(), [[4, 5]]),
        (guarded, [[]] * 2),
    ):  # it looks at two plain steps first
        made = beside(other)
        seq = begun(made, [3, 4, 5, 6, 7, 8, 2, 3])
        for tokens in wanted:
            proposal = made.propose([seq])
            (draft,) = proposal.drafts
            assert draft.tokens[1:] == tokens[:1]
            made.observe([RowOutcome(seq, draft, Verdict([0], 9, 0, False))], proposal.memo)
    pace.account.pause(2)
    for wait in (1, 0):
        proposal = made.propose([seq])
        (draft,) = proposal.drafts
        assert draft.tokens[1:] == [4] and pace.account.wait == wait
        assert not proposal.memo.inner.asked
        made.observe([RowOutcome(seq, draft, Verdict([0], 9, 0, False))], proposal.memo)
    assert len(pace._plain_seconds[1]) == 2  # such steps say nothing of plain ones
    proposal = made.propose([seq])
    assert proposal.memo.inner.asked == {seq.id} and proposal.drafts[0].tokens[1:] == [4]


def test_a_chooser_goes_by_what_came_true_and_by_costs() -> None:
    table = Costs(target={1: 30.0, 2: 33.0, 4: 40.0, 8: 60.0}, draft={1: 10.0, 8: 40.0})
    drafts = {n: Draft.chain(0, list(range(1, n + 1))) for n in (1, 4)}
    chooser = SourceChooser(table, "draft")
    none = Draft.root(0)
    other = Draft.chain(0, [0] * 7)

    def prefers(n: int) -> bool:
        return chooser.savings(StepSituation(1), drafts[n], float(n)).other <= 0

    assert prefers(4) and not prefers(1)  # of a long match most comes, of one token little
    for _ in range(40):
        # Nothing of the promised four, and all of the promised one.
        chooser.observe(SourceOutcome(drafts[4], 4.0, none, [9, 2], 0, 50.0, False))
        chooser.observe(SourceOutcome(drafts[1], 1.0, none, [1, 5], 0, 50.0, False))
    assert not prefers(4) and prefers(1)
    for _ in range(40):
        # All that can be seen.
        chooser.observe(SourceOutcome(drafts[4], 4.0, none, [1, 2], 0, 50.0, False))
    assert prefers(4)
    for used, brought, forwards in (
        (other, 8, 7),
        (other, 1, 7),
        (other, 8, 7),
        (none, 1, 7),
        (other, 8, 14),
    ):
        for _ in range(400):  # with `none` it ran and proposed nothing
            outcome = SourceOutcome(none, 0.0, used, [0] * brought, forwards, 25.0 * brought, True)
            chooser.observe(outcome)
        assert (prefers(1), round(chooser.other.tokens / chooser.other.steps)) == (
            brought == 1 or forwards == 14,
            brought,
        )
    # A method without a draft model or head: its forwards are free, and its tokens are verified.
    free = SourceChooser(Costs(target=table.target, draft={}))
    assert free.savings(StepSituation(1, greedy=False), drafts[1], 1.0).other > 0
    assert free.forecast(StepSituation(1, 999, unread=999, remaining=1), 0.1).pays
    # Drafting pays if little is unread, or if many tokens are to come and the other one drafts
    # some.
    for wanted, pays in ((True, [True, False, True]), (False, [True, False, False])):
        for _ in range(99):
            chooser.observe(SourceOutcome(none, 0.0, none, [1], 0, 25.0, wanted))
        situations = [
            StepSituation(1, unread, unread=unread, remaining=left)
            for unread, left in ((2, 9), (90, 9), (90, 99))
        ]
        assert [chooser.forecast(situation, 15.0).pays for situation in situations] == pays


def test_an_automatic_threshold_moves_from_one_drafter_to_the_other() -> None:
    """Suffixes draft what the text repeats, the other one drafts elsewhere.

    Suffixes are chosen once their drafts have come true.
    """
    other = Fixed()
    table = Costs(target={1: 30.0, 8: 45.0}, draft={1: 10.0, 8: 12.0})
    chooser = SourceChooser(table, "draft")
    made = HybridDrafter(SuffixDrafter(Suffix(least=0.1)), other, 1000.0, chooser)
    seq = begun(made, [3, 4, 5, 6, 7, 8, 9, 3], 99)
    for token in (4, 5, 6, 7, 20, 21, 22):
        proposal = made.propose([seq])
        seq.tokens.append(token)
        outcome = RowOutcome(seq, proposal.drafts[0], Verdict([0], token, 0, False))
        made.observe([outcome], proposal.memo)
    asked = len(other.asked)
    assert 2 <= asked < 7 and chooser.came_true[0] > 0.3 * 4 * 0.8


def test_a_prompt_is_read_when_it_is_first_needed() -> None:
    """A prompt is read in pieces if its request is alone, else a chunk per step.

    A row that leaves meanwhile holds nobody up.
    """
    made = beside(other := Fixed())
    texts = [3, 4, 5, 6, 7, 3, 4, 5], [*range(20)], [9, 8, 7], [*range(30)], [1, 2]
    seqs = [Sequence(Request(text, 20), id) for id, text in enumerate(texts)]
    for seq in seqs:
        list(made.admit(seq, None, EngineChunks(lambda: 8, lambda: False)))
    for rows in (seqs[:1], seqs[:3], seqs[:3], seqs[:3], seqs[:4]):
        made.propose(rows)
    assert other.read == [8, 8, 4, 3, 8] and other.asked == [[1, 2]] * 2
    made.drop(seqs[3])
    made.propose(seqs[4:])
    assert other.read[5:] == [2] and other.asked[2] == [4]


def test_a_request_that_comes_does_not_wait_until_the_only_prompt_is_read() -> None:
    """Nor does one whose prompt the target is reading, though it is no row of the step yet."""
    made = beside(other := Fixed())
    seq = Sequence(Request([*range(60)], 20), 0)
    list(made.admit(seq, None, EngineChunks(lambda: 16, lambda: len(other.read) < 2)))
    for steps in (1, 2):
        made.propose([seq])
        assert other.read == [16, 16, 16][: steps + 1] and not other.asked
    made.propose([seq])
    assert other.read == [16, 16, 16, 12] and other.asked == [[0]]


def test_a_prompt_of_a_row_that_becomes_plain_holds_nobody_up() -> None:
    """Its form proves slow while the other drafter is reading its prompt."""

    class Slow(Only):
        is_slow = False

    made = HybridDrafter(SuffixDrafter(Suffix()), other := Fixed(), 99.0)
    engine = Engine(TableLM(TARGET), made, chunk_seconds=1e-9)
    form = Slow()
    texts = [[id % 4 for id in range(90)], [3, 2, 1]]
    sampler = Sampler(True, LogitsProcessorList([form]))
    ids = [engine.add(Request(texts[0], 40, sampler)), engine.add(Request(texts[1], 40))]
    for _ in range(9):
        if len(made._unread) < 2 or not other.read:
            engine.step()
    assert made._unread.keys() == set(ids) and other.read and not other.asked
    form.is_slow = True
    for _ in range(4):
        engine.step()
    assert not made._unread and other.asked[-1] == ids[1:]
    assert ids[0] not in made.suffixes.rows
    drain(engine)


@pytest.mark.parametrize("gamma", [1, 3])
def test_the_other_method_has_the_settings_that_are_given(gamma: int) -> None:
    target = tiny("llama")
    chosen = method("hybrid", threshold=1000.0, other=f"sd:gamma={gamma}")
    decoder = Decoder(target, None, noisy_copy(target, 1e-6), chosen, False)
    assert len(decoder.generate([[5, 6, 7]], max_new_tokens=24)[0].stats.reached) == gamma


def test_a_memory_whose_change_was_broken_off_mends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SuffixMemory(40)
    texts = [[1, 2, 3, 4, 5] * 2, [6, 7, 8, 1, 2, 3], [9, 1, 2, 3, 9]]
    for text in texts:
        memory.add(text)
    monkeypatch.setattr(Automaton, "extend", Automaton.extend)  # which is put back at the end
    interrupt_once(Automaton, "extend", 2)
    with pytest.raises(KeyboardInterrupt):
        memory.read()
    memory.add(list(range(20, 35)))
    whole = SuffixMemory(40)
    for text in memory.texts:
        whole.add(text)
    for text in texts:
        (state, length), (other, same) = (each.automaton.match(text) for each in (memory, whole))
        assert length == same and memory.automaton.counts[state] == whole.automaton.counts[other]


def test_texts_that_nobody_asks_about_are_bounded() -> None:
    memory = SuffixMemory(100)
    for number in range(1000):
        memory.add(range(30 * number, 30 * number + 30))
    assert sum(map(len, memory._kept.unread + memory._newest.unread)) <= 200
    memory.clear()
    assert not memory._kept.unread and len(memory) == 0


def test_no_text_is_read_more_than_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no step waits until all that is kept has been read anew."""
    memory = SuffixMemory(1000)
    extend = Automaton.extend
    reads = Counter[int]()

    def counted(self: Automaton, last: int, token: int) -> int:
        reads[token] += 1
        return extend(self, last, token)

    monkeypatch.setattr(Automaton, "extend", counted)
    for number in range(400):
        before = reads.total()
        memory.add(range(10 * number, 10 * number + 10))
        memory.read()
        assert reads.total() - before <= 20
    assert max(reads.values()) == 2 and len(memory) > 500
