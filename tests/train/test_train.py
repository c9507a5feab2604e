"""Training: exact resume, texts, own output and its labels, drafts and heads for any target."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import forerun
from forerun import Decoder
from forerun.api.layers import load_head
from forerun.api.loading import load_tokenizer
from forerun.heads.heads import HiddenDrafter
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import capture_hidden_states
from forerun.train import loop
from forerun.train.draft import DraftRecipe, distillation_loss, train_draft
from forerun.train.head import HeadRecipe, train_head
from forerun.train.labels import TOP, cross_entropy, in_parts, label, top_probs
from forerun.train.loop import TrainConfig, train
from forerun.train.run import OwnOutput
from forerun.train.texts import Texts, joined, of_windows, read_texts, split_windows, tokenize
from tests.support import commands
from tests.support.recipes import TEXT, judge, losses, make_run, save_pair
from tests.support.serving import until
from tests.support.toys import refuses, tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


def random_windows(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(60, size=(rows, length))


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    config = TrainConfig(steps=12, warmup=2, lr=1e-2, save_every=4, tokens=5)

    def run(
        out: str, seed: int = 0, stop_at: int | None = None, factor: float = 1.0
    ) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Embedding(2, 1), nn.Linear(4, 1))
        lines = list[str]()

        def batch(step: int) -> Tensor:
            if step == stop_at:
                raise InterruptedError
            return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

        def loss(x: Tensor) -> Tensor:
            return (model[2](model[0](x)) + model[1](torch.tensor(1)) - factor).square().mean()

        train(model, loss, batch, lambda: 0.0, config, tmp_path / out, lines.append)
        return list(model.parameters()), lines

    straight, _ = run("straight")
    with pytest.raises(InterruptedError):
        run("broken", stop_at=10)
    resumed, lines = run(
        "broken", seed=5
    )  # what it starts from must not matter: the checkpoint holds everything
    assert "resuming broken at step 8 of 12" in lines[0] and re.match(
        r"broken step 10/12 loss .* left$", lines[1]
    )
    assert re.search(r"step 12/12 loss .* tokens/s, 0 s left", lines[-1])
    assert all(map(torch.equal, straight, resumed)) and not list(tmp_path.rglob("*.tmp"))
    refuses(
        "the loss of step 1 is nan: lower the learning rate", run, "no number", factor=torch.nan
    )


def test_products_are_in_the_faster_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without units for bfloat16 emulate it."""
    one = torch.ones(2, 2)
    cpu = torch.device("cpu")
    for seconds, wanted in ((2.0, torch.float32), (0.5, torch.bfloat16)):
        times = {torch.bfloat16: seconds, torch.float32: 1.0}
        monkeypatch.setattr(loop, "_seconds_of_product", times.__getitem__)
        loop.product_dtype.cache_clear()
        with loop.mixed_precision(cpu):
            assert (one @ one).dtype == loop.product_dtype("cpu") == wanted
    monkeypatch.undo()
    loop.product_dtype.cache_clear()
    assert (
        loop.product_dtype("cuda") == torch.bfloat16 and loop.product_dtype("cpu").is_floating_point
    )


def test_read_texts(tmp_path: Path) -> None:
    def read(path: Path) -> list[str]:
        return list(read_texts([str(path)]))

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "two"}\n\n{"text": "thr\u2028ee"}\n', encoding="utf-8"
    )
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert read(tmp_path) == ["one", "two", "thr\u2028ee"]
    (tmp_path / "d.jsonl").write_text('{"prompt": "two"}\n')
    for name, message in (
        ("c.bin", "not UTF-8"),
        ("nothing.txt", "cannot read"),
        ("d.jsonl", r"d\.jsonl line 1"),
    ):
        refuses(message, read, tmp_path / name)
    refuses("the data holds no text", tokenize, tiny_tokenizer(), [])


def test_windows_for_validation_stay_when_there_are_more() -> None:
    windows = random_windows(20, 6)
    few, more = (split_windows(windows[:count], 0.2, 0, 3) for count in (10, 20))
    assert [len(part) for part in (*few, *more)] == [8, 2, 16, 4]
    assert torch.equal(few[1].tokens, more[1].tokens[:2]) and torch.equal(
        few[0].tokens, more[0].tokens[:8]
    )
    assert few[0].counted().all() and few[1].counted().sum() == 2 * 3


def test_own_output_is_the_targets_and_is_not_made_twice(tmp_path: Path) -> None:
    model = tiny("llama").eval()
    stream = random_windows(1, 400)[0]
    given: dict[str, Any] = {"length": 24, "prompts": (3, 6), "temperatures": (0.0, 0.8)}
    run = make_run(str(tmp_path / "target"), tmp_path)

    def make(sequences: int) -> np.ndarray:
        output = OwnOutput(sequences, **given)
        return np.concatenate(run.own_output(CausalLM(model), stream, output))

    windows = make(8)
    assert windows.shape == (8, 24)
    for row in windows[:4]:  # greedy
        ids = torch.tensor(row[None, :3].astype(np.int64))
        alone = model.generate(
            ids, do_sample=False, max_new_tokens=21, eos_token_id=None, pad_token_id=0
        )
        assert alone[0].tolist() == row.tolist()
    stamps = {path: path.stat().st_mtime_ns for path in run.shared.rglob("*")}
    assert np.array_equal(windows, make(8))
    assert stamps == {path: path.stat().st_mtime_ns for path in run.shared.rglob("*")}
    given["length"] = 25
    refuses("other settings", make, 8)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_labels_are_what_the_target_says(architecture: str, tmp_path: Path) -> None:
    """Of texts of several lengths, in any order; from files that are made once."""
    model = tiny(architecture)
    runner = CausalLM(model)
    asked = []
    tokens = torch.from_numpy(random_windows(70, 9))
    texts = Texts(tokens, torch.arange(70) % 3, 5 + torch.arange(70) % 5)
    run = make_run(str(tmp_path / "target"), tmp_path)
    labels = label(run, runner, texts, states=True)
    forward = model.forward
    model.forward = lambda *args, **more: asked.append(args)
    again = label(run, runner, texts, states=True)
    model.forward = forward
    assert not asked and len(list((tmp_path / "work/labels").iterdir())) == 2
    rows = torch.tensor([69, 3, 1, 64])
    part = texts.take(rows)
    with torch.no_grad(), capture_hidden_states(runner.model) as captured:
        logits = model(input_ids=part.tokens).logits
    for found in (labels, again):
        states = found.states(rows)
        probs = found.probs(rows)
        wanted = top_probs(logits[part.counted()])
        torch.testing.assert_close(probs.probs, wanted.probs, rtol=1e-2, atol=1e-3)
        assert (probs.tokens[:, 0] == wanted.tokens[:, 0]).all()
        for row, end in enumerate(part.ends.tolist()):
            torch.testing.assert_close(
                states[row, :end], captured[0][row, :end].float(), rtol=1e-2, atol=1e-2
            )
    more = label(run, runner, joined(texts, texts))
    assert len(more.probs(torch.arange(140)).tokens) == 2 * int(texts.counted().sum())


def test_distributions_are_of_the_most_probable_tokens() -> None:
    """Their cross-entropy is that of the whole distribution if they hold all of it."""
    scores = 4 * torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    top = top_probs(scores)
    whole = scores.softmax(-1)
    assert top.tokens.shape == (300, TOP) and torch.equal(top.tokens[:, 0], scores.argmax(-1))
    torch.testing.assert_close(top.probs, whole.topk(TOP).values)
    torch.testing.assert_close(whole.gather(-1, top.tokens), top.probs)
    scores = 4 * torch.randn(20, 50)
    logits = torch.randn(20, 50)
    hot = torch.tensor([4, 30, 2, 49])
    dense = -(scores.softmax(-1) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy(logits, top_probs(scores)), dense)
    within = -(scores.softmax(-1)[:, hot] * logits[:, hot].log_softmax(-1)).sum()
    torch.testing.assert_close(
        cross_entropy(logits[:, hot], top_probs(scores).within(hot, 50)), within
    )


def test_a_loss_in_parts_has_the_gradients_of_the_whole() -> None:
    """Gradients go to the states and to what the loss uses beside them.

    Without gradients the loss is the same number.
    """
    maker = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=maker) for shape in ((300, 4), (5, 4)))
    results = []
    for parts in (True, False):
        states = x.clone().requires_grad_()
        parameter = weight.clone().requires_grad_()

        def loss(rows: Tensor, chosen: slice, parameter: Tensor = parameter) -> Tensor:
            return (rows @ parameter.T).logsumexp(-1).sum()

        wide = states * 2
        value = in_parts(wide, loss, 300) if parts else loss(wide, slice(None)) / 300
        value.backward()
        results.append((value.detach(), states.grad, parameter.grad))
        with torch.no_grad():
            torch.testing.assert_close(in_parts(wide, loss, 300), value)
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("hot", [None, [5, 9, 20, 33]])
def test_a_draft_learns_what_the_target_says(hot: list[int] | None, tmp_path: Path) -> None:
    """Of all tokens, or of hot ones: these and no other rows of its head."""
    target = tiny("llama")
    draft = tiny("llama", seed=3)
    texts = of_windows(random_windows(12, 16))
    labels = label(make_run(str(tmp_path / "target"), tmp_path), CausalLM(target), texts)
    chosen = None if hot is None else torch.tensor(hot)
    before = draft.get_output_embeddings().weight.detach().clone()

    def among(model: Any) -> Tensor:
        with torch.no_grad():
            return (
                model(input_ids=texts.tokens)
                .logits[..., slice(None) if hot is None else hot]
                .log_softmax(-1)
            )

    def apart() -> Tensor:
        return functional.kl_div(among(draft), among(target), reduction="sum", log_target=True) / (
            12 * 16
        )

    def loss(rows: Tensor) -> Tensor:
        return distillation_loss(CausalLM(draft), labels, rows, chosen)[0]

    first = apart()
    every = torch.arange(12)
    if hot is None:  # all tokens are among the most probable ones
        torch.testing.assert_close(loss(every), first, rtol=2e-2, atol=1e-2)
        draft.zero_grad()
    train(
        draft,
        loss,
        lambda step: every,
        lambda: 0.0,
        TrainConfig(12, 1e-2, warmup=1),
        tmp_path,
        lambda _: None,
    )
    assert apart() < 0.7 * first
    moved = (draft.get_output_embeddings().weight - before).abs().amax(-1) > 0
    tied = draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    trained = list(range(len(moved))) if hot is None else hot
    assert moved[trained].all() and (tied or int(moved.sum()) == len(trained))
    with torch.no_grad():
        share = distillation_loss(CausalLM(draft), labels, every, chosen)[1]
        best = torch.arange(len(moved))[trained][among(draft).argmax(-1)]
        wanted = (best == target(input_ids=texts.tokens).logits.argmax(-1)).float().mean()
    torch.testing.assert_close(share, wanted, rtol=0, atol=0.05)  # one is in bfloat16


def test_a_draft_from_a_model_that_is_there(target: str, tmp_path: Path) -> None:
    recipe = DraftRecipe(sequences=4, length=32, steps=3, batch=2)
    run = make_run(target, tmp_path / "draft")
    train_draft(run, recipe, init=str(Path(target).parent / "draft"))
    assert forerun.load(target, draft=tmp_path / "draft").draft is not None
    tiny("llama").save_pretrained(tmp_path / "other")
    padded = shutil.copytree(target, tmp_path / "padded")
    tokenizer = load_tokenizer(target)
    tokenizer.add_special_tokens({"pad_token": "<unknown to the target>"})
    tokenizer.save_pretrained(padded)
    for source, changes, init, message in (
        (target, {}, str(tmp_path / "other"), r"has a vocabulary of 64 entries, .* of 300"),
        (target, {"hot": 0.0}, None, "hot must be above 0 and at most 1, not 0"),
        (
            target,
            {"length": 400},
            None,
            "a window is 400 tokens, more than the target's context of 256",
        ),
        (str(padded), {}, None, "pad_token_id must be below the target's 300 embeddings, not 300"),
    ):
        refuses(
            message,
            train_draft,
            make_run(source, tmp_path / "no"),
            replace(recipe, **changes),
            init=init,
        )
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_train_draft_goes_on_after_sigkill(target: str, tmp_path: Path) -> None:
    """As if nothing had been: the weights are those of a run that was not killed."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def command(out: str, sequences: int = 8) -> list[str]:
        files = ["--target", target, "--data", str(text), "--out", str(tmp_path / out)]
        sizes = (
            f"--layers 1 --width 64 --steps 110 --batch 2 --length 16 --sequences {sequences} "
            "--threads 1 --hot 0.5"
        )
        return ["train", "draft", *files, *sizes.split()]

    checkpoint = tmp_path / "killed/work/training/killed/checkpoint.pt"
    with commands.running(*command("killed")) as process:
        until(lambda: checkpoint.exists() or process.poll() is not None, 120)
        assert process.poll() is None, process.stderr.read()
        process.kill()
    killed = commands.run(*command("killed"))
    whole = commands.run(*command("whole"))
    assert (killed.returncode, whole.returncode) == (0, 0), killed.stderr + whole.stderr
    assert "resuming killed at step" in killed.stdout and "greedy agreement" in whole.stdout
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in ("killed", "whole"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    found = losses(make_run(target, tmp_path / "whole"))
    assert found[-1] < found[0]
    decoder = forerun.load(target, draft=tmp_path / "killed")
    assert decoder.draft is not None and len(decoder.draft.hot.tokens) == round(
        0.5 * decoder.target.vocab_size
    )
    result = decoder.generate("def alpha", max_new_tokens=30)
    plain = forerun.load(target, method="ar").generate("def alpha", max_new_tokens=30)
    assert result.stats.drafted > 0 and result.tokens == plain.tokens
    other_run = commands.run(*command("killed", 10))
    assert other_run.returncode == 2 and "other settings" in other_run.stderr


FORMS = [{}, {"rank": 0}, {"kind": "eagle"}, {"kind": "eagle", "rank": 0, "layers": 2}]
RECIPE = HeadRecipe(
    sequences=24, prompt=8, output=24, steps=20, batch=4, unroll=3, lr=1e-2, held=0.2
)


def same(one: HiddenDrafter, other: HiddenDrafter) -> bool:
    return all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_head_learns_and_decodes(form: dict[str, Any], target: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, **form)
    run = make_run(target, tmp_path / "head")
    found = train_head(run, recipe)
    assert losses(run)[-1] < losses(run)[0]
    assert 0 < found["coverage"] <= 1 and found["survival"][0] >= found["survival"][-1]
    made = load_head(run.out, judge(), recipe.kind)
    model = judge().model
    assert (
        made.config.hot_size == round(0.25 * made.config.vocab_size)
        and len(made.config.curves) == 3
    )
    assert hasattr(made, "embed") == (recipe.kind == "lyanna" and recipe.rank > 0)
    assert (run.out / "README.md").read_text().count('"sequences": 24') == 1
    decoder = Decoder(model, None, None, method(recipe.kind), guard=False, head=made)
    plain = Decoder(model, None)
    for prompt in ([5, 6, 7, 8], [9]):
        done, wanted = (
            each.generate(prompt, max_new_tokens=20, ignore_eos=True) for each in (decoder, plain)
        )
        assert done.tokens == wanted.tokens and done.stats.drafted > 0


@pytest.mark.slow
def test_a_copied_head_begins_as_the_targets_last_layer(target: str, tmp_path: Path) -> None:
    """A copied head begins as the target's last layer.

    It follows the linear map of least squares, which drafts better than random weights before any
    step.
    """
    runs = {
        copied: make_run(target, tmp_path / str(copied), work=tmp_path / "work")
        for copied in (True, False)
    }
    for copied, run in runs.items():
        train_head(
            run, replace(RECIPE, steps=1, lr=0.0, linear=0, copied=copied, inner=20, sequences=256)
        )
    assert losses(runs[True])[-1] < losses(runs[False])[-1]
    layer = load_head(runs[True].out, judge()).layers[0]
    last = judge().model.model.layers[-1]
    parts = [getattr(last.self_attn, f"{name}_proj").weight for name in "qkv"]
    assert (
        torch.equal(layer.qkv.weight, torch.cat(parts))
        and not layer.out.weight.any()
        and not layer.down.weight.any()
    )
    gate, up = layer.gate_up.weight.chunk(2)
    places = [int((last.mlp.gate_proj.weight == row).all(1).nonzero()) for row in gate]
    assert len(set(places)) == 20 and torch.equal(up, last.mlp.up_proj.weight[places])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8])
def test_heads_of_both_kinds_are_of_one_size(rank: int, target: str, tmp_path: Path) -> None:
    def size(kind: str) -> int:
        recipe = replace(RECIPE, kind=kind, sequences=8, steps=1, unroll=2, held=0.5, rank=rank)
        return train_head(make_run(target, tmp_path / kind, work=tmp_path / "work"), recipe)[
            "parameters"
        ]

    assert size("eagle") == pytest.approx(size("lyanna"), rel=0.02)  # whole rows of an MLP


def test_training_refuses_at_once(target: str, tmp_path: Path) -> None:
    for changes, message in (
        ({"kind": "medusa"}, "kind must be one of lyanna, eagle, not 'medusa'"),
        ({"rank": -1}, "rank must be at least 0, not -1"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"inner": 0}, "inner must be at least 1, not 0"),
        ({"hot": 0.0}, "hot must be above 0 and at most 1, not 0.0"),
        ({"held": 0.9}, "held must be above 0 and at most 0.5, not 0.9"),
        ({"unroll": 24}, "unroll must be 1 to 23, less than the output, not 24"),
        ({"prompt": 400}, "a window is 424 tokens, more than the target's context of 256"),
    ):
        refuses(message, train_head, make_run(target, tmp_path / "out"), replace(RECIPE, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_training_goes_on_from_a_head(kind: str, target: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, sequences=128, steps=4, unroll=2, held=0.5, kind=kind, rank=8, hot=0.5)
    further = replace(recipe, steps=3, sequences=192)

    def run(out: str, recipe: HeadRecipe, start: str | None = None) -> HiddenDrafter:
        each = make_run(target, tmp_path / out, work=tmp_path / "work")
        train_head(each, recipe, tmp_path / start if start is not None else None)
        return load_head(each.out, judge(), recipe.kind)

    turned = run("counted", recipe)
    with mock.patch(
        "forerun.train.head.initialise", None
    ):  # a run that goes on does not begin anew
        assert same(turned, run("counted", recipe))
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
        (
            "other",
            replace(further, rank=40),
            "first",
            "first' is of another form; give it the same layers",
        ),
        (
            "other",
            replace(further, kind="eagle" if kind != "eagle" else "lyanna"),
            "first",
            f"of the kind '{kind}'",
        ),
        ("other", further, "nothing", "there is no"),
        ("first", further, "first", "start and out are one folder"),
    ):
        refuses(message, run, out, changed, start)
    assert not (tmp_path / "other").exists()
    assert (
        len(list((tmp_path / "work/own-output").glob("*.safetensors"))) == 3
    )  # more of it, not all of it again
