"""Heads that draft from hidden states.

Their arithmetic, what is drafted from which position, and what is refused.
"""

from __future__ import annotations

import json
from collections import abc
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import forerun
from benchmarks.training.quantise import save_quantised
from forerun import Decoder
from forerun.api.layers import load_head
from forerun.backends.costs import head_costs
from forerun.backends.heads import HiddenLM, head_rows
from forerun.drafters import head as head_drafter
from forerun.drafters.beams import grow, searching
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.head import HeadDrafter
from forerun.drafters.lyanna import LyannaDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import RowOutcome
from forerun.heads.heads import HiddenDrafter, hot_set
from forerun.methods import Eagle, Lyanna, PacerEagle, PacerLyanna, method
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.planning.forecast import StepSituation, forecast
from forerun.planning.tree_plan import Group, TreeCosts, TreePlan
from forerun.sampling.sampler import Sampler
from tests.support.heads import OF_C, features_of, sequence
from tests.support.toys import (
    decode,
    drafts_as_plain,
    random_head,
    refuses,
    save_models,
    tiny,
    tokens_of,
)

PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]
FREE = Costs({1: 1.0, 100: 1.0}, {}, head={1: 0.0})  # drafting and verifying cost nothing more


def toys(kind: str = "lyanna", **settings: Any) -> tuple[CausalLM, HiddenLM]:
    target = CausalLM(tiny("llama"))
    return target, HiddenLM(random_head(target, kind=kind, **settings), target)


# Heads.


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_rows_of_the_head_give_its_logits(architecture: str) -> None:
    target = CausalLM(tiny(architecture))
    tokens = torch.tensor([3, 1, 7])
    weight, bias = head_rows(target, tokens, 32)
    features = features_of(target, [1, 2, 3])
    torch.testing.assert_close(
        features @ weight.T + bias, target.head(features)[:, tokens], rtol=1e-4, atol=1e-5
    )


# Drafters, asked step by step.


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def lyanna(reuse: str, costs: Costs | None = None, **settings: Any) -> LyannaDrafter:
    kind = Lyanna if costs is None else PacerLyanna
    return LyannaDrafter(kind(6, reuse=reuse, **settings), toys()[1], costs)


def admit(drafter: HeadDrafter, seq: Sequence) -> None:
    list(drafter.admit(seq, random(len(seq.tokens) - 1, 32), 2))


def test_greedy_sequences_spare_the_head_only_together() -> None:
    """A sampled one does so for itself."""
    seqs = [
        sequence([3, 1, 4, 1], 0),
        sequence([3, 1, 4, 1], 1, sampler=Sampler(False)),
        sequence([9, 2], 2),
    ]
    drafter = lyanna("free", least=2)
    for seq in seqs[:2]:
        admit(drafter, seq)
    for step, origins in enumerate(
        (["draft", "draft"], ["reused", "reused"], ["draft", "reused", "draft"])
    ):
        if step == 2:
            admit(drafter, seqs[2])
        proposal = drafter.propose(seqs[: len(origins)])
        assert [draft.origins[-1] for draft in proposal.drafts] == origins
        assert proposal.forwards == (0 if step == 1 else 6)
        for seq, draft in zip(seqs, proposal.drafts, strict=False):
            seq.tokens.append(7)  # the target rejects all of the draft
            outcome = RowOutcome(seq, draft, Verdict([0], 7, 1, True), random(len(draft), 32))
            drafter.observe([outcome], proposal.memo)


def drafter_of(kind: str, head: HiddenLM) -> HeadDrafter:
    return LyannaDrafter(Lyanna(3), head) if kind == "lyanna" else EagleDrafter(Eagle(3), head)


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_prompts_are_read_when_a_draft_is_first_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts do not depend on how many steps read the prompts.

    A step reads whole prompts until it has read ENOUGH_READ tokens. Drafts are also the same after
    a text has grown.
    """
    target, head = toys(kind)
    texts = [range(2, 9), range(3, 10), range(5, 12)]
    tokens: list[list[list[int]]] = []
    for piece, drafted in ((100, [3, 3, 3]), (8, [3, 3, 0])):
        monkeypatch.setattr(head_drafter, "ENOUGH_READ", piece)
        drafter = drafter_of(kind, head.fresh())
        seqs = [sequence(text, id) for id, text in enumerate(texts)]
        for seq in seqs:
            assert not list(drafter.admit(seq, features_of(target, seq.tokens[:-1]), 4))
        first = drafter.propose(seqs)
        assert [draft.drafted for draft in first.drafts] == drafted
        assert first.prompt_seconds > 0
        seqs[2].tokens.append(7)
        states = features_of(target, seqs[2].tokens)[-2:-1]
        outcome = RowOutcome(seqs[2], Draft.root(11), Verdict([0], 7, 1, True), states)
        drafter.observe([outcome], first.memo)
        second = drafter.propose(seqs[2:])
        tokens.append([draft.tokens for draft in [*first.drafts[:2], *second.drafts]])
        assert not drafter.unread
        assert drafter.propose(seqs[2:]).prompt_seconds == 0
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_of_a_long_prompt_the_last_positions_are_read(kind: str) -> None:
    """A head that reads 6 positions drafts as if the prompt had no others."""
    target, head = toys(kind)
    text = list(range(2, 32))
    states = features_of(target, text[:-1])
    drafts = []
    for tokens, features in ((text, states), (text[-7:], states[-6:])):
        reader = head.fresh()
        reader.reads = 6
        drafter = drafter_of(kind, reader)
        seq = sequence(tokens, 0)
        list(drafter.admit(seq, features, 4))
        drafts.append(drafter.propose([seq]).drafts[0].tokens)
        assert reader.length(0) == 6
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("acceptance", [0.05, 0.9])
def test_drafts_that_cannot_pay_are_not_begun(acceptance: float) -> None:
    """By costs and the mean acceptance of the first places, in a step of so many rows."""
    costs = Costs({1: 10.0, 4: 10.5, 8: 11.0, 16: 60.0, 32: 120.0}, {}, head={1: 0.2, 16: 1.0})
    drafter = lyanna("off", costs, block=2)
    drafter.head.curves = [[0.0, 1.0, acceptance]]
    assert [forecast(drafter, StepSituation(rows)).pays for rows in (1, 4, 16)] == [
        acceptance > 0.5,
        acceptance > 0.5,
        False,
    ]
    assert (
        forecast(lyanna("off"), StepSituation(16)).pays
        and forecast(lyanna("off", costs, width=2, nodes=1, block=9), StepSituation(1)) is not None
    )


# Plans.


@pytest.mark.parametrize("ahead", [0, 2])
def test_probabilities_are_calibrated(ahead: int) -> None:
    """By the curve of each place, which for old logits lies further ahead."""
    curves = [[0.5, 0.7, 0.9], [-1.0, 1.2, 0.8], [0.3, 2.0, 0.7], [-2.0, 0.5, 0.6]]
    probabilities = [0.9, 0.6, 0.3]
    here = [curves[min(ahead + k, 3)] for k in range(3)]
    right = [
        1 / (1 + exp(-a - b * log(p / (1 - p))))
        for (a, b, _), p in zip(here, probabilities, strict=True)
    ]

    def plan() -> TreePlan:
        return TreePlan([Group([0], TreeCosts(FREE, 1, 9), True)], curves, 3, [3], [ahead])

    tree = plan()
    value = 0.0
    for k, probability in enumerate(probabilities):
        value += float(tree.gains(k, np.log([[[probability]]]))[0, 0, 0])
        tree.deeper(k, np.array([[value]]))
    assert tree.survival[0] == pytest.approx(np.cumprod(right))


def test_costs_go_by_mode() -> None:
    """A sequence drafts by the costs of its own mode: greedy ones together, others alone."""
    sampled: dict[str, Any] = {"sampler": Sampler(False)}
    seqs = [
        sequence([3, 1, 4], 0),
        sequence([3, 1], 1, **sampled),
        sequence([3, 1], 2, seed=1, **sampled),
    ]
    seqs.append(sequence([9, 9], 3))
    drafter = lyanna("off", replace(FREE, verify_sample_ms=1e6), block=2)
    for seq in seqs:
        admit(drafter, seq)
    assert [draft.drafted for draft in drafter.propose(seqs).drafts] == [6, 0, 0, 6]


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]]])
def test_a_plan_takes_the_best_number_of_nodes(parts: list[list[int]]) -> None:
    """The tree of the best expected speed is chosen.

    Costs and calibrated probabilities decide; rows that stop together share a forward's cost.
    """
    costs = Costs({1: 5.0, 4: 5.5, 30: 9.0}, {}, head={1: 0.15, 3: 0.2})
    probabilities = [0.95, 0.9, 0.7, 0.9, 0.2, 0.5]
    limits = [6, 3, 6]
    groups = [Group(rows, TreeCosts(costs, len(rows), 6), True) for rows in parts]
    plan = TreePlan(groups, [[0.0, 1.0, 0.7]] * 6, 6, limits, [0, 0, 0])
    values = np.array([np.log(probabilities) + log(scale) for scale in (1.0, 1.0, 0.6)]).cumsum(1)
    for k in range(6):
        values[k >= np.array(limits), k] = -np.inf
        plan.deeper(k, values[:, k : k + 1])
    sizes = plan.sizes()
    for rows in parts:

        def rate(sizes: tuple[int, ...], rows: list[int] = rows) -> float:
            spent = max(limits[row] for row in rows) * costs.head_ms(len(rows)) + costs.verify(
                len(rows) + sum(sizes)
            )
            return (
                len(rows)
                + sum(sum(plan.survival[row][:size]) for row, size in zip(rows, sizes, strict=True))
            ) / spent

        best = max(product(*(range(limits[row] + 1) for row in rows)), key=rate)
        assert tuple(sizes[row] for row in rows) == best
    assert min(sizes) > 0 and max(sizes) < 6 and sizes[2] < sizes[0]


@pytest.mark.parametrize(("width", "most"), [(1, 6), (2, 12)])
@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_plan_takes_what_its_costs_allow(kind: str, width: int, most: int) -> None:
    """No forward is made unless it is worth its time. An EAGLE-like head runs all beams in each."""
    target, head = toys(kind)

    def drafted(costs: Costs, shift: float = 30.0, block: int = 1) -> tuple[list[int], int, int]:
        """Count tokens, depth and forwards where all tokens are certain, or hopeless."""
        fresh_head = head.fresh()
        fresh_head.curves = [[shift, 1.0, exp(min(shift, 0.0))]]
        if kind == "eagle":
            drafter: Any = EagleDrafter(
                PacerEagle(6, width, 12, block=block), fresh_head, costs, width
            )
        else:
            drafter = LyannaDrafter(
                PacerLyanna(6, width, 12, reuse="off", block=block), fresh_head, costs
            )
        seqs = [sequence(range(2, 12), id) for id in range(2)]
        for seq in seqs:
            assert sum(drafter.admit(seq, features_of(target, seq.tokens[:-1]), 4)) == 0
        proposal = drafter.propose(seqs)
        assert [fresh_head.length(seq.id) for seq in seqs] == [9, 9]
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
    costs = head_costs(toys(kind)[1], 8)
    assert set(costs) == {1, 2, 4, 8, 16} and min(costs.values()) > 0


# Trees.


def test_a_tree_holds_the_best_paths() -> None:
    """Against an enumeration of all paths, where the beams are wide enough to miss none."""
    target, head = toys(hot=4)
    table = head.information(torch.arange(target.vocab_size)) * 3
    hot = head.hot.tolist()
    places = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def logits(k: int, tokens: Tensor, at: Tensor) -> Tensor:
        return places[:, k, None] + table[tokens]

    drafts = grow([5, 7], searching(logits, head.hot, 16, 9), [3, 2], 16, 9)
    for root, row, draft, limit in zip((5, 7), places, drafts, (3, 2), strict=True):
        values: dict[tuple[int, ...], float] = {(root,): 0.0}
        for depth in range(limit):
            for path in [path for path in values if len(path) == depth + 1]:
                own = (row[depth] + table[path[-1]]).log_softmax(-1)
                values |= {(*path, hot[i]): values[path] + float(own[i]) for i in range(4)}
        best = sorted((path for path in values if len(path) > 1), key=lambda path: -values[path])[
            :9
        ]
        assert {
            tuple(draft.tokens[i] for i in draft.path(node)) for node in range(1, len(draft))
        } == set(best)
    chains = grow([5, 7], chain := searching(logits, head.hot, 1, 3), [3, 2], 1, 3)
    assert all(chain.is_chain for chain in chains) and [chain.drafted for chain in chains] == [3, 2]
    assert [draft.drafted for draft in grow([5, 7], chain, [0, 0], 2, 3)] == [0, 0]
    # If all probabilities are 1, no child is taken for its parent.
    sure = torch.full((1, 4, 3), -1e9)
    sure[..., 1] = 0.0
    search = searching(
        lambda k, at, _: sure[:, k, None].expand(-1, at.shape[1], -1), torch.arange(3), 3, 4
    )
    (draft,) = grow([9], search, [4], 3, 4)
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
    "uninformed": Lyanna(depth=5, reuse="add"),
    "uninformed, tree": Lyanna(depth=5, width=3, nodes=9, reuse="add"),
    "uninformed, paced": PacerLyanna(depth=5, width=2, reuse="free", least=1),
    "eagle": Eagle(),
    "eagle, paced": PacerEagle(depth=5),
    "eagle, paced tree": PacerEagle(depth=5, width=2),
    "eagle, tree": Eagle(depth=3, width=2, nodes=7),
}


def head_of(target: CausalLM, way: str) -> HiddenDrafter:
    """A head as the way's name has it, and in sizes that C can do if the target is a Llama."""
    sizes = OF_C if target.config.model_type == "llama" else {}
    return random_head(
        target, kind=str(WAYS[way].head), **sizes | ({"rank": 0} if "uninformed" in way else {})
    )


COSTS = Costs({1: 1.0, 16: 1.1}, {}, head={1: 0.001})


@cache
def plain_output(architecture: str) -> list[list[int]]:
    """What plain decoding says after PROMPTS, which no method changes."""
    decoder = Decoder(tiny(architecture), method=method("ar"))
    done = decoder.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    return [row.tokens for row in done]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_output_is_that_of_plain_decoding(architecture: str, way: str) -> None:
    target = tiny(architecture)
    decoder = Decoder(
        target, None, None, WAYS[way], False, head=head_of(CausalLM(target), way), costs=COSTS
    )
    plain = plain_output(architecture)
    drafts_as_plain(decoder, PROMPTS, plain)


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_all_modes_get_in_a_batch_what_they_get_alone(way: str) -> None:
    """Requests that come and end at any time get what each gets alone.

    They are greedy, sampled and seeded.
    """
    target = CausalLM(tiny("llama"))
    head = HiddenLM(head_of(target, way), target)
    modes: list[dict[str, Any]] = [
        {},
        {"sampler": Sampler(False), "seed": 5},
        {"sampler": Sampler(False), "seed": 6},
    ]
    cases = [
        (i, prompt, mode) for i, prompt in enumerate(PROMPTS) for mode in modes[i % 2 : 2 + i % 2]
    ]
    requests = [Request(prompt, 7 + 5 * i, **mode) for i, prompt, mode in cases]

    def run(requests: abc.Sequence[Request], rows: int) -> list[tuple[list[int], list[int]]]:
        drafter = Decoder(
            target, None, None, WAYS[way], guard=False, head=head, costs=COSTS
        ).engine.drafter
        outputs = decode(target.fresh(), drafter, requests, max_rows=rows)
        assert not drafter.features and not drafter.head.cache.ids  # type: ignore[attr-defined]
        return [(tokens_of(steps), [step.drafted for step in steps]) for steps in outputs]

    for request, (tokens, drafted) in zip(requests, run(requests, 3), strict=True):
        ((alone, sizes),) = run([request], 1)
        assert tokens == alone and (request.sampler.greedy or drafted == sizes)


def test_what_loading_refuses(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    head = random_head(target)
    head.save_pretrained(tmp_path / "head")
    again = load_head(tmp_path / "head", target, "lyanna")
    assert all(map(torch.equal, again.state_dict().values(), head.state_dict().values()))
    for name, model, kind, message in (
        ("head", CausalLM(tiny("qwen3")), "lyanna", "belongs to another target"),
        ("head", target, "eagle", "of the kind 'lyanna'; the method needs 'eagle'"),
        ("nothing", target, "lyanna", r"there is no .*config\.json"),
    ):
        refuses(message, load_head, tmp_path / name, model, kind)
    refuses(
        "needs a head: give one, or train one with `forerun train lyanna`",
        Decoder,
        target,
        method=Lyanna(),
    )
    refuses(
        "of the kind 'eagle'; the method needs 'lyanna'",
        Decoder,
        target,
        method=Lyanna(),
        head=toys("eagle")[1],
    )
    save_quantised(head, tmp_path / "small", {})
    small = load_head(tmp_path / "small", target)
    assert torch.equal(small.hot, head.hot) and small.config.target == head.config.target
    for mine, whole in zip(small.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(
            mine, whole, rtol=0, atol=float(whole.detach().abs().max()) / 200
        )
    head.hot[0] = target.vocab_size
    refuses("hot set that does not fit", load_head, head, target, "lyanna")
    config = tmp_path / "head" / "config.json"
    settings = json.loads(config.read_text())
    older = {
        name: settings[name] for name in set(settings) - {"feature", "fusion"}
    }  # from before there was a choice
    config.write_text(json.dumps(older))
    load_head(tmp_path / "head", target, "lyanna")
    for given, message in (
        (settings | {"known": False}, "no longer supported: train it again"),
        (settings | {"feature": "below"}, "no longer supported: train it again"),
        (settings | {"fusion": "first"}, "no longer supported: train it again"),
        (older | {"widht": 3}, "unknown field 'widht'"),
    ):
        config.write_text(json.dumps(given))
        refuses(message, load_head, tmp_path / "head", target, "lyanna")


def test_hot_sets() -> None:
    tokens, share = hot_set([1, 5, 0, 3, 5], 3)
    assert tokens.tolist() == [1, 4, 3] and share == pytest.approx(13 / 14)
    for size in (0, 6):
        refuses(f"1 to 5 tokens, not {size}", hot_set, [1, 5, 0, 3, 5], size)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        *[("lyanna", {name: 0}, name) for name in ("depth", "width", "nodes", "least")],
        ("lyanna", {"weight": -1}, "weight"),
        ("lyanna", {"reuse": "never"}, "reuse"),
        ("pacer-lyanna", {"reuse": "both"}, "reuse must be off, add or free, not 'both'"),
        *[
            (name, {"block": 0}, "block must be an integer of at least 1")
            for name in ("pacer-lyanna", "pacer-eagle")
        ],
    ],
)
def test_settings_are_checked(name: str, wrong: dict[str, Any], message: str) -> None:
    refuses(message, method, name, **wrong)


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_head_alone_names_its_method(kind: str, tmp_path: Path) -> None:
    model = tiny("llama")
    save_models(tmp_path, target=model)
    save_quantised(random_head(CausalLM(model), kind=kind), tmp_path / "head", {})
    decoder = forerun.load(tmp_path / "target", head=tmp_path / "head")
    assert decoder.method.name == kind and decoder.head is not None
    assert forerun.load(tmp_path / "target", head=tmp_path / "head", method="suffix").head is None
    refuses("nowhere", forerun.load, tmp_path / "target", head=tmp_path / "nowhere")
