"""Each part of each method at work, in toy languages whose answers are known.

Drafts, acceptance and reuse are exactly what the part makes them. Without the part, or with an
index that is wrong by one, they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.baselines.lookahead import Lookahead
from forerun import Decoder
from forerun.api.load import Completion
from forerun.backends.heads import head_rows
from forerun.bench.records import total
from forerun.engine.stats import Stats
from forerun.methods import AR, Eagle, Lyanna, Ouroboros, Pacer, PacerLyanna, PacerOuroboros
from forerun.methods import method as find_method
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.train.head import measure
from forerun.train.labels import label
from forerun.train.texts import of_windows
from tests.support.languages import SIZE, VOCAB, copying_head, counter, cycle, head, layer, model
from tests.support.recipes import make_run

TURN = 12  # the usual language says 0, 1, .., 11, 0, ..
WRONG = 20  # nobody's token


def run(
    target: PreTrainedModel,
    method: Any,
    prompt: Sequence[int] = (11, 0),
    new: int = 120,
    **parts: Any,
) -> Completion:
    costs = Costs({1: 1.0, 16: 1.5}, {1: 0.1}, head={1: 0.05})
    decoder = Decoder(
        target, None, parts.pop("draft", None), method, guard=False, costs=costs, **parts
    )
    done = decoder.generate(list(prompt), max_new_tokens=new, ignore_eos=True)
    assert done.tokens == plain(target, tuple(prompt), new)
    return done


@lru_cache(maxsize=1)
def plain(target: PreTrainedModel, prompt: tuple[int, ...], new: int) -> list[int]:
    return (
        Decoder(target, method=AR())
        .generate(list(prompt), max_new_tokens=new, ignore_eos=True)
        .tokens
    )


def rooted(done: Completion, prompt: Sequence[int]) -> list[tuple[int, Any]]:
    """Every step but the last, which the limit cuts, with the token that its draft stands after."""
    roots = [prompt[-1], *(step.tokens[-1] for step in done.steps)]
    return list(zip(roots, done.steps, strict=False))[:-1]


# Heads over hidden states


def test_states_follow_from_states() -> None:
    """The head counts on from the state before, so every position is right without any tokens."""
    target = model(cycle(range(TURN)))
    counts = {i: (i + 1) % TURN for i in range(TURN)}
    for tokens, states in (({i: i for i in range(TURN)}, counts), ({}, counts)):
        done = run(
            target,
            Lyanna(depth=6, reuse="off"),
            [0, 1],
            head=head(target, states=states, tokens=tokens),
        )
        assert done.stats.acceptance_by_position == (1.0,) * 6
        assert all(
            len(step.tokens) == 7 and step.draft_forwards == 6 for _, step in rooted(done, [1])
        )


@pytest.mark.parametrize("width", [1, 2])
def test_token_information_tells_what_states_cannot(width: int) -> None:
    """All states are alike: only the token before tells the next one.

    At each position that is the token drafted there.
    """
    target = model(cycle(range(TURN)))
    method = Lyanna(depth=6, width=width, nodes=16, reuse="off")
    alike: dict[str, Any] = {"states": {VOCAB: VOCAB}, "tokens": dict.fromkeys(range(TURN), VOCAB)}
    told = head(target, information=cycle(range(TURN)), **alike)
    assert run(target, method, head=told).stats.acceptance_by_position == (1.0,) * 6
    assert run(target, method, head=head(target, **alike)).stats.tau < 1.5


def surprised(**settings: Any) -> tuple[PreTrainedModel, Any]:
    """A target, and a head that never foresees 4.

    The head goes on rightly after a 4 that it did not foresee. But where the text ends with 4 it is
    blind: it says WRONG, with little confidence, and nothing else.
    """
    state_after = [VOCAB + i for i in range(TURN)]  # the head's state after each token
    unforeseen, blind = VOCAB + TURN, VOCAB + TURN + 1
    rows = {unforeseen: WRONG, blind: {WRONG: 0.01}}
    target = model(
        cycle(range(TURN)) | {state_after[i]: (i + 1) % TURN for i in range(TURN)} | rows
    )
    states = {state_after[i]: state_after[(i + 1) % TURN] for i in range(TURN)}
    states |= {state_after[2]: unforeseen, unforeseen: state_after[4], blind: blind}
    tokens = dict(enumerate(state_after)) | {3: unforeseen, 4: blind}
    return target, head(target, states=states, tokens=tokens, **settings)


def left_over(done: Completion, prompt: Sequence[int], depth: int) -> list[tuple[int, Any]]:
    """The steps after 4, each with how many places the last draft had beyond it."""
    steps = rooted(done, prompt)
    drafted = 0
    passed = 0
    entries = []
    for root, step in steps:
        if root == 4:
            entries.append((max(0, drafted - passed), step))
        if step.draft_forwards:
            drafted, passed = depth, 0
        passed += step.accepted + 1
    return entries


@pytest.mark.parametrize(
    ("reuse", "width", "weight"),
    [*[(reuse, width, 0.6) for reuse in ("add", "both") for width in (1, 2)], ("add", 1, 0.01)],
)
def test_old_logits_stand_in_for_blind_ones(reuse: str, width: int, weight: float) -> None:
    """Logits of the step before are right where the new ones are useless.

    They are added to the new ones, or stand beside them as branches; too small a weight has no
    effect.
    """
    target, made = surprised()
    settings: dict[str, Any] = {"depth": 8, "width": width, "nodes": 16}
    off = run(target, Lyanna(**settings, reuse="off"), head=made)
    assert "reused" not in off.origins
    assert all(step.accepted == 0 for _, step in left_over(off, [0], 8))
    done = run(target, Lyanna(**settings, reuse=reuse, weight=weight), head=made)
    after = left_over(done, [0], 8)
    assert max(left for left, _ in after) > 3 and len(after) > 5
    if weight == 0.01:
        assert all(step.accepted == 0 for _, step in after)
        return
    assert all(step.accepted == left for left, step in after)
    assert all(step.origins[:-1] == ("reused",) * left for left, step in after)
    assert done.stats.tau > 1.15 * off.stats.tau


def test_old_logits_by_themselves_are_right_and_run_no_head() -> None:
    """A draft of the old logits alone is right as far as they go, and runs no head."""
    target, made = surprised()
    done = run(target, Lyanna(depth=8, reuse="free", least=2), head=made)
    after = left_over(done, [0], 8)
    assert max(left for left, _ in after) > 3 and len(after) > 5
    for left, step in after:
        enough = left >= 2
        assert step.accepted == (left if enough else 0)
        assert step.origins[:-1] == ("reused",) * step.accepted
        assert (step.draft_forwards == 0) == enough


def test_old_logits_take_the_token_that_came() -> None:
    """Useless old states find what follows if they are given the token that the target said."""
    order = [(7 * i) % TURN for i in range(TURN)]
    following = cycle(order)
    state_after = [VOCAB + i for i in range(TURN)]
    wrong = VOCAB + TURN
    blank = VOCAB + TURN + 1
    # The first place is right, the second one wrong, and from then on only tokens tell.
    target = model(
        following | {state_after[i]: row for i, row in following.items()} | {wrong: WRONG}
    )
    made = head(
        target,
        tokens=dict(enumerate(state_after)),
        states=dict.fromkeys(state_after, wrong) | {wrong: blank, blank: blank},
        information={token: {row: 0.02} for token, row in following.items()},
    )
    done = run(target, Lyanna(depth=6, reuse="free", least=2), [order[-1], order[0]], head=made)
    steps = [step for _, step in rooted(done, [order[0]])]
    # Of six positions one is accepted and the next is rejected; four are left, then a step begins
    # anew.
    assert [step.accepted for step in steps] == [1, 4] * (len(steps) // 2) + [1] * (len(steps) % 2)
    assert all(step.origins[1:4] == ("reused",) * 3 for step in steps[1::2])


SURE, HOPELESS = [3.0, 1.0, 0.9], [-20.0, 1.0, 0.9]  # of calibrations


@pytest.mark.parametrize("width", [1, 2])
def test_calibration_says_how_deep(width: int) -> None:
    """The head says the same of all places, and its calibration what that is worth at each."""
    target = model(cycle(range(TURN)))
    states = {i: (i + 1) % TURN for i in range(TURN)}
    tokens = {i: i for i in range(TURN)}
    for curves, deep in (([SURE], 12), ([SURE] * 4 + [HOPELESS], 4), ([HOPELESS], 0)):
        made = head(target, states=states, tokens=tokens, curves=curves)
        done = run(
            target, PacerLyanna(depth=12, width=width, nodes=12, block=2, reuse="off"), head=made
        )
        assert {step.drafted for _, step in rooted(done, [0])} == {deep}


def test_calibration_of_old_states_is_that_of_their_own_places() -> None:
    """Six places are worth a token, of old states those that are left of the six."""
    target, made = surprised(curves=[SURE] * 6 + [HOPELESS])
    done = run(target, PacerLyanna(depth=8, block=8, reuse="free", least=2), head=made)
    after = [(left, step) for left, step in left_over(done, [0], 8) if left >= 2]
    assert len(after) > 5 and max(left for left, _ in after) > 3
    assert all(step.drafted == max(0, left - 2) for left, step in after)


@pytest.mark.parametrize("width", [1, 2])
def test_an_eagle_knows_where_it_stands(width: int) -> None:
    """Its attention goes back by the text's period, from drafted tokens too."""
    target = model(cycle(range(9)) | {VOCAB + t: t for t in range(9)})
    made = copying_head(target, 9)
    prompt = [*range(9), *range(9)]
    done = run(target, Eagle(depth=5, width=width, nodes=12), prompt, head=made, new=60)
    assert done.stats.acceptance_by_position == (1.0,) * 5
    for back in (8, 10):
        wrong = copying_head(target, back)
        assert (
            run(
                target, Eagle(depth=5, width=width, nodes=5), prompt, head=wrong, new=20
            ).stats.accepted
            == 0
        )


def test_a_beam_goes_on_from_its_own_parent() -> None:
    """A beam that becomes the first one keeps the state of its own parent.

    Of two beams the second goes on better. Both have the same token, so only the parent's state
    tells what comes next.
    """
    root = 0
    second = 1
    token = 2
    last = 3
    first = 4
    other = 5
    forks, after_first, after_second, right, wrong = (VOCAB + i for i in range(5))
    rows = {
        forks: {first: 0.6, second: 0.4},
        after_first: {token: 0.55, other: 0.45},
        after_second: {token: 0.99},
    }
    target = model(cycle([root, second, token, last]) | rows | {right: last, wrong: WRONG})
    states = {last: forks, after_first: wrong, after_second: right}
    made = head(target, "eagle", states=states, tokens={first: after_first, second: after_second})
    prompt = [root, second, token, last, root]
    done = run(target, Eagle(depth=3, width=2, nodes=6), prompt, head=made)
    assert all(step.accepted == 3 for _, step in rooted(done, prompt))


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_features_are_those_of_the_accepted_branch(kind: str) -> None:
    """The next draft starts from the state of the last accepted token.

    At every position the target takes the second of two tokens, and tokens tell the head nothing.
    """
    told = {i: {(i + 1) % TURN: 0.4, (i + 1) % TURN + TURN: 0.6} for i in range(TURN)}
    target = model(cycle(range(TURN)) | {VOCAB + i: row for i, row in told.items()})
    states = {before: VOCAB + (i + 1) % TURN for i in range(TURN) for before in (i, VOCAB + i)}
    made = head(target, kind, states=states)
    settings = {"depth": 2} | ({"reuse": "off"} if kind == "lyanna" else {})
    done = run(target, find_method(kind, **settings, width=2, nodes=6), [10, 11, 0], head=made)
    assert all(step.accepted == 2 for _, step in rooted(done, [0]))
    assert run(target, find_method(kind, **settings), [10, 11, 0], head=made).stats.accepted == 0


@pytest.mark.parametrize("kind", ["lyanna", "token information", "eagle"])
def test_training_has_the_same_places(kind: str, tmp_path: Path) -> None:
    """Heads that drafts show to be right at every place are right in training as well."""
    period = 9 if kind == "eagle" else TURN
    target = model(
        cycle(range(period)) | ({VOCAB + t: t for t in range(period)} if kind == "eagle" else {})
    )
    if kind == "eagle":
        made = copying_head(target, period)
    elif kind == "lyanna":
        made = head(
            target,
            states={i: (i + 1) % TURN for i in range(TURN)},
            tokens={i: i for i in range(TURN)},
        )
    else:
        made = head(target, information=cycle(range(TURN)))
    judge = CausalLM(target)
    windows = torch.tensor([[i % period for i in range(at, at + 40)] for at in range(period)])
    texts = of_windows(windows.numpy(), 16)
    labels = label(make_run("target", tmp_path), judge, texts, states=True)
    survival, _ = measure(
        made, head_rows(judge, made.hot, SIZE), labels, target.get_input_embeddings(), 4
    )
    assert survival == [1.0] * 4


# Pacer


def pair(wrong: dict[int, int]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target that goes round and round, and a draft that is wrong after some tokens."""
    return model(cycle(range(TURN))), model(cycle(range(TURN)) | wrong)


def pacer(phrases: bool, most: int) -> Any:
    settings: dict[str, Any] = {"block": 1, "threshold": 0.5, "most": most}
    return PacerOuroboros(**settings, suffixes=0) if phrases else Pacer(**settings)


def test_a_threshold_ends_drafts_behind_a_block() -> None:
    """A layer that says 0.6 of everything, with blocks of 2."""
    target, draft = pair({})
    said = layer(target, draft, log(0.6 / 0.4))
    for threshold, length in ((0.0, 10), (0.59, 10), (0.61, 2), (1.0, 2)):
        method = Pacer(block=2, threshold=threshold, most=10)
        done = run(target, method, draft=draft, pre_verifier=said)
        assert {step.drafted for _, step in rooted(done, [0])} == {length}


@pytest.mark.parametrize("phrases", [False, True])
def test_echoes_find_what_the_text_contradicts(phrases: bool) -> None:
    """Each draft ends with the token after 5.

    There the draft is wrong, and the text has gone on otherwise before.
    """
    turn = [*range(6), 12, *range(6, TURN)]
    target = model(cycle(turn))
    draft = model(cycle(range(TURN)) | {12: 6})
    said = layer(target, draft, 5.0, [("echoes", 4, -1.0, -10.0)])
    done = run(target, pacer(phrases, 32), [*turn, 0], draft=draft, pre_verifier=said)
    steps = rooted(done, [0])
    assert all((step.drafted, step.accepted) == (13, 12) for _, step in steps[1:])
    assert (steps[0][1].drafted, steps[0][1].accepted) == (6, 5)


@pytest.mark.parametrize("run_back", [0, 1, 2])
@pytest.mark.parametrize("phrases", [False, True])
def test_lengths_follow_earlier_runs(phrases: bool, run_back: int) -> None:
    """A draft is long if one of the last three runs of accepted tokens is 3 or more."""
    target, draft = pair({0: WRONG, 1: WRONG, 4: WRONG})
    said = layer(target, draft, -100 * log(1 + 2.5), [("history", run_back, 100.0, 1.0)])
    done = run(target, pacer(phrases, 5), draft=draft, pre_verifier=said)
    runs = [0.0, 4.0, 4.0]
    seen = set()
    for _, step in rooted(done, [0]):
        assert step.drafted == (5 if runs[run_back] > 2.5 else 1)
        seen.add(step.drafted)
        rejected = step.origins[-1] == "correction"
        runs[0] += step.accepted + (not rejected)
        if rejected:
            runs = [0.0, *runs[:2]]
    assert seen == {1, 5}


# Phrases


def test_lookahead_guesses_what_came_before() -> None:
    """Where the text repeats itself, phrases of the pool are right to their ends."""
    target = model(cycle(range(TURN)))
    prompt = [*range(TURN), 0]
    done = run(target, Lookahead(window=0, guesses=2, ngram=5), prompt)
    assert all(
        step.accepted == 4 and step.origins[:4] == ("phrase",) * 4
        for _, step in rooted(done, prompt)
    )


def test_lookahead_makes_phrases_of_its_window() -> None:
    """In a text without repetitions, right phrases come from the window alone.

    The window has gone on from other tokens of the prompt before the text reaches them.
    """
    target = model(cycle(range(VOCAB)))
    prompt = [8] * 40 + [0]
    done = run(target, Lookahead(window=6, guesses=3, ngram=4, warm=False), prompt, new=VOCAB - 2)
    assert done.origins.count("phrase") >= 6


def test_lookaheads_window_keeps_its_place() -> None:
    """In a language of positions the window is right while it stays where it was."""
    method = Lookahead(window=6, guesses=3, ngram=4, warm=False)
    done = run(counter(60), method, [7, 3, 59, 7, 31], new=50)
    assert done.origins.count("window") >= 24
    # Where every fourth token is any of eight, what the window says after it is right all the same.
    stats = sampled(counter(60, 4), Lookahead(window=8, guesses=1, ngram=4, warm=False))
    assert stats.tau > 2.15


def test_phrases_fill_the_room_that_is_left() -> None:
    """A phrase of four and the token after it are drafted in one forward.

    Six tokens may come, five of them drafted.
    """
    target, draft = pair({})
    prompt = [*range(TURN), 0]
    for new, forwards in ((6, 1), (5, 1), (3, 1), (2, 1), (7, 2), (11, 2)):
        done = run(
            target,
            Ouroboros(gamma=20, ngram=5, guesses=1, suffixes=0),
            prompt,
            new=new,
            draft=draft,
        )
        (step,) = done.steps
        assert (step.drafted, step.draft_forwards) == (new - 1, forwards)


def test_phrases_spare_draft_forwards() -> None:
    """Of ten tokens five come with each forward; four more hang after them for nothing."""
    target, draft = pair({})
    prompt = [*range(TURN), *range(TURN), 0]
    done = run(target, Ouroboros(gamma=10, ngram=5, guesses=1, suffixes=1), prompt, draft=draft)
    for _, step in rooted(done, prompt):
        assert (step.drafted, step.draft_forwards, step.accepted) == (14, 2, 14)
        assert step.origins[10:14] == ("phrase",) * 4


def sampled(target: PreTrainedModel, method: Any, **parts: Any) -> Stats:
    """What eight samples of 50 tokens that do not repeat themselves come to."""
    decoder = Decoder(target, None, parts.pop("draft", None), method, guard=False)
    prompt = [7, 3, 59, 7, 31]
    torch.manual_seed(0)
    return total(
        [decoder.generate(prompt, max_new_tokens=50, temperature=1.0).stats for _ in range(8)]
    )
