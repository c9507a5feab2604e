"""Training of heads over hidden states: it learns, goes on where it was stopped, and refuses what it cannot do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import tiny, tiny_tokenizer

from forerun import Decoder
from forerun.loading import load_head
from forerun.methods import method
from forerun.model import CausalLM
from forerun.nn.heads import HiddenDrafter
from forerun.train.heads import HeadRecipe, train_head
from forerun.train.judged import features_of, judged
from forerun.train.texts import of_windows


def trainable(folder: Path) -> tuple[str, list[str]]:
    """A target and text to train a head on."""
    tokenizer = tiny_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.txt").write_text("def add(a, b): return a + b\nthe cat sat on the mat\n" * 90)
    return str(folder / "target"), [str(folder / "text.txt")]


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_training_learns_and_resumes(kind: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = HeadRecipe(sequences=32, prompt=8, output=24, steps=40, batch=4, unroll=3, lr=1e-2, held=0.2)
    lines: list[str] = []

    def run(out: str, steps: int) -> dict[str, Any]:
        return train_head(
            *what,
            tmp_path / out,
            replace(recipe, steps=steps),
            kind,
            work=tmp_path / "work",
            say=lines.append,
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
    assert any("resuming again at step 40" in line for line in lines)
    for name, value in load_head(tmp_path / "again", judge, kind).state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("feature", ["head", "below"])
@pytest.mark.parametrize("model", ["llama", "capped"])
def test_features_are_remembered_where_they_lead_to_the_logits(
    model: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    recall = judged(judge, of_windows(windows.numpy()), feature)
    asked.clear()
    for rows in ([3, 1, 3], [1, 4], [3, 4, 1]):
        known, wanted = recall(torch.tensor(rows)), features_of(judge, windows[rows], feature)
        torch.testing.assert_close(known.features, wanted.features, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(known.states, wanted.states, rtol=1e-2, atol=1e-2)
        every = torch.arange(known.states.shape[0] * known.states.shape[1])
        torch.testing.assert_close(
            known.law(every).probabilities, wanted.law(every).probabilities, rtol=5e-2, atol=3e-2
        )
        assert torch.equal(known.features, known.states) == (feature == "head")
        asked.pop()  # that of what is wanted
    assert asked == ([2, 1] if model == "llama" else [3, 2, 3])


@pytest.mark.parametrize("loss", ["law", "regression"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("lyanna", {"feature": "below", "fusion": "first"}),
        ("lyanna", {"feature": "below", "rank": 0}),
        ("lyanna", {"known": False, "fusion": "first"}),
        ("eagle", {"feature": "below", "rank": 0}),
    ],
)
def test_heads_of_other_forms_learn_and_decode(kind: str, form: dict[str, Any], loss: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = HeadRecipe(sequences=32, prompt=8, output=24, steps=40, batch=4, unroll=3, lr=1e-2, held=0.2, loss=loss)
    train_head(*what, tmp_path / "head", recipe, kind, say=lambda line: None, **form)
    log = [json.loads(line) for line in (tmp_path / "head/work/training/head/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    target = tiny("llama", vocab=len(tiny_tokenizer()))
    head = load_head(tmp_path / "head", CausalLM(target), kind)
    assert all(getattr(head.config, name) == value for name, value in form.items())
    # The target's states are taken at their own scale, and this is trained.
    assert hasattr(head, "enter") == (form.get("feature") == "below")
    if hasattr(head, "enter"):
        assert not torch.equal(head.enter.weight, torch.ones_like(head.enter.weight))
    assert hasattr(head, "embed") == (kind == "lyanna" and form.get("rank") != 0)
    decoder, plain = Decoder(target, None, None, method(kind), guard=False, head=head), Decoder(target, None)
    for prompt in ([5, 6, 7, 8], [9]):
        found, wanted = (each.generate(prompt, max_new_tokens=20, ignore_eos=True) for each in (decoder, plain))
        assert found.tokens == wanted.tokens and found.stats.drafted > 0


@pytest.mark.parametrize("rank", [0, 8])
def test_heads_of_all_kinds_are_of_one_size(rank: int, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = HeadRecipe(sequences=8, prompt=8, output=24, steps=1, unroll=2, held=0.5)
    sizes = [
        train_head(*what, tmp_path / kind, recipe, kind, rank=rank, feature="below", say=lambda line: None)[
            "parameters"
        ]
        for kind in ("lyanna", "eagle")
    ]
    assert max(sizes) - min(sizes) <= 0.02 * min(sizes)  # whole rows of an MLP


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"feature": "above"}, "feature must be one of head, below, not 'above'"),
        ({"fusion": "never"}, "fusion must be one of every, first, not 'never'"),
        ({"fusion": "first", "kind": "eagle"}, "fusion first is for the kind lyanna"),
        ({"rank": -1}, "rank must be at least 0, not -1"),
    ],
)
def test_forms_that_there_are_not(form: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train_head("nothing", [], tmp_path / "out", HeadRecipe(), **form)


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
    recipe = replace(HeadRecipe(sequences=8, prompt=8, output=24, steps=2), **changes)
    with pytest.raises(ValueError, match=message):
        train_head(*what, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_another_loss_is_another_run(tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = HeadRecipe(sequences=8, prompt=8, output=24, steps=2, unroll=2, held=0.5)
    for each in (recipe, recipe):
        train_head(*what, tmp_path / "out", each, say=lambda line: None)
    with pytest.raises(ValueError, match="other settings"):
        train_head(*what, tmp_path / "out", replace(recipe, unroll=3))


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_training_goes_on_from_a_head(kind: str, tmp_path: Path) -> None:
    what = trainable(tmp_path)
    recipe = HeadRecipe(sequences=128, prompt=8, output=24, steps=4, unroll=2, held=0.5)
    further = replace(recipe, steps=3, sequences=192)

    def run(out: str, recipe: HeadRecipe, start: str | None = None, **form: Any) -> dict[str, Tensor]:
        shape: dict[str, Any] = {"kind": kind, "rank": 8, "hot": 0.5, "work": tmp_path / "work"} | form
        folder = tmp_path / start if start is not None else None
        train_head(*what, tmp_path / out, recipe, start=folder, say=lambda line: None, **shape)
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
    for name, there, other in (("rank", "8", 40), ("feature", "head", "below")):
        with pytest.raises(ValueError, match=f"first' has {name} {there}, not {other}"):
            run("other", further, "first", **{name: other})
    with pytest.raises(ValueError, match=f"first' has kind {kind}, not "):
        run("other", further, "first", kind="eagle" if kind != "eagle" else "lyanna")
    with pytest.raises(ValueError, match="there is no"):
        run("other", further, "nothing")
    with pytest.raises(ValueError, match="start and out are one folder"):
        run("first", further, "first")
    assert not (tmp_path / "other").exists()
    assert len(list((tmp_path / "work/own-output").glob("*.safetensors"))) == 3  # more of it, not all of it again
