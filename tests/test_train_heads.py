"""Training of heads over hidden states: it learns, goes on from a trained head, and refuses what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import judge, losses, make_run, save_pair

from forerun import Decoder
from forerun.api.layers import load_head
from forerun.heads.heads import HiddenDrafter
from forerun.methods import method
from forerun.train.head import HeadRecipe, train_head
from forerun.train.run import Run

RECIPE = HeadRecipe(sequences=32, prompt=8, output=24, steps=40, batch=4, unroll=3, lr=1e-2, held=0.2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


def read(run: Run, kind: str = "lyanna") -> HiddenDrafter:
    return load_head(run.out, judge(), kind)


def same(one: HiddenDrafter, other: HiddenDrafter) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(
    "form", [{}, {"rank": 0}, {"kind": "eagle"}, {"kind": "eagle", "rank": 0, "layers": 2}], ids=str
)
def test_a_head_learns_and_decodes(form: dict[str, Any], target: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, **form)
    run = make_run(target, tmp_path / "head")
    found = train_head(run, recipe)
    assert losses(run)[-1] < losses(run)[0]
    assert 0 < found["coverage"] <= 1 and found["survival"][0] >= found["survival"][-1]
    made, model = read(run, recipe.kind), judge().model
    assert made.config.hot_size == round(0.25 * made.config.vocab_size) and len(made.config.curves) == 3
    assert hasattr(made, "embed") == (recipe.kind == "lyanna" and recipe.rank > 0)
    assert (run.out / "README.md").read_text().count('"sequences": 32') == 1
    decoder = Decoder(model, None, None, method(recipe.kind), guard=False, head=made)
    plain = Decoder(model, None)
    for prompt in ([5, 6, 7, 8], [9]):
        done, wanted = (each.generate(prompt, max_new_tokens=20, ignore_eos=True) for each in (decoder, plain))
        assert done.tokens == wanted.tokens and done.stats.drafted > 0


@pytest.mark.parametrize("rank", [0, 8])
def test_heads_of_both_kinds_are_of_one_size(rank: int, target: str, tmp_path: Path) -> None:
    recipe = HeadRecipe(sequences=8, prompt=8, output=24, steps=1, unroll=2, held=0.5, rank=rank)
    work = tmp_path / "work"
    sizes = [
        train_head(make_run(target, tmp_path / kind, work=work), replace(recipe, kind=kind))["parameters"]
        for kind in ("lyanna", "eagle")
    ]
    assert max(sizes) - min(sizes) <= 0.02 * min(sizes)  # whole rows of an MLP


def test_training_refuses_at_once(target: str, tmp_path: Path) -> None:
    for changes, message in (
        ({"kind": "medusa"}, "kind must be one of lyanna, eagle, not 'medusa'"),
        ({"rank": -1}, "rank must be at least 0, not -1"),
        ({"hot": 0.0}, "hot must be above 0 and at most 1, not 0.0"),
        ({"held": 0.9}, "held must be above 0 and at most 0.5, not 0.9"),
        ({"unroll": 24}, "unroll must be 1 to 23, less than the output, not 24"),
        ({"prompt": 400}, "a window is 424 tokens, more than the target's context of 256"),
    ):
        with pytest.raises(ValueError, match=message):
            train_head(make_run(target, tmp_path / "out"), replace(RECIPE, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_training_goes_on_from_a_head(kind: str, target: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, sequences=128, steps=4, unroll=2, held=0.5, kind=kind, rank=8, hot=0.5)
    further = replace(recipe, steps=3, sequences=192)

    def run(out: str, recipe: HeadRecipe, start: str | None = None) -> HiddenDrafter:
        each = make_run(target, tmp_path / out, work=tmp_path / "work")
        train_head(each, recipe, tmp_path / start if start is not None else None)
        return read(each, recipe.kind)

    turned = run("counted", recipe)
    turned.hot.copy_(turned.hot.flip(0))  # no longer what the output's own counts give
    turned.save_pretrained(tmp_path / "first")
    assert same(turned, run("still", replace(further, lr=0.0), "first"))
    after = run("further", further, "first")
    assert torch.equal(turned.hot, after.hot) and not same(turned, after)
    assert after.config.recipe["start"]["steps"] == recipe.steps
    assert same(after, run("further", further, "first"))
    for out, changed, start, message in (
        ("further", further, "counted", "other settings"),
        ("further", further, None, "other settings"),
        ("counted", replace(recipe, unroll=3), None, "other settings"),
        ("other", replace(further, rank=40), "first", "first' is of another form; give it the same layers"),
        ("other", replace(further, kind="eagle" if kind != "eagle" else "lyanna"), "first", f"of the kind '{kind}'"),
        ("other", further, "nothing", "there is no"),
        ("first", further, "first", "start and out are one folder"),
    ):
        with pytest.raises(ValueError, match=message):
            run(out, changed, start)
    assert not (tmp_path / "other").exists()
    assert len(list((tmp_path / "work/own-output").glob("*.safetensors"))) == 3  # more of it, not all of it again
