"""Heads that draft from hidden states: their arithmetic, what they say, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import p_value, random_head, tiny, tiny_tokenizer

from forerun import Decoder
from forerun.costs import Costs
from forerun.decode import Generation, decode
from forerun.draft import Draft
from forerun.drafters.beams import grow
from forerun.drafters.lyanna import Budget, LyannaDrafter, Prices
from forerun.loading import load_head
from forerun.methods import method
from forerun.methods.hidden import Eagle, Lyanna, Medusa, PacerLyanna
from forerun.model import CausalLM
from forerun.nn.hidden import HiddenDrafter, hot_set
from forerun.runtime.hidden import HiddenLM, head_rows
from forerun.runtime.lean import lean_forward
from forerun.runtime.recorded import Recorded
from forerun.train.hidden import Recipe, judged, train_hidden
from forerun.train.hidden import features_of as trained_on
from forerun.zoo.quantise import save_quantised

EVEN = torch.arange(3)
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]


def features_of(target: CausalLM, tokens: list[int]) -> Tensor:
    with torch.no_grad(), target.hearing():
        target.model(input_ids=torch.tensor([tokens]))
    assert target.hidden is not None
    return target.hidden[0]


@pytest.mark.parametrize("fixed_shapes", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_drafting_goes_on_as_it_was_trained(layers: int, known: bool, fixed_shapes: bool) -> None:
    """States behind every place of a text, drafted from a cache, are those of the unrolled training pass."""
    target = CausalLM(tiny("llama"))
    forward = lean_forward(target.model)
    assert forward is not None
    target.recorded = Recorded(forward) if fixed_shapes else None
    head = random_head(target, num_hidden_layers=layers, known=known)
    tokens = [5, 6, 7, 8, 9, 1, 2, 3]
    features = features_of(target, tokens)
    with torch.no_grad():
        embedded = target.model.get_input_embeddings()(torch.tensor([tokens]))
        unrolled = head.unrolled(features[None], embedded, torch.tensor([tokens]), 4)
    fast = HiddenLM(head, target)
    fast.start(2)
    for end in range(1, 5):
        state = fast.extend([features[end - 1 : end], features[:0]], [[tokens[end]], []] if known else None)
        lengths = list(fast.cache.lengths)
        assert lengths == [end, 0]
        for k, ahead in enumerate([state, *fast.roll(state, 3, [0])], 1):
            torch.testing.assert_close(ahead[0], unrolled[k - 1][0][0, end - 1], rtol=1e-4, atol=1e-5)
            said = fast.information(torch.tensor(tokens[end - 1 + k]))
            torch.testing.assert_close(unrolled[k - 1][1][0, end - 1], said, rtol=1e-4, atol=1e-5)
        assert fast.cache.lengths == [end + 3, 0]
        fast.crop(lengths)
    assert bool(fast.recorded and fast.recorded.shapes) == fixed_shapes


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
    table = HiddenLM(head, target).information(tokens)
    monkeypatch.setattr("forerun.runtime.hidden.LARGEST_TABLE", 0)
    torch.testing.assert_close(HiddenLM(head, target).information(tokens), table)


WAYS = {
    "chain": Lyanna(reuse="off"),
    "free": Lyanna(depth=5, reuse="free", least=1),
    "plain, free": Lyanna(depth=5, reuse="free", least=1),
    "add": Lyanna(depth=5, reuse="add"),
    "branch": Lyanna(depth=5, reuse="branch"),
    "tree": Lyanna(width=3, nodes=7, reuse="off"),
    "tree, free": Lyanna(depth=5, width=2, nodes=9, reuse="free", least=1),
    "tree, branch": Lyanna(depth=5, width=2, nodes=9, reuse="branch"),
    "paced": PacerLyanna(depth=5, width=2, reuse="free", least=1),
    "paced chain": PacerLyanna(reuse="add"),
    "eagle": Eagle(),
    "eagle, tree": Eagle(depth=3, width=2, nodes=7),
    "medusa": Medusa(),
    "medusa, tree": Medusa(width=3, nodes=9),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_equality_on_real_models(architecture: str, way: str) -> None:
    target = tiny(architecture)
    chosen = WAYS[way]
    head = random_head(CausalLM(target), kind=str(chosen.head), known="plain" not in way)
    decoder = Decoder(target, None, None, chosen, guard=False, head=head)
    decoder.costs = Costs({1: 1.0, 16: 1.5}, {}, head={1: 0.001})
    for prompts in (PROMPTS[:2], PROMPTS, PROMPTS * 4):
        plain = Decoder(target, method=method("ar")).generate(prompts, max_new_tokens=24, ignore_eos=True)
        done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == [row.tokens for row in plain]
        assert sum(row.stats.drafted for row in done) > 0
    plain = Decoder(target, method=method("ar")).generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    assert decoder.generate(PROMPTS[1], max_new_tokens=24, ignore_eos=True).tokens == plain[1].tokens


def test_reused_logits_are_those_of_the_earlier_step() -> None:
    target = tiny("llama")
    seen: list[tuple[int, Tensor, str]] = []

    class Watched(LyannaDrafter):
        def observe(self, seqs: Any, drafts: list[Draft], verdicts: Any, hidden: Tensor | None) -> None:
            (drawn,), (passed,) = self.drawn, self.passed
            length = len(seqs[0].tokens) - verdicts[0].accepted - 1  # of the text that the draft stood behind
            if passed < drawn:
                seen.append((length, self.logits[0, passed:drawn].clone(), drafts[0].origins[0]))
            super().observe(seqs, drafts, verdicts, hidden)

    head = HiddenLM(random_head(CausalLM(target)), CausalLM(target))
    drafter = Watched(head, 5, 1, 5, "free", least=1)
    seq = Generation([5, 6, 7, 5, 6], 60)
    for _ in decode(CausalLM(target), drafter, [seq]):
        pass
    made, reused = None, 0
    for length, own, origin in seen:
        if origin == "draft":
            made = (length, own)
        else:
            assert made is not None
            torch.testing.assert_close(own, made[1][length - made[0] :])
            reused += 1
    assert reused > 3
    # And those of the earlier step are what the head says from the text as it was then.
    length, own, _ = next(each for each in seen if each[2] == "draft" and each[0] > 10)
    fresh = head.fresh()
    fresh.start(1)
    features = features_of(CausalLM(target), seq.tokens[: length - 1])
    state = fresh.extend([features], [seq.tokens[1:length]])
    states = torch.cat([state, *fresh.roll(state, 4, [0])])
    torch.testing.assert_close(own, head.logits(states), rtol=1e-3, atol=1e-4)


def test_a_tree_holds_the_best_paths() -> None:
    """Against an enumeration of all paths, where the beams are wide enough to miss none."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, hot=4), target)
    table, hot = head.information(torch.arange(target.vocab_size)) * 3, head.hot.tolist()
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def law(k: int, tokens: Tensor, at: Tensor) -> Tensor:
        return logits[:, k, None] + table[tokens]

    drafts = grow([5, 7], law, head.hot, [3, 2], 16, 9)
    for root, row, draft, limit in zip((5, 7), logits, drafts, (3, 2), strict=True):
        values: dict[tuple[int, ...], float] = {(root,): 0.0}
        for depth in range(limit):
            for path in [path for path in values if len(path) == depth + 1]:
                said = (row[depth] + table[path[-1]]).log_softmax(-1)
                values |= {(*path, hot[i]): values[path] + float(said[i]) for i in range(4)}
        best = sorted((path for path in values if len(path) > 1), key=lambda path: -values[path])[:9]
        assert {tuple(draft.tokens[i] for i in draft.path(node)) for node in range(1, len(draft))} == set(best)
    chains = grow([5, 7], law, head.hot, [3, 2], 1, 3)
    assert all(chain.is_chain for chain in chains) and [chain.drafted for chain in chains] == [3, 2]
    assert [draft.drafted for draft in grow([5, 7], law, head.hot, [0, 0], 2, 3)] == [0, 0]


def test_certain_paths_hold_their_ancestors() -> None:
    """Where all probabilities are 1, no child is taken for its parent."""
    certain = torch.full((1, 4, 3), -1e9)
    certain[..., 1] = 0.0
    (draft,) = grow([9], lambda k, tokens, at: certain[:, k, None].expand(-1, tokens.shape[1], -1), EVEN, [4], 3, 4)
    assert draft.tokens[:1] == [9] and max(draft.depths) == 4 and draft.is_chain


def test_an_eagles_beams_are_what_it_says_of_their_paths() -> None:
    """Each beam's state against a chain of its own path, rows of different lengths together."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, kind="eagle"), target)
    texts = [[5, 6, 7, 8, 9, 1], [3, 4, 5]]
    features = [features_of(target, text)[:-1] for text in texts]
    head.start(2)
    first = head.extend(features, [text[1:] for text in texts])
    lengths = list(head.cache.lengths)
    beams = torch.tensor([[7, 8], [9, 2]])
    at = torch.tensor([[1, 0], [0, 0]])
    rows, eye = torch.arange(2)[:, None], torch.eye(2, dtype=torch.bool).expand(2, -1, -1)
    one = head.branch(first[:, None].expand(-1, 2, -1), beams, 0, eye)
    more = torch.tensor([[1, 3], [4, 6]])
    two = head.branch(one[rows, at], more, 1, torch.cat([eye[rows, at], eye], -1))
    head.crop(lengths)
    for row in range(2):
        for beam in range(2):
            parent = int(at[row, beam])
            alone = head.fresh()
            alone.start(1)
            state = alone.extend([features[row]], [texts[row][1:]])
            for token in (int(beams[row, parent]), int(more[row, beam])):
                state = alone.extend([state], [[token]])
            torch.testing.assert_close(two[row, beam], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "block", "most", "least"), [(2, 1, 12, 1), (2, 4, 12, 4), (1, 1, 6, 1), (1, 4, 6, 4)]
)
def test_a_budget_takes_what_its_costs_allow(width: int, block: int, most: int, least: int) -> None:
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target), target)

    def drafted(costs: Costs, depth: int = 6) -> list[Draft]:
        drafter = LyannaDrafter(head.fresh(), depth, width, 12 if width > 1 else depth, "off", costs=costs, block=block)
        seqs = [Generation(list(range(2, 12)), 60) for _ in range(2)]
        hidden = torch.stack([features_of(target, seq.tokens[:-1]) for seq in seqs])
        drafter.start(seqs, hidden)
        return drafter.propose(seqs)

    free = drafted(Costs({1: 1.0, 100: 1.0}, {}, head={1: 0.0}))
    assert [draft.drafted for draft in free.drafts] == [most, most]
    dear = drafted(Costs({1: 1.0, 100: 1.0}, {}, head={1: 1e6}))
    assert all(max(draft.depths) <= least for draft in dear.drafts) and dear.forwards == least
    tight = drafted(Costs({1: 1.0, 2: 1.0, 100: 1e6}, {}, head={1: 0.0}))
    assert all(draft.drafted <= 1 for draft in tight.drafts)


def test_what_loading_refuses(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    head = random_head(target)
    head.save_pretrained(tmp_path / "head")
    again, first = (HiddenLM(each, target) for each in (load_head(tmp_path / "head", target, "lyanna"), head))
    assert torch.equal(again.hot, first.hot)
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for each in (again, first):
        each.start(1)
    assert torch.equal(again.extend([states], [[3] * 7]), first.extend([states], [[3] * 7]))
    with pytest.raises(ValueError, match="belongs to another target"):
        load_head(tmp_path / "head", CausalLM(tiny("qwen3")), "lyanna")
    with pytest.raises(ValueError, match="of the kind 'lyanna'; the method needs 'eagle'"):
        load_head(tmp_path / "head", target, "eagle")
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        load_head(tmp_path / "nothing", target, "lyanna")
    with pytest.raises(ValueError, match="needs a head: train one with `forerun train lyanna`"):
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
    config.write_text(json.dumps(json.loads(config.read_text()) | {"widht": 3}))
    with pytest.raises(ValueError, match="unknown field 'widht'"):
        load_head(tmp_path / "head", target, "lyanna")


def test_hot_sets() -> None:
    tokens, share = hot_set([1, 5, 0, 3, 5], 3)
    assert tokens.tolist() == [1, 4, 3] and share == pytest.approx(13 / 14)
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"1 to 5 tokens, not {size}"):
            hot_set([1, 5, 0, 3, 5], size)


def test_settings_are_checked() -> None:
    wrong: dict[str, Any] = {"depth": 0, "width": 0, "nodes": 0, "least": 0, "weight": -1, "reuse": "never"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            method("lyanna", **{name: value})
    with pytest.raises(ValueError, match="block must be an integer of at least 1"):
        method("pacer-lyanna", block=0)
    target = CausalLM(tiny("llama"))
    with pytest.raises(ValueError, match="of the kind 'medusa'; the method needs 'lyanna'"):
        Decoder(target, method=Lyanna(), head=HiddenLM(random_head(target, kind="medusa"), target))


def trainable(folder: Path) -> tuple[str, list[str]]:
    """A target and text to train a head on."""
    tokenizer = tiny_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.txt").write_text("def add(a, b): return a + b\nthe cat sat on the mat\n" * 90)
    return str(folder / "target"), [str(folder / "text.txt")]


@pytest.mark.parametrize("kind", ["lyanna", "eagle", "medusa"])
def test_training_learns_and_resumes(kind: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = Recipe(sequences=32, prompt=8, output=24, steps=40, batch=4, unroll=3, lr=1e-2, held=0.2)
    said: list[str] = []

    def run(out: str, steps: int) -> dict[str, Any]:
        return train_hidden(
            *what,
            tmp_path / out,
            replace(recipe, steps=steps),
            kind,
            work=tmp_path / "work",
            say=said.append,
        )

    found = run("whole", 40)
    log = [json.loads(line) for line in (tmp_path / "work/training/whole/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert 0 < found["coverage"] <= 1 and found["survival"][0] >= found["survival"][-1]
    judge = CausalLM(tiny("llama", vocab=len(tiny_tokenizer())))
    head = load_head(tmp_path / "whole", judge, kind)
    assert head.config.hot_size == round(0.25 * judge.vocab_size)
    checkpoint = tmp_path / "work/training/whole/checkpoint.safetensors"
    before = {name: value.clone() for name, value in head.state_dict().items()}
    (tmp_path / "work/training/again").mkdir()
    for name in ("config.json", "settings"):
        source = tmp_path / "work/training/whole" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / "work/training/again" / name)
    shutil.copy(checkpoint, tmp_path / "work/training/again")
    run("again", 40)
    assert any("resuming again at step 40" in line for line in said)
    for name, value in load_head(tmp_path / "again", judge, kind).state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("model", ["llama", "capped"])
def test_features_are_remembered_where_they_lead_to_the_logits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = CausalLM(tiny("llama"))
    windows = torch.randint(judge.vocab_size, (6, 9), generator=torch.Generator().manual_seed(0))
    asked: list[int] = []
    forward = judge.model.forward

    def counted(input_ids: Tensor, **more: Any) -> Any:
        asked.append(len(input_ids))
        found = forward(input_ids=input_ids, **more)
        if model == "capped":
            found.logits = found.logits.tanh()
        return found

    monkeypatch.setattr(judge.model, "forward", counted)
    recall = judged(judge, windows)
    asked.clear()
    for rows in ([3, 1, 3], [1, 4], [3, 4, 1]):
        features, logits = recall(torch.tensor(rows))
        wanted = trained_on(judge, windows[rows])
        torch.testing.assert_close(features, wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logits, wanted[1], rtol=3e-2, atol=3e-2)
        asked.pop()  # that of what is wanted
    assert asked == ([2, 1] if model == "llama" else [3, 2, 3])


@pytest.mark.parametrize("way", WAYS)
def test_drawn_drafts_keep_the_law(way: str) -> None:
    """Point masses from any head: the first tokens' joint law is the target's, by chi-square."""
    target = tiny("llama", vocab=6)
    model = CausalLM(target)
    prompt = [1, 2, 3, 4, 5, 0, 1, 2]
    chosen = WAYS[way]
    head = random_head(model, hot=4, kind=str(chosen.head), known="plain" not in way)
    decoder = Decoder(target, None, None, chosen, guard=False, head=head)
    decoder.costs = Costs({1: 1.0, 16: 1.1}, {}, head={1: 0.001})
    rows = decoder.generate([prompt] * 1500, max_new_tokens=4, temperature=1.0, seed=0, ignore_eos=True)
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        pairs = target(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, -1].softmax(-1)
    assert sum(row.stats.drafted for row in rows) > 1500
    assert p_value([row.tokens[:2] for row in rows], first[:, None] * pairs) > 1e-4


@pytest.mark.parametrize("way", ["free", "add", "branch", "paced", "paced chain", "tree, free"])
def test_drawn_rows_do_not_depend_on_their_neighbours(way: str) -> None:
    """One row under its seed, alone and beside others of other lengths that end sooner."""
    target = tiny("llama")
    head = random_head(CausalLM(target))
    decoder = Decoder(target, None, None, WAYS[way], guard=False, head=head)
    for seed in range(6):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 16, "ignore_eos": True}
        alone = decoder.generate(PROMPTS[0], **options)
        beside = decoder.generate([PROMPTS[0], *PROMPTS[1:]], **options)[0]
        assert beside.tokens == alone.tokens
        assert [step.drafted for step in beside.steps] == [step.drafted for step in alone.steps]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unroll": 24}, "unroll must be 1 to 23, less than the output, not 24"),
        ({"held": 0.9}, "held must be above 0 and at most 0.5, not 0.9"),
        ({"loss": "mean"}, "loss must be one of law, regression, not 'mean'"),
        ({"prompt": 400}, "more than the target's context of"),
    ],
)
def test_training_refuses_at_once(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = replace(Recipe(sequences=8, prompt=8, output=24, steps=2), **changes)
    with pytest.raises(ValueError, match=message):
        train_hidden(*what, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_another_loss_is_another_run(tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = Recipe(sequences=8, prompt=8, output=24, steps=2, unroll=2, held=0.5)
    for each in (recipe, recipe):
        train_hidden(*what, tmp_path / "out", each, say=lambda line: None)
    with pytest.raises(ValueError, match="other settings"):
        train_hidden(*what, tmp_path / "out", replace(recipe, unroll=3))


@pytest.mark.parametrize("kind", ["lyanna", "eagle", "medusa"])
def test_training_goes_on_from_a_head(kind: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = Recipe(sequences=128, prompt=8, output=24, steps=4, unroll=2, held=0.5)
    further = replace(recipe, steps=3, sequences=192)

    def run(out: str, recipe: Recipe, start: str | None = None, **form: Any) -> dict[str, Tensor]:
        shape: dict[str, Any] = {"kind": kind, "rank": 8, "hot": 0.5, "work": tmp_path / "work"} | form
        folder = tmp_path / start if start is not None else None
        train_hidden(*what, tmp_path / out, recipe, start=folder, say=lambda line: None, **shape)
        return read(out).state_dict()

    def read(out: str) -> HiddenDrafter:
        return load_head(tmp_path / out, CausalLM(tiny("llama", vocab=len(tiny_tokenizer()))), kind)

    run("counted", recipe)
    turned = read("counted")
    turned.hot.copy_(turned.hot.flip(0))  # no longer what the output's own counts give
    turned.save_pretrained(tmp_path / "first")
    first, still = turned.state_dict(), run("still", replace(further, lr=0.0), "first")
    assert all(torch.equal(value, still[name]) for name, value in first.items())
    after = run("further", further, "first")
    assert torch.equal(first["hot"], after["hot"])
    assert not all(torch.equal(value, after[name]) for name, value in first.items())
    assert read("further").config.recipe["start"]["steps"] == recipe.steps
    again = run("further", further, "first")
    assert all(torch.equal(value, again[name]) for name, value in after.items())
    for other in ("counted", None):
        with pytest.raises(ValueError, match="other settings"):
            run("further", further, other)
    with pytest.raises(ValueError, match="first' has rank 8, not 40"):
        run("other", further, "first", rank=40)
    with pytest.raises(ValueError, match=f"first' has kind {kind}, not "):
        run("other", further, "first", kind="eagle" if kind != "eagle" else "lyanna")
    with pytest.raises(ValueError, match="there is no"):
        run("other", further, "nothing")
    with pytest.raises(ValueError, match="start and out are one folder"):
        run("first", further, "first")
    assert not (tmp_path / "other").exists()
    assert len(list((tmp_path / "work/own-output").glob("*.safetensors"))) == 3  # more of it, not all of it again


@pytest.mark.parametrize("together", [True, False])
def test_a_budget_is_the_best_that_costs_allow(together: bool) -> None:
    """Against all sizes, and against going on with the usual tokens, reckoned by hand."""
    mean, nodes, block = 0.7, 6, 2
    costs = Costs({1: 5.0, 4: 5.5, 30: 9.0}, {}, head={1: 0.15, 3: 0.2})
    limits = [6, 3, 6]
    chances = [[0.9, 0.8, 0.9, 0.2, 0.9, 0.9], [0.95, 0.9, 0.9], [0.5, 0.3, 0.9, 0.9, 0.9, 0.9]]
    count = 3 if together else 1
    prices = Prices(costs, count, nodes)
    budget = Budget(prices, [[0.0, 1.0, mean]] * nodes, block, [0, 1, 2], limits, [0, 0, 0], together)

    def rate(survival: list[list[float]], size: int, states: int) -> float:
        spent = states * costs.heading(count) + costs.verify(count * (size + 1))
        return (len(survival) + sum(sum(own[:size]) for own in survival)) / spent

    for k in (0, 2, 4):
        before = list(budget.deep)
        going = budget.further(k, [[log(chance) for chance in (own + [0.1] * 6)[k : k + block]] for own in chances])
        seen = [np.cumprod(own[: min(k + block, limit)]).tolist() for own, limit in zip(chances, limits, strict=True)]
        for rows in [[0, 1, 2]] if together else [[0], [1], [2]]:
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
