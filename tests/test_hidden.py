"""Heads that draft from hidden states: their arithmetic, what is drafted from which position, and what is refused."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import decode, p_value, random_head, tiny, tiny_tokenizer, tokens_of

import forerun
from forerun import Decoder
from forerun.api.layers import load_head
from forerun.backends.costs import head_costs
from forerun.backends.heads import HiddenLM, head_rows
from forerun.engine.acceptance import Verdict
from forerun.engine.costs import Costs
from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence
from forerun.heads.heads import HiddenDrafter, hot_set
from forerun.methods import Eagle, Lyanna, PacerEagle, PacerLyanna, method
from forerun.methods.ar import PlainDrafter
from forerun.methods.beams import grow
from forerun.methods.budget import Budget, Group, StepCosts
from forerun.methods.eagle import EagleDrafter
from forerun.methods.hidden import HeadDrafter
from forerun.methods.lyanna import LyannaDrafter
from forerun.methods.split import Split
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import capture_hidden_states
from forerun.sampling.sampler import Sampler
from forerun.zoo.quantise import save_quantised

EVEN = torch.arange(3)
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]
FREE = Costs({1: 1.0, 100: 1.0}, {}, head={1: 0.0})  # drafting and verifying cost nothing more


def features_of(target: CausalLM, tokens: list[int], feature: str = "head") -> Tensor:
    with torch.no_grad(), capture_hidden_states(target.model, feature) as heard:
        target.model(input_ids=torch.tensor([tokens]))
    return heard[0][0]


def prefilled(head: HiddenLM, id: int, features: Tensor, tokens: abc.Sequence[int] | None, chunk: int = 64) -> int:
    return sum(head.prefill(id, features, tokens, chunk))


# Heads.


FORMS: dict[str, dict[str, Any]] = {
    "today's": {},
    "two layers": {"num_hidden_layers": 2},
    "below": {"feature": "below"},
    "figure 3": {"feature": "below", "fusion": "first"},
    "uninformed": {"rank": 0},
}


@pytest.mark.parametrize("form", FORMS)
def test_drafting_goes_on_as_it_was_trained(form: str) -> None:
    """States behind every place of a text, drafted from a cache, are those of the unrolled training pass."""
    target = CausalLM(tiny("llama"))
    head = random_head(target, **FORMS[form])
    if head.config.feature == "below":  # that it is looked at
        torch.nn.init.uniform_(head.enter.weight, 0.5, 2.0)
    tokens = [5, 6, 7, 8, 9, 1, 2, 3]
    features = features_of(target, tokens, head.config.feature)
    with torch.no_grad():
        embedded = target.model.get_input_embeddings()(torch.tensor([tokens]))
        states = head.drafted(features[None], embedded, 4)
        trained = head.token_information(torch.tensor(tokens)) if head.informed else None
    fast = HiddenLM(head, target, few=False)
    for id in (7, 3):
        fast.add(id)
    for end in range(1, 5):
        state = fast.extend([3], [features[end - 1 : end]], [[tokens[end]]])
        assert (fast.length(3), fast.length(7)) == (end, 0)
        for k, ahead in enumerate([state, *fast.roll([3], state, 3)], 1):
            torch.testing.assert_close(ahead[0], states[k - 1][0, end - 1], rtol=1e-4, atol=1e-5)
            assert (trained is None) == (fast.information is None) == (head.config.rank == 0)
            if trained is not None:
                information = fast.information(torch.tensor(tokens[end - 1 + k]))
                torch.testing.assert_close(trained[end - 1 + k], information, rtol=1e-4, atol=1e-5)
        assert (fast.length(3), fast.length(7)) == (end + 3, 0)
        fast.crop([3], [end])


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_prompts_run_in_chunks(kind: str) -> None:
    """Rows of their own lengths, in any order, say what they say alone."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, kind=kind), target)
    texts = {4: [5, 6, 7, 8, 9, 1, 2], 2: [3, 4, 5], 9: list(range(2, 30))}
    features = {id: features_of(target, text) for id, text in texts.items()}
    alone = {}
    for id, text in texts.items():
        one = head.fresh()
        one.add(0)
        state = one.extend([0], [features[id][:-1]], [text[1:]])
        alone[id] = [state, *one.roll([0], state, 2)] if kind == "lyanna" else [state]
    for id, text in texts.items():
        assert prefilled(head, id, features[id][:-3], text[1:-2], 2) == len(text) - 3
    for ids in ([2, 4, 9], [9, 2], [4], [9, 4]):
        lengths = [head.length(id) for id in ids]
        states = head.extend(ids, [features[id][-3:-1] for id in ids], [texts[id][-2:] for id in ids])
        more = head.roll(ids, states, 2) if kind == "lyanna" else []
        for row, id in enumerate(ids):
            for mine, own in zip([states, *more], alone[id], strict=True):
                torch.testing.assert_close(mine[row], own[0], rtol=1e-4, atol=1e-5)
        head.crop(ids, lengths)
    for id in texts:
        head.drop(id)
        head.drop(id)
    assert not head.cache.ids


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_on_a_cpu_heads_are_in_8_bits(kind: str) -> None:
    target = CausalLM(tiny("llama"))
    head, tokens = random_head(target, kind=kind), [5, 6, 7, 8, 9, 1, 2]
    features, found = features_of(target, tokens), []
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    for few in (True, False):
        fast = HiddenLM(head, target, few)
        fast.add(0)
        found.append(fast.logits(fast.extend([0], [features[:-1]], [tokens[1:]])))
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert 1e-4 < error < 0.05  # rounded, by what 8 bits round


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_the_heads_rows(architecture: str) -> None:
    target = CausalLM(tiny(architecture))
    tokens = torch.tensor([3, 1, 7])
    weight, bias = head_rows(target, tokens, 32)
    features = features_of(target, [1, 2, 3])
    torch.testing.assert_close(features @ weight.T + bias, target.head(features)[:, tokens], rtol=1e-4, atol=1e-5)


def test_token_information_that_is_too_large_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CausalLM(tiny("llama"))
    head, tokens = random_head(target), torch.tensor([[3, 5], [1, 3]])
    table = HiddenLM(head, target, few=False).information(tokens)
    monkeypatch.setattr("forerun.backends.information.LARGEST_TABLE", 0)
    torch.testing.assert_close(HiddenLM(head, target, few=False).information(tokens), table)


def test_an_eagles_beams_follow_their_paths() -> None:
    """Each beam's state against a chain of its own path, rows of different lengths together."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, kind="eagle"), target)
    texts = [[5, 6, 7, 8, 9, 1], [3, 4, 5]]
    features = [features_of(target, text)[:-1] for text in texts]
    for id in (0, 1):
        head.add(id)
    first = head.extend([0, 1], features, [text[1:] for text in texts])
    lengths = [head.length(id) for id in (0, 1)]
    beams = torch.tensor([[7, 8], [9, 2]])
    at = torch.tensor([[1, 0], [0, 0]])
    rows, eye = torch.arange(2)[:, None], torch.eye(2, dtype=torch.bool).expand(2, -1, -1)
    one = head.branch([0, 1], first[:, None].expand(-1, 2, -1), beams, 0, eye)
    more = torch.tensor([[1, 3], [4, 6]])
    two = head.branch([0, 1], one[rows, at], more, 1, torch.cat([eye[rows, at], eye], -1))
    head.crop([0, 1], lengths)
    for row in range(2):
        for beam in range(2):
            parent = int(at[row, beam])
            alone = head.fresh()
            alone.add(5)
            state = alone.extend([5], [features[row]], [texts[row][1:]])
            for token in (int(beams[row, parent]), int(more[row, beam])):
                state = alone.extend([5], [state], [[token]])
            torch.testing.assert_close(two[row, beam], state[0], rtol=1e-4, atol=1e-5)


# What is drafted from where: heads whose states say which position and which tokens they stand for.

VOCAB, DEPTH = 16, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TellingHead:
    """Features and states are numbers. A feature is its position; it must run behind the earlier ones of its sequence,
    with the token behind it."""

    device, dtype, width, known, states = torch.device("cpu"), torch.float64, 1, True, DEPTH
    feature = "head"
    hot = torch.arange(VOCAB)

    def guesses(self, id: int, count: int, most: int) -> bool:
        return False

    def __init__(self, seqs: abc.Sequence[Sequence]) -> None:
        self.curves = [[0.0, 1.0, 0.9]]
        self.seqs = {seq.id: seq for seq in seqs}
        self.lengths: dict[int, int] = {}
        self.runs = 0

    def prefill(
        self, id: int, features: Tensor, tokens: abc.Sequence[int] | None, chunk: int, reserve: int
    ) -> Iterator[int]:
        self.lengths[id] = 0
        assert tokens is not None and reserve >= self.seqs[id].limit
        for start in range(0, len(features), chunk):
            self.extend([id], [features[start : start + chunk]], [tokens[start : start + chunk]])
            yield len(features[start : start + chunk])
        self.runs = 0

    def extend(
        self, ids: abc.Sequence[int], states: abc.Sequence[Tensor], tokens: abc.Sequence[abc.Sequence[int]]
    ) -> Tensor:
        self.runs += 1
        for id, own, behind in zip(ids, states, tokens, strict=True):
            places = [int(state) for state in own[:, 0]]
            assert places == list(range(self.lengths[id], self.lengths[id] + len(own)))
            assert list(behind) == [self.seqs[id].tokens[place + 1] for place in places]
            self.lengths[id] += len(own)
        return torch.stack([self.predicted(own[-1]) for own in states])

    def length(self, id: int) -> int:
        return self.lengths[id]

    def crop(self, ids: abc.Sequence[int], lengths: abc.Sequence[int]) -> None:
        self.lengths |= zip(ids, lengths, strict=True)

    def drop(self, id: int) -> None:
        self.lengths.pop(id, None)

    def predicted(self, state: Tensor) -> Tensor:
        raise NotImplementedError


class TellingLyanna(TellingHead):
    """The state of position j, drafted in the n-th run: 100 n + j. Its logits are `table[n, j]`."""

    kind = "lyanna"
    table, bigrams = 2 * random(9, 40, VOCAB, seed=1).double(), random(VOCAB, VOCAB, seed=2).double()

    def predicted(self, state: Tensor) -> Tensor:
        return state % 100 + 1 + 100 * self.runs

    def roll(self, ids: abc.Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        for id in ids:
            self.lengths[id] += steps
        return [states + k for k in range(1, steps + 1)]

    def logits(self, states: Tensor) -> Tensor:
        return torch.stack([self.table[int(state) // 100, int(state) % 100] for state in states[:, 0]])

    def information(self, tokens: Tensor) -> Tensor:
        return self.bigrams[tokens]

    def chain(self, token: int, logits: abc.Sequence[Tensor]) -> list[int]:
        """The tokens that such logits give behind a token."""
        found = [token]
        for own in logits:
            found.append(int((own + self.bigrams[found[-1]]).argmax()))
        return found[1:]


def admit(drafter: HeadDrafter, seq: Sequence, chunk: int = 2) -> list[int]:
    positions = torch.arange(len(seq.tokens) - 1, dtype=torch.float64)[:, None]
    return list(drafter.admit(seq, positions, chunk))


def answer(drafter: HeadDrafter, seq: Sequence, draft: Draft, path: list[int], token: int) -> None:
    """The target accepts a path of nodes and goes on with a token."""
    begun = len(seq.tokens) - 1
    hidden = torch.full((len(draft), 1), -1.0, dtype=torch.float64)
    hidden[path, 0] = torch.arange(begun, begun + len(path), dtype=torch.float64)
    seq.tokens += [*(draft.tokens[node] for node in path[1:]), token]
    drafter.observe([seq], [draft], [Verdict(path, token, len(path), True)], [hidden])


def sequence(tokens: abc.Sequence[int], id: int = 0, new: int = 30, **request: Any) -> Sequence:
    return Sequence(Request(list(tokens), new, **request), id)


def lyanna(
    seqs: abc.Sequence[Sequence], reuse: str, width: int = 1, costs: Costs | None = None, **settings: Any
) -> LyannaDrafter:
    head: Any = TellingLyanna(seqs)
    kind = Lyanna if costs is None else PacerLyanna
    return LyannaDrafter(kind(DEPTH, width, 12, reuse=reuse, **settings), head, costs)


@pytest.mark.parametrize("reuse", ["off", "add", "free"])
def test_each_place_has_its_own_logits(reuse: str) -> None:
    """New ones and old ones, over three steps: P(x_{j+1} | x_j) = softmax(B_j + T(x_j))."""
    seq = sequence([3, 1, 4, 1, 5])
    drafter = lyanna([seq], reuse, weight=0.7, least=2)
    head: Any = drafter.head
    assert admit(drafter, seq) == [2, 1] and head.lengths[0] == 3
    (draft,) = drafter.propose([seq]).drafts
    last = len(seq.tokens) - 1  # its position, the first that is drafted from
    assert draft.tokens[1:] == head.chain(5, head.table[1, last : last + DEPTH]) and draft.is_chain
    assert set(draft.origins) == {"draft"}
    old = head.table[1, last + 2 : last + DEPTH]  # of the places behind the next root
    answer(drafter, seq, draft, [0, 1], 7)
    for accepted in (0, 1):
        (draft,) = drafter.propose([seq]).drafts
        last = len(seq.tokens) - 1
        run = 2 + accepted
        new = head.table[run, last : last + DEPTH].clone()
        if reuse == "free":
            new = old
        if reuse == "add":
            new[: len(old)] += 0.7 * old
        wanted = head.chain(seq.tokens[-1], new)
        assert draft.tokens[1:] == wanted and draft.is_chain
        marked = draft.origins.count("reused")
        assert marked == {"off": 0, "add": len(old), "free": len(draft)}[reuse]
        old = old[accepted + 1 :] if reuse == "free" else head.table[run, last + accepted + 1 : last + DEPTH]
        answer(drafter, seq, draft, list(range(accepted + 1)), 9)
    assert head.runs == (1 if reuse == "free" else 3)
    if reuse == "free":  # one is left, too few
        (draft,) = drafter.propose([seq]).drafts
        assert draft.tokens[1:] == head.chain(9, head.table[2, len(seq.tokens) - 1 :][:DEPTH])
        assert head.lengths[0] == len(seq.tokens) - 1


def test_greedy_sequences_spare_the_head_only_together() -> None:
    """A sampled one does so for itself."""
    seqs = [sequence([3, 1, 4, 1], 0), sequence([3, 1, 4, 1], 1, sampler=Sampler(False)), sequence([9, 2], 2)]
    drafter = lyanna(seqs, "free", least=2)
    head: Any = drafter.head
    for seq in seqs[:2]:
        admit(drafter, seq)
    for step, origins in enumerate((["draft", "draft"], ["reused", "reused"], ["draft", "reused", "draft"])):
        if step == 2:
            admit(drafter, seqs[2])
        runs, drafts = head.runs, drafter.propose(seqs[: len(origins)]).drafts
        assert [draft.origins[-1] for draft in drafts] == origins and head.runs == runs + (step != 1)
        for seq, draft in zip(seqs, drafts, strict=False):
            answer(drafter, seq, draft, [0], 7)


def test_a_trees_logits_are_those_of_its_places() -> None:
    seq = sequence([3, 1, 4])
    drafter = lyanna([seq], "add", width=3, weight=0.7)
    head: Any = drafter.head
    admit(drafter, seq)
    (draft,) = drafter.propose([seq]).drafts
    answer(drafter, seq, draft, [0], 7)
    (draft,) = drafter.propose([seq]).drafts
    new, old = head.table[2, 3 : 3 + DEPTH].clone(), head.table[1, 3 : 2 + DEPTH]
    new[: len(old)] += 0.7 * old
    wanted = grow([7], lambda k, tokens, at: new[k] + head.bigrams[tokens], head.hot, [DEPTH], 3, 12)[0]
    assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents) and not draft.is_chain


@pytest.mark.parametrize("width", [1, 3])
def test_old_logits_make_branches_of_their_own(width: int) -> None:
    """Beside the fresh draft, in one tree, for as many places as are left."""
    seqs = [sequence([3, 1, 4]), sequence([2, 7], 1)]
    drafter = lyanna(seqs, "both", width)
    head: Any = drafter.head
    nodes = drafter.nodes
    for seq in seqs:
        admit(drafter, seq)
    (first,) = drafter.propose(seqs[:1]).drafts
    answer(drafter, seqs[0], first, [0, 1], 7)
    seqs[0].limit = len(seqs[0].tokens) + 4  # at most three more, of four places that are left
    drafts = drafter.propose(seqs).drafts

    def grown(row: Tensor, depth: int, root: int) -> Draft:
        return grow([root], lambda k, tokens, at: row[k] + head.bigrams[tokens], head.hot, [depth], width, nodes)[0]

    fresh, old = grown(head.table[2, 4:], 3, 7), grown(head.table[1, 4:], 3, 7)
    wanted = fresh.merge(old)
    assert (drafts[0].tokens, drafts[0].parents) == (wanted.tokens, wanted.parents)
    assert drafts[0].origins == ["draft"] * len(fresh) + ["reused"] * (len(wanted) - len(fresh))
    assert len(fresh) < len(wanted) <= 3 + 1 + drafter.spread
    alone = grown(head.table[2, 1:], DEPTH, 7)
    assert (drafts[1].tokens, drafts[1].parents) == (alone.tokens, alone.parents)
    # The next step's old logits are the fresh ones.
    assert torch.equal(drafter.old[0].places[0], head.table[2, 4]) and head.runs == 2


def test_neighbours_change_nothing() -> None:
    """Sequences that come and go, greedy, sampled and seeded, in any order: each drafts as alone. For greedy ones that
    holds where none of them drafts from old logits alone."""
    modes: list[dict[str, Any]] = [{}, {"sampler": Sampler(False)}, {"sampler": Sampler(False), "seed": 3}]

    def run(chosen: list[int]) -> dict[int, list[list[int]]]:
        seqs = {id: sequence([3, 1, 4, id], id, **modes[id % 3]) for id in chosen}
        drafter = lyanna(list(seqs.values()), "free", least=2, costs=FREE, block=2)
        # The run that a state is from depends on neighbours, the position and the tokens do not.
        drafter.head.table = TellingLyanna.table[:1].expand(99, -1, -1)  # type: ignore[attr-defined]
        found: dict[int, list[list[int]]] = {id: [] for id in chosen}
        running: list[Sequence] = []
        for step in range(8):
            come = [seqs[id] for id in chosen if id % 4 == step]
            for seq in come:
                admit(drafter, seq)
            running = (come + running)[::-1]
            here = [seq for seq in running if (seq.id + step) % 5]
            for seq, draft in zip(here, drafter.propose(here).drafts if here else [], strict=True):
                found[seq.id].append(draft.tokens)
                answer(drafter, seq, draft, list(range(1 + min(len(draft) - 1, seq.id % 3))), 8)
        for seq in seqs.values():
            drafter.drop(seq)
            drafter.drop(seq)
        assert not drafter.features and not drafter.old and not drafter.head.lengths  # type: ignore[attr-defined]
        return found

    together = run(list(range(12)))
    for id in range(12):
        if id % 3:
            assert run([id])[id] == together[id]
    assert any(len(drafts) > 5 for drafts in together.values())


class TellingEagle(TellingHead):
    """A state is the path of tokens behind the text, as a number; it has logits of its own."""

    kind = "eagle"

    def predicted(self, state: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        return torch.ones_like(state)

    def branch(self, ids: abc.Sequence[int], states: Tensor, tokens: Tensor, depth: int, seen: Tensor) -> Tensor:
        found = states * VOCAB + tokens[..., None]
        self.kept.append(found[..., 0])
        kept = torch.cat(self.kept, -1)  # [B, P + w]
        assert seen.shape == (*tokens.shape, kept.shape[1])
        for row in range(len(ids)):
            for beam, path in enumerate(found[row, :, 0].tolist()):
                # Each sees its ancestors and itself: of each length one path.
                visible = kept[row, seen[row, beam]].tolist()
                assert visible == [path // VOCAB**k for k in range(depth, -1, -1)]
        for id in ids:
            self.lengths[id] += tokens.shape[1]
        return found

    def logits(self, states: Tensor) -> Tensor:
        return torch.stack([4 * random(VOCAB, seed=int(state)) for state in states[:, 0]]).double()


@pytest.mark.parametrize("width", [1, 3])
def test_an_eagles_logits_are_those_of_its_paths(width: int) -> None:
    seqs = [sequence([3, 1, 4, 1, 5]), sequence([2, 7], 1), sequence([6], 2)]
    head: Any = TellingEagle(seqs)
    drafter = EagleDrafter(Eagle(4, width, 9), head)
    for seq in seqs:
        admit(drafter, seq)
    seqs[1].limit = 6  # at most three more
    drafts = drafter.propose(seqs).drafts
    for draft, depth in zip(drafts, (4, 3, 0), strict=True):
        assert max(draft.depths) == depth

        def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
            nonlocal paths
            paths = paths[at[0]] * VOCAB + tokens[0] if k else paths
            return head.logits(paths[:, None])[None]

        paths = torch.ones(1, dtype=torch.long)
        (wanted,) = grow([draft.tokens[0]], logits, head.hot, [depth], width, 9)
        assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
    assert head.lengths == {0: 4, 1: 1, 2: 0}
    if width > 1:  # what was accepted does not stand in the tree's order
        path = next(drafts[0].path(node) for node in range(len(drafts[0])) if drafts[0].path(node)[-1] > 2)
        assert path != list(range(len(path)))
        answer(drafter, seqs[0], drafts[0], path, 9)
        drafter.propose(seqs[:1])  # the head checks what it is given
        assert head.lengths[0] == 5 + len(path) - 1


def test_features_of_an_accepted_path() -> None:
    """Of a tree, those of the accepted nodes in their order."""
    seq = sequence([3, 1])
    head: Any = TellingEagle([seq])
    drafter = EagleDrafter(Eagle(4, 2, 6), head)
    admit(drafter, seq)
    draft, hidden = Draft([1, 5, 6, 7, 8], [-1, 0, 0, 2, 1]), torch.arange(5, dtype=torch.float64)[:, None]
    for path, wanted in (
        ([0, 2, 3], [0, 0, 2, 3]),
        ([0, 1, 4], [0, 0, 2, 3, 0, 1, 4]),
        ([0, 1], [0, 0, 2, 3, 0, 1, 4, 0, 1]),
    ):
        drafter.observe([seq], [draft], [Verdict(path, 9, 2, False)], [hidden])
        assert drafter.features[0][:, 0].tolist() == wanted


# Budgets.


def logistic(x: float) -> float:
    return 1 / (1 + exp(-x))


@pytest.mark.parametrize("ahead", [0, 2])
def test_probabilities_are_calibrated(ahead: int) -> None:
    """By the curve of each place, which for old logits lies further ahead."""
    curves = [[0.5, 0.7, 0.9], [-1.0, 1.2, 0.8], [0.3, 2.0, 0.7], [-2.0, 0.5, 0.6]]
    chances = [0.9, 0.6, 0.3]
    own = [curves[min(ahead + k, 3)] for k in range(3)]
    right = [logistic(a + b * log(p / (1 - p))) for (a, b, _), p in zip(own, chances, strict=True)]

    def budget() -> Budget:
        return Budget([Group([0], StepCosts(FREE, 1, 9), True)], curves, 3, [3], [ahead])

    chain = budget()
    chain.deeper_chains(0, [[log(chance) for chance in chances]])
    assert chain.sure[0] == pytest.approx(np.cumprod(right))
    tree = budget()
    for k, chance in enumerate(chances):
        assert float(tree.gains(k, np.log([[[chance]]]))[0, 0, 0]) == pytest.approx(log(right[k]))


def test_a_draft_is_as_long_as_its_calibration_has_it() -> None:
    """Three places are as good as certain and the others hopeless; old logits are as far ahead as when they came."""
    seq = sequence([3, 1, 4, 1, 5])
    costs = Costs({1: 1.0, 2: 1.01, 50: 1.5}, {}, head={1: 0.01})
    drafter = lyanna([seq], "free", least=2, costs=costs, block=DEPTH)
    drafter.head.curves = [[30.0, 1.0, 0.99]] * 3 + [[-30.0, 1.0, 0.01]] * 9
    admit(drafter, seq)
    (draft,) = drafter.propose([seq]).drafts
    assert max(draft.depths) == 3
    answer(drafter, seq, draft, [0], 7)
    (draft,) = drafter.propose([seq]).drafts
    assert set(draft.origins) == {"reused"} and max(draft.depths) == 2
    for shift, count in ((30.0, 12), (-30.0, 0)):
        tree = lyanna([seq], "off", 2, costs, block=1)
        tree.head.curves = [[shift, 1.0, 0.5]]
        admit(tree, seq)
        assert tree.propose([seq]).drafts[0].drafted == count


def test_costs_go_by_mode() -> None:
    """A sequence drafts by the costs of its own mode: greedy ones together, others alone."""
    sampled: dict[str, Any] = {"sampler": Sampler(False)}
    seqs = [sequence([3, 1, 4], 0), sequence([3, 1], 1, **sampled), sequence([3, 1], 2, seed=1, **sampled)]
    seqs.append(sequence([9, 9], 3))
    drafter = lyanna(seqs, "off", costs=replace(FREE, judging=1e6), block=2)
    for seq in seqs:
        admit(drafter, seq)
    drafts = drafter.propose(seqs).drafts
    assert [draft.drafted for draft in drafts] == [DEPTH, 0, 0, DEPTH]


@pytest.mark.parametrize("together", [True, False])
def test_a_budget_is_the_best_that_costs_allow(together: bool) -> None:
    """Against all sizes, and against going on with the usual tokens, reckoned by hand."""
    mean, nodes, block = 0.7, 6, 2
    costs = Costs({1: 5.0, 4: 5.5, 30: 9.0}, {}, head={1: 0.15, 3: 0.2})
    limits = [6, 3, 6]
    chances = [[0.9, 0.8, 0.9, 0.2, 0.9, 0.9], [0.95, 0.9, 0.9], [0.5, 0.3, 0.9, 0.9, 0.9, 0.9]]
    count = 3 if together else 1
    parts = [[0, 1, 2]] if together else [[0], [1], [2]]
    groups = [Group(rows, StepCosts(costs, count, nodes), True) for rows in parts]
    budget = Budget(groups, [[0.0, 1.0, mean]] * nodes, block, limits, [0, 0, 0])

    def rate(survival: list[list[float]], size: int, states: int) -> float:
        spent = states * costs.heading(count) + costs.verify(count * (size + 1))
        return (len(survival) + sum(sum(own[:size]) for own in survival)) / spent

    for k in (0, 2, 4):
        before = list(budget.deep)
        block_of = [[log(chance) for chance in (own + [0.1] * 6)[k : k + block]] for own in chances]
        going = budget.deeper_chains(k, block_of)
        seen = [np.cumprod(own[: min(k + block, limit)]).tolist() for own, limit in zip(chances, limits, strict=True)]
        for rows in parts:
            if max(before[row] for row in rows) < k + block:  # had ended
                assert [budget.deep[row] for row in rows] == [before[row] for row in rows]
                continue
            own, usual = [seen[row] for row in rows], []
            for row in rows:
                more = range(1, min(block, limits[row] - k - block) + 1)
                usual.append(sorted([*seen[row], *(seen[row][-1] * mean**step for step in more)], reverse=True))
            best = max(rate(own, size, k + block) for size in range(nodes + 1))
            there = max(
                rate(usual, size, min(k + 2 * block, max(limits[row] for row in rows))) for size in range(nodes + 1)
            )
            goes = there > best and k + block < max(limits[row] for row in rows)
            deep = [min(limits[row], k + (1 + goes) * block) for row in rows]
            assert [budget.deep[row] for row in rows] == deep
        if not going:
            break
    sizes = budget.sizes()
    if together:
        found = max(range(nodes + 1), key=lambda size: rate(budget.sure, size, max(budget.deep)))
        assert sizes == [min(found, len(own)) for own in budget.sure]
    else:
        for row, own in enumerate(budget.sure):
            assert sizes[row] == max(range(len(own) + 1), key=lambda size: rate([own], size, budget.deep[row]))
    assert block < max(budget.deep) and (len(set(sizes)) == 1) == together


@pytest.mark.parametrize(("width", "most"), [(1, 6), (2, 12)])
@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_budget_takes_what_its_costs_allow(kind: str, width: int, most: int) -> None:
    """No forward is made that is not worth its time; each of an EAGLE-like head's is of all beams."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, kind=kind), target)

    def drafted(costs: Costs, shift: float = 30.0, block: int = 1) -> tuple[list[int], int, int]:
        """Numbers of tokens, the largest depth and forwards, with all tokens certain, or hopeless."""
        own = head.fresh()
        own.curves = [[shift, 1.0, exp(min(shift, 0.0))]]
        if kind == "eagle":
            drafter: Any = EagleDrafter(PacerEagle(6, width, 12, block=block), own, costs, width)
        else:
            drafter = LyannaDrafter(PacerLyanna(6, width, 12, reuse="off", block=block), own, costs)
        seqs = [sequence(range(2, 12), id) for id in range(2)]
        for seq in seqs:
            assert sum(drafter.admit(seq, features_of(target, seq.tokens[:-1]), 4)) == 8
        proposal = drafter.propose(seqs)
        assert [own.length(seq.id) for seq in seqs] == [9, 9]
        depth = max(max(draft.depths) for draft in proposal.drafts)
        return [draft.drafted for draft in proposal.drafts], depth, proposal.forwards

    free, _, forwards = drafted(FREE)
    assert free == [most, most] and (forwards == 6 or width > 1)
    for block in (1, 4):
        _, depth, forwards = drafted(Costs({1: 1.0, 100: 1.0}, {}, head={1: 1e6}), -1.0, block)
        assert depth <= block and forwards == block
    assert max(drafted(Costs({1: 1.0, 2: 1.0, 100: 1e6}, {}, head={1: 0.0}))[0]) <= 1
    assert drafted(Costs({1: 1.0, 100: 2.0}, {}, head={1: 0.01}), -30.0)[0] == [0, 0]
    if kind == "eagle":  # beams are rows: four of them are too dear where two are not
        steps = Costs({1: 1.0, 100: 1.0}, {}, head={1: 0.0, 2: 0.0, 4: 1e6})
        assert drafted(steps, -1.0)[2] == (6 if width == 1 else 1)


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_the_costs_of_a_heads_states(kind: str) -> None:
    target = CausalLM(tiny("llama"))
    costs = head_costs(HiddenLM(random_head(target, kind=kind), target), 8)
    assert set(costs) == {1, 2, 4, 8, 16} and min(costs.values()) > 0


# Trees.


def test_a_tree_holds_the_best_paths() -> None:
    """Against an enumeration of all paths, where the beams are wide enough to miss none."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, hot=4), target)
    table, hot = head.information(torch.arange(target.vocab_size)) * 3, head.hot.tolist()
    places = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
        return places[:, k, None] + table[tokens]

    drafts = grow([5, 7], logits, head.hot, [3, 2], 16, 9)
    for root, row, draft, limit in zip((5, 7), places, drafts, (3, 2), strict=True):
        values: dict[tuple[int, ...], float] = {(root,): 0.0}
        for depth in range(limit):
            for path in [path for path in values if len(path) == depth + 1]:
                own = (row[depth] + table[path[-1]]).log_softmax(-1)
                values |= {(*path, hot[i]): values[path] + float(own[i]) for i in range(4)}
        best = sorted((path for path in values if len(path) > 1), key=lambda path: -values[path])[:9]
        assert {tuple(draft.tokens[i] for i in draft.path(node)) for node in range(1, len(draft))} == set(best)
    chains = grow([5, 7], logits, head.hot, [3, 2], 1, 3)
    assert all(chain.is_chain for chain in chains) and [chain.drafted for chain in chains] == [3, 2]
    assert [draft.drafted for draft in grow([5, 7], logits, head.hot, [0, 0], 2, 3)] == [0, 0]


def test_certain_paths_hold_their_ancestors() -> None:
    """If all probabilities are 1, no child is taken for its parent."""
    certain = torch.full((1, 4, 3), -1e9)
    certain[..., 1] = 0.0
    (draft,) = grow([9], lambda k, tokens, at: certain[:, k, None].expand(-1, tokens.shape[1], -1), EVEN, [4], 3, 4)
    assert draft.tokens[:1] == [9] and max(draft.depths) == 4 and draft.is_chain


# Decoding.

WAYS = {
    "chain": Lyanna(reuse="off"),
    "free": Lyanna(depth=5, reuse="free", least=1),
    "add": Lyanna(depth=5, reuse="add"),
    "both": Lyanna(depth=5, reuse="both"),
    "both, tree": Lyanna(depth=4, width=2, nodes=6, reuse="both"),
    "tree": Lyanna(width=3, nodes=7, reuse="off"),
    "tree, free": Lyanna(depth=5, width=2, nodes=9, reuse="free", least=1),
    "paced": PacerLyanna(depth=5, width=2, reuse="free", least=1),
    "paced chain": PacerLyanna(reuse="add"),
    "below": Lyanna(depth=5, reuse="free", least=1),
    "below, tree": Lyanna(depth=5, width=2, nodes=9, reuse="off"),
    "figures 3 and 6": Lyanna(depth=5, width=2, nodes=9, reuse="free", least=1),
    "uninformed": Lyanna(depth=5, reuse="add"),
    "uninformed, tree": Lyanna(depth=5, width=3, nodes=9, reuse="add"),
    "below, uninformed, paced": PacerLyanna(depth=5, width=2, reuse="free", least=1),
    "eagle": Eagle(),
    "eagle, below": Eagle(depth=4),
    "eagle, paced": PacerEagle(depth=5),
    "eagle, paced tree": PacerEagle(depth=5, width=2),
    "eagle, tree": Eagle(depth=3, width=2, nodes=7),
}


# Of the ways that differ from another one by the head's form alone, one is sampled.
FORMED = [way for way in WAYS if way.partition(",")[0] in ("below", "uninformed") or way.endswith("below")]
CASES = [(each, way) for each in ("llama", "gpt2", "qwen3", "gemma3") for way in WAYS]
CASES = [case for case in CASES if case[0] in ("llama", "gemma3") or case[1] not in FORMED]


def head_of(target: CausalLM, way: str, **settings: Any) -> HiddenDrafter:
    """A head as the way's name has it."""
    forms: dict[str, dict[str, Any]] = {
        "below": {"feature": "below"},
        "figures": {"feature": "below", "fusion": "first"},
        "uninformed": {"rank": 0},
    }
    form = {key: value for name, own in forms.items() if name in way for key, value in own.items()}
    return random_head(target, kind=str(WAYS[way].head), **form, **settings)


@pytest.mark.parametrize(("architecture", "way"), CASES)
def test_equality_on_real_models(architecture: str, way: str) -> None:
    target = tiny(architecture)
    chosen = WAYS[way]
    head = head_of(CausalLM(target), way)
    costs = Costs({1: 1.0, 16: 1.1}, {}, head={1: 0.001})
    decoder = Decoder(target, None, None, chosen, guard=False, head=head, costs=costs)
    ar = Decoder(target, method=method("ar"))
    for prompts in (PROMPTS[:2], PROMPTS, PROMPTS * 4):
        plain = ar.generate(prompts, max_new_tokens=24, ignore_eos=True)
        done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == [row.tokens for row in plain]
        assert sum(row.stats.drafted for row in done) > 0
    plain = ar.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    assert decoder.generate(PROMPTS[1], max_new_tokens=24, ignore_eos=True).tokens == plain[1].tokens


@pytest.mark.parametrize("feature", ["head", "below"])
def test_reused_logits_are_those_of_the_earlier_step(feature: str) -> None:
    """On a real head: what is left of a step's logits is what the head says of the text as it was then."""
    target = tiny("llama")
    seen: list[tuple[int, int, Tensor]] = []

    class Watched(LyannaDrafter):
        def draft(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
            old, (seq,) = self.old.get(seqs[0].id), seqs
            if old is not None:
                texts.append(list(seq.tokens))
                seen.append((len(seq.tokens) - old.ahead, old.ahead, old.places))
            return super().draft(seqs, limits)

    texts: list[list[int]] = []
    head = HiddenLM(random_head(CausalLM(target), feature=feature), CausalLM(target))
    drafter = Watched(Lyanna(5, reuse="free", least=1), head)
    decode(CausalLM(target), drafter, [Request([5, 6, 7, 5, 6], 60)])
    assert len(seen) > 3 and not drafter.old and not head.cache.ids
    for text, (length, ahead, places) in list(zip(texts, seen, strict=True))[:6]:
        alone = head.fresh()
        features = features_of(CausalLM(target), text[: length - 1], feature)
        prefilled(alone, 0, features[:-1], text[1 : length - 1])
        state = alone.extend([0], [features[-1:]], [text[length - 1 : length]])
        states = torch.cat([state, *alone.roll([0], state, 4)])
        torch.testing.assert_close(places, head.logits(states)[ahead:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in FORMED])
def test_sampled_tokens_keep_their_distribution(way: str) -> None:
    """Point masses from any head: the first tokens' joint distribution is the target's, by chi-square."""
    target, count = tiny("llama", vocab=6), 1500
    model = CausalLM(target)
    prompt = [1, 2, 3, 4, 5, 0, 1, 2]
    chosen = WAYS[way]
    head = head_of(model, way, hot=4)
    # Many rows at once take few forwards.
    costs = Costs({1: 1.0, count // 8: 1.1}, {}, head={1: 0.001})
    options: Any = {"max_rows": count // 2, "prefix_bytes": 0}
    decoder = Decoder(target, None, None, chosen, guard=False, head=head, costs=costs, **options)
    decoder.engine.chunk_seconds = 100.0  # no clock says who joins when
    torch.manual_seed(0)
    rows = decoder.generate([prompt] * count, max_new_tokens=4, temperature=1.0, ignore_eos=True)
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        pairs = target(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, -1].softmax(-1)
    assert sum(row.stats.drafted for row in rows) > count
    assert p_value([row.tokens[:2] for row in rows], first[:, None] * pairs) > 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_all_modes_in_one_batch(way: str) -> None:
    """Greedy, sampled and seeded ones that come and end at their own times: each gets what it gets alone."""
    target = CausalLM(tiny("llama"))
    chosen = WAYS[way]
    head = HiddenLM(head_of(target, way), target)
    modes: list[dict[str, Any]] = [{}, {"sampler": Sampler(False), "seed": 5}, {"sampler": Sampler(False), "seed": 6}]
    requests = [
        Request(prompt, 7 + 5 * i, **mode) for i, prompt in enumerate(PROMPTS) for mode in modes[i % 2 : 2 + i % 2]
    ]

    def run(requests: abc.Sequence[Request], rows: int) -> list[tuple[list[int], list[int]]]:
        costs = Costs({1: 1.0, 16: 1.5}, {}, head={1: 0.001})
        decoder = Decoder(target, None, None, chosen, guard=False, head=head, costs=costs)
        drafter = decoder.engine.drafter
        found = decode(target.fresh(), drafter, requests, max_rows=rows)
        assert not drafter.features and not drafter.head.cache.ids  # type: ignore[attr-defined]
        return [(tokens_of(steps), [step.drafted for step in steps]) for steps in found]

    together = run(requests, 3)
    for request, (tokens, drafted) in zip(requests, together, strict=True):
        ((alone, sizes),) = run([request], 1)
        assert tokens == alone and (request.sampler.greedy or drafted == sizes)


def test_what_loading_refuses(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    head = random_head(target)
    head.save_pretrained(tmp_path / "head")
    again, first = (HiddenLM(each, target) for each in (load_head(tmp_path / "head", target, "lyanna"), head))
    assert torch.equal(again.hot, first.hot)
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for each in (again, first):
        each.add(0)
    assert torch.equal(again.extend([0], [states], [[3] * 7]), first.extend([0], [states], [[3] * 7]))
    with pytest.raises(ValueError, match="belongs to another target"):
        load_head(tmp_path / "head", CausalLM(tiny("qwen3")), "lyanna")
    with pytest.raises(ValueError, match="of the kind 'lyanna'; the method needs 'eagle'"):
        load_head(tmp_path / "head", target, "eagle")
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        load_head(tmp_path / "nothing", target, "lyanna")
    with pytest.raises(ValueError, match="needs a head: give one, or train one with `forerun train lyanna`"):
        Decoder(target, method=Lyanna())
    save_quantised(head, tmp_path / "small", {})
    small = load_head(tmp_path / "small", target)
    assert torch.equal(small.hot, head.hot) and small.config.target == head.config.target
    for mine, whole in zip(small.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=float(whole.detach().abs().max()) / 200)
    head.hot[0] = target.vocab_size
    with pytest.raises(ValueError, match="hot set that does not fit"):
        load_head(head, target, "lyanna")
    config = tmp_path / "head" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"feature": "above"}))
    with pytest.raises(ValueError, match="a head's feature is one of head, below, not 'above'"):
        load_head(tmp_path / "head", target, "lyanna")
    config.write_text(json.dumps(settings | {"known": False}))
    with pytest.raises(ValueError, match="a head sees the tokens after the target's features: train this one again"):
        load_head(tmp_path / "head", target, "lyanna")
    # Heads from before there was a choice.
    config.write_text(json.dumps({name: settings[name] for name in set(settings) - {"feature", "fusion"}}))
    older = load_head(tmp_path / "head", target, "lyanna").config
    assert (older.feature, older.fusion) == ("head", "every")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"widht": 3}))
    with pytest.raises(ValueError, match="unknown field 'widht'"):
        load_head(tmp_path / "head", target, "lyanna")


def test_hot_sets() -> None:
    tokens, share = hot_set([1, 5, 0, 3, 5], 3)
    assert tokens.tolist() == [1, 4, 3] and share == pytest.approx(13 / 14)
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"1 to 5 tokens, not {size}"):
            hot_set([1, 5, 0, 3, 5], size)


def test_two_methods_take_one_kind_of_states() -> None:
    target = CausalLM(tiny("llama"))
    below, head = (HiddenLM(random_head(target, feature=feature), target) for feature in ("below", "head"))
    with pytest.raises(ValueError, match="one method needs the LM head's inputs"):
        Split(LyannaDrafter(Lyanna(), below), LyannaDrafter(Lyanna(), head))
    assert Split(LyannaDrafter(Lyanna(), below), PlainDrafter()).feature == "below"


def test_settings_are_checked() -> None:
    wrong: dict[str, Any] = {"depth": 0, "width": 0, "nodes": 0, "least": 0, "weight": -1, "reuse": "never"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            method("lyanna", **{name: value})
    with pytest.raises(ValueError, match="reuse must be off, add or free, not 'both'"):
        method("pacer-lyanna", reuse="both")
    for name in ("pacer-lyanna", "pacer-eagle"):
        with pytest.raises(ValueError, match="block must be an integer of at least 1"):
            method(name, block=0)
    target = CausalLM(tiny("llama"))
    with pytest.raises(ValueError, match="of the kind 'eagle'; the method needs 'lyanna'"):
        Decoder(target, method=Lyanna(), head=HiddenLM(random_head(target, kind="eagle"), target))


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_head_alone_names_its_method(kind: str, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    save_quantised(random_head(CausalLM(model), kind=kind), tmp_path / "head", {})
    decoder = forerun.load(tmp_path / "target", head=tmp_path / "head")
    assert decoder.method.name == kind and decoder.head is not None
    assert forerun.load(tmp_path / "target", head=tmp_path / "head", method="suffix").head is None
    with pytest.raises(ValueError, match="nowhere"):
        forerun.load(tmp_path / "target", head=tmp_path / "nowhere")
