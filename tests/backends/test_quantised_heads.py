"""Heads over hidden states in C.

The states are those of training, rows and branches do not depend on what runs beside them, and a
draft that C chooses in one call equals that of many calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.backends.heads import HiddenLM
from forerun.backends.quantised_heads import Beams
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.head import HeadDrafter
from forerun.drafters.lyanna import LyannaDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.step import RowOutcome
from forerun.methods import Eagle, Lyanna, PacerEagle, PacerLyanna
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from tests.support.heads import OF_C, features_of, sequence
from tests.support.toys import random_head, tiny

FORMS: dict[str, dict[str, Any]] = {
    "today's": {},
    "two layers": {"num_hidden_layers": 2},
    "uninformed": {"rank": 0},
}
FORMS["biases, a narrow MLP"] = {"bias": True, "intermediate_size": 32}
CASES = [("lyanna", form) for form in FORMS] + [
    ("eagle", form) for form in ("today's", "two layers")
]
TEXTS = {4: [5, 6, 7, 8, 9, 1, 2], 2: [3, 4, 5], 9: list(range(2, 30))}


IN_C = pytest.mark.parametrize("in_c", [False, True], ids=["float32", "8 bits in C"])


def head_of(target: CausalLM, in_c: bool = True, **settings: Any) -> HiddenLM:
    found = HiddenLM(random_head(target, **OF_C | settings), target, in_8_bits=in_c)
    assert (found.quantised is not None) == in_c
    return found


def assert_same(values: Tensor, wanted: Tensor, in_c: bool) -> None:
    """The same bits in C, and in torch up to rounding."""
    assert torch.equal(values, wanted) if in_c else torch.allclose(values, wanted, 1e-4, 1e-5)


def error(values: Tensor, wanted: Tensor) -> float:
    return float(((values - wanted).norm() / wanted.norm()).detach())


@IN_C
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_states_are_those_of_training(kind: str, form: str, in_c: bool) -> None:
    """States drafted after each position equal those of the training pass.

    The drafts use a cache; the training pass is unrolled, in float32.
    """
    target = CausalLM(tiny("llama"))
    tokens = torch.tensor([5, 6, 7, 8, 9, 1, 2, 3])
    trained = random_head(target, kind=kind, **OF_C | FORMS[form])
    fast = head_of(target, in_c, kind=kind, **FORMS[form])
    features = features_of(target, tokens.tolist())
    with torch.no_grad():
        unrolled = trained.drafted(
            features[None], target.model.get_input_embeddings()(tokens[None]), 4
        )
    errors: list[float] = []
    for id in (7, 3):
        fast.add(id)
    for end in range(1, 5):
        state = fast.extend([3], [features[end - 1 : end]], [[int(tokens[end])]])
        assert (fast.length(3), fast.length(7)) == (end, 0)
        states = [state]
        if kind == "lyanna":
            states += fast.roll([3], state, 3)
        else:
            for k in range(3):
                after = tokens[None, end + 1 + k, None]
                seen = torch.ones(1, 1, k + 1, dtype=torch.bool)
                states.append(fast.branch([3], states[-1][:, None], after, k, seen)[:, 0])
        errors += [error(own[0], unrolled[k][0, end - 1]) for k, own in enumerate(states)]
        assert (fast.length(3), fast.length(7)) == (end + 3, 0)
        fast.crop([3], [end])
    # In 8 bits it is one percent and a half a state, twice as much after four.
    least, mean, most = (1e-4, 0.04, 0.08) if in_c else (0.0, 1e-5, 1e-4)
    assert max(errors) < most and least < sum(errors) / len(errors) < mean
    if kind == "lyanna" and form != "uninformed":
        assert error(fast.information(tokens), trained.token_information(tokens)) < most
    else:
        assert fast.information is None


@IN_C
@pytest.mark.parametrize(
    ("kind", "form"), [("lyanna", "today's"), ("lyanna", "two layers"), ("eagle", "today's")]
)
def test_rows_are_what_they_are_alone(kind: str, form: str, in_c: bool) -> None:
    """A row's states do not depend on the other rows.

    Rows have different lengths and one or several new features, in any order, after prompts that
    were read in chunks of any size.
    """
    target = CausalLM(tiny("llama"))
    whole = head_of(target, in_c, kind=kind, **FORMS[form])
    features = {id: features_of(target, text) for id, text in TEXTS.items()}
    new = {4: 2, 2: 1, 9: 3}

    def begin(head: HiddenLM, ids: list[int], chunk: int) -> HiddenLM:
        for id in ids:
            before = features[id][: -1 - new[id]]
            assert sum(head.prefill(id, before, TEXTS[id][1 : -new[id]], chunk)) == len(before)
        return head

    def run(head: HiddenLM, ids: list[int]) -> dict[int, Tensor]:
        new_features = [features[id][-1 - new[id] : -1] for id in ids]
        states = head.extend(ids, new_features, [TEXTS[id][-new[id] :] for id in ids])
        steps = torch.stack(
            [states, *(head.roll(ids, states, 3) if kind == "lyanna" else [])], 1
        )  # [R, 4, d]
        return {
            id: torch.cat([row_states, head.logits(row_states)], -1)
            for id, row_states in zip(ids, steps, strict=True)
        }

    alone = {id: run(begin(whole.fresh(), [id], 64), [id])[id] for id in TEXTS}
    begin(whole, list(TEXTS), 2)
    for ids in ([2, 4, 9], [9, 2], [4], [9, 4]):
        lengths = [whole.length(id) for id in ids]
        for id, values in run(whole, ids).items():
            assert_same(values, alone[id], in_c)
        whole.crop(ids, lengths)
    for id in [*TEXTS, 4]:
        whole.drop(id)
    assert not whole.cache.ids


@IN_C
def test_branches_are_what_their_paths_are(in_c: bool) -> None:
    """Each beam of an EAGLE-like head equals a chain along its path.

    Rows of different lengths run in one forward.
    """
    target = CausalLM(tiny("llama"))
    head = head_of(target, in_c, kind="eagle")
    texts = [[5, 6, 7, 8, 9, 1], [3, 4, 5]]
    features = [features_of(target, text)[:-1] for text in texts]
    for id in (0, 1):
        head.add(id)
    first = head.extend([0, 1], features, [text[1:] for text in texts])
    beams = torch.tensor([[7, 8], [9, 2]])
    at = torch.tensor([[1, 0], [0, 0]])
    rows = torch.arange(2)[:, None]
    eye = torch.eye(2, dtype=torch.bool).expand(2, -1, -1)
    one = head.branch([0, 1], first[:, None].expand(-1, 2, -1), beams, 0, eye)
    more = torch.tensor([[1, 3], [4, 6]])
    two = head.branch([0, 1], one[rows, at], more, 1, torch.cat([eye[rows, at], eye], -1))
    for row in range(2):
        for beam in range(2):
            alone = head.fresh()
            alone.add(5)
            state = alone.extend([5], [features[row]], [texts[row][1:]])
            for token in (int(beams[row, at[row, beam]]), int(more[row, beam])):
                state = alone.extend([5], [state], [[token]])
            assert_same(two[row, beam], state[0], in_c)


def test_a_row_may_draft_beyond_its_context() -> None:
    target = CausalLM(tiny("llama"))
    head = head_of(target, max_position_embeddings=16)
    features = features_of(target, TEXTS[9])
    for id in (0, 1):
        head.add(id)
    beams = head.grow([0], [features[:8]], [TEXTS[9][1:9]], 12, Beams([5], 1, 1, [12]))
    assert (
        beams.tokens.shape == (1, 12, 1)
        and bool(beams.states.isfinite().all())
        and head.length(0) == 8
    )
    state = head.extend([1], [features[:14]], [[3] * 14])
    assert (
        all(bool(next_state.isfinite().all()) for next_state in head.roll([1], state, 6))
        and head.length(1) == 20
    )


def test_a_draft_that_does_not_fit_is_refused() -> None:
    target = CausalLM(tiny("llama"))
    head = head_of(target)
    features = features_of(target, TEXTS[4])
    head.add(0)
    wrong = [(token, 5) for token in (-1, target.vocab_size)] + [
        (5, token) for token in (-1, target.vocab_size)
    ]
    for token, root in wrong:
        with pytest.raises(RuntimeError, match="sizes that do not fit"):
            head.grow([0], [features[:1]], [[token]], 2, Beams([root], 1, 1, [9]))
    with pytest.raises(RuntimeError, match="sizes that do not fit"):
        head.grow([0], [features[:0]], [[]], 2, Beams([5], 1, 1, [9]))
    eagle = head_of(target, kind="eagle")
    eagle.add(0)
    with pytest.raises(RuntimeError, match="sizes that do not fit"):
        eagle.grow([0], [features[:1]], [[5]], 2, Beams([5], 2, 2, [9]))
    assert not head.length(0) and not eagle.length(0) and eagle.grows(1) and not eagle.grows(2)


GUESSING = Costs({1: 1.0, 100: 3.0}, {}, head={1: 0.01})
WIDTHS = [(*case, "off", 1) for case in CASES]
WIDTHS += [
    ("lyanna", form, reuse, width)
    for form in FORMS
    for reuse in ("add", "free")
    for width in (1, 3)
]


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(("kind", "form", "reuse", "width"), WIDTHS)
def test_a_draft_in_one_call_is_that_of_many(
    kind: str, form: str, is_planned: bool, reuse: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that C makes in one call equals that of many calls.

    Steps have one or several waiting features, old logits and a budget. Other rows come and go; one
    of them has no room left.
    """
    target = CausalLM(tiny("llama"))
    head = head_of(target, kind=kind, **FORMS[form])
    calls = list[Any]()
    drafts = {}
    head.curves = [[0.5, 1.0, 0.9], [0.2, 1.1, 0.8]] * 4
    original = HiddenLM.grow
    monkeypatch.setattr(HiddenLM, "grow", lambda *given: calls.append(given) or original(*given))
    settings: Any = {"width": width, "nodes": 9} | ({"block": 2} if is_planned else {})
    for way in ("calls", "many"):
        fresh_head = head.fresh()
        if way == "many":
            monkeypatch.setattr(HiddenLM, "grows", lambda *_: False)
        if kind == "lyanna":
            lyanna = (PacerLyanna if is_planned else Lyanna)(6, reuse=reuse, weight=0.7, **settings)
            drafter: HeadDrafter = LyannaDrafter(lyanna, fresh_head, GUESSING)
        else:
            drafter = EagleDrafter(
                (PacerEagle if is_planned else Eagle)(6, **settings), fresh_head, GUESSING
            )
        seqs = [sequence(range(2, 9), id, new=new) for id, new in enumerate((60, 60, 1))]
        for seq in seqs:
            assert not list(drafter.admit(seq, features_of(target, seq.tokens[:-1]), 4))
        drafts[way] = []
        for step in range(9):
            here = seqs[: 3 if step == 4 else 2 if step > 5 else 1]
            for seq, draft in zip(here, drafter.propose(here).drafts, strict=True):
                drafts[way].append(
                    (draft.tokens, draft.parents, draft.origins, fresh_head.length(seq.id))
                )
                path = draft.path(min(len(draft) - 1, step))
                seq.tokens += [*(draft.tokens[node] for node in path[1:]), 8 + step]
                states = torch.zeros(len(draft), 32)
                states[path] = features_of(target, seq.tokens)[-len(path) - 1 : -1]
                verdict = Verdict(path, 8 + step, len(path), True)
                drafter.observe([RowOutcome(seq, draft, verdict, states)], None)
    assert drafts["calls"] == drafts["many"] and len(calls) >= 4
    assert sum(len(tokens) - 1 for tokens, *_ in drafts["calls"]) > 9


@pytest.mark.parametrize(
    ("kind", "form", "hot", "width"),
    [
        *[(kind, form, 16, 1) for kind, form in CASES],
        *[("lyanna", "today's", hot, width) for hot in (1, 12, 33) for width in (1, 3)],
    ],
)
def test_a_draft_has_the_bits_of_its_steps(kind: str, form: str, hot: int, width: int) -> None:
    """A draft has the same bits in one call and in two.

    Two calls make the first and the last positions. Some positions have old logits, all far below
    zero, which may fill up the hot set. One of the two rows ends.
    """
    target = CausalLM(tiny("llama"))
    head = head_of(target, kind=kind, **FORMS[form], hot=hot)
    features = features_of(target, TEXTS[9])[:8]
    tokens = TEXTS[9][1:9]
    before = features.clone()
    old = torch.randn(5, hot, generator=torch.Generator().manual_seed(1)) - 40
    for id in (0, 5, 7):
        head.add(id)
    nodes = 4 if width > 1 else 1
    ends = [99, 5]
    beams = Beams([tokens[-1], tokens[2]], width, nodes, ends, [0.7 * old, None])
    parts = [head.grow([0, 7], [features, features[:3]], [tokens, tokens[:3]], 3, beams)]
    parts.append(head.grow([0, 7], parts[0].states[-1:], beams.tokens[:, :1].tolist(), 4, beams))
    assert (head.length(0), head.length(7)) == (8, 3) and torch.equal(features, before)
    for row, count in ((0, 8), (1, 3)):
        state = head.extend([5], [features[:count]], [tokens[:count]])
        at = [tokens[count - 1]]
        values = [0.0]
        for place in range(7):
            part = parts[place >= 3]
            here = place if place < 3 else place - 3
            sums = head.logits(state)[0]
            assert torch.equal(part.logits[here, row], sums)
            if place < 5 and not row:
                sums = sums + 0.7 * old[place]
            whole = sums.repeat(len(at), 1)
            if head.information is not None:
                whole = whole + head.information(torch.tensor(at))
            logs = (whole.double().log_softmax(-1) + torch.tensor(values)[:, None]).flatten()
            scores = part.found[row, here]
            if place >= ends[row]:
                assert not np.isfinite(scores).any()
                break
            best = logs.argsort(descending=True, stable=True)[:nodes]
            taken = np.isfinite(scores)
            assert scores[taken] == pytest.approx(logs[best].numpy(), rel=1e-4, abs=1e-6)
            assert taken.sum() == min(nodes, len(logs))
            assert part.tokens[row, here][taken].tolist() == head.hot[best % hot].tolist()
            assert part.parents[row, here][taken].tolist() == (best // hot).tolist()
            at = part.tokens[row, here][taken][:width].tolist()
            values = scores[taken][:width].tolist()
            if kind == "lyanna":
                (state,) = head.roll([5], state, 1)
            else:
                seen = torch.ones(1, 1, place + 1, dtype=torch.bool)
                state = head.branch([5], state[:, None], torch.tensor([at]), place, seen)[:, 0]
        head.crop([5], [0])


def test_without_c_heads_run_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CausalLM(tiny("llama"))
    assert HiddenLM(random_head(target, **OF_C), target, in_8_bits=False).quantised is None
    few, whole = (
        HiddenLM(random_head(target), target, few) for few in (True, False)
    )  # heads of 8 numbers
    assert few.quantised is None
    states = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    assert (
        1e-4 < error(few.logits(states), whole.logits(states)) < 0.05
    )  # rounded, by what 8 bits round
    monkeypatch.setenv("FORERUN_KERNELS", "none")
    assert HiddenLM(random_head(target, **OF_C), target).quantised is None
