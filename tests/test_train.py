"""Training: exact resume, own output, distillation, the recipe killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forerun
from forerun.train.data import Windows, read_texts
from forerun.train.distill import agreement, distill
from forerun.train.lm import deepen, next_token_loss
from forerun.train.loop import TrainConfig, train
from forerun.train.own_output import own_output
from forerun.train.pair import best_between, distinct_share
from forerun.zoo.corpus import split_of
from forerun.zoo.tokenizer import train_tokenizer

COMMAND = [sys.executable, "-m", "forerun"]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def small_llama(vocab: int = 64, width: int = 64, layers: int = 1, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def periodic_stream(n: int = 4000) -> np.ndarray:
    """A stream that a small model learns at once: a cycle with a little noise."""
    rng = np.random.default_rng(0)
    stream = np.arange(n) % 7 + 3
    stream[rng.integers(n, size=n // 20)] = 1
    return stream.astype(np.uint16)


def run_training(model: LlamaForCausalLM, out: Path, config: TrainConfig, stop_at: int | None = None) -> list[str]:
    """Trains on the periodic stream; `stop_at` raises in the middle of that step, as a crash would."""
    windows, said = Windows(periodic_stream(), config.length), []

    def batch(step: int) -> torch.Tensor:
        if step == stop_at:
            raise InterruptedError
        return windows.batch(step, config.batch)

    train(model, next_token_loss(model), batch, lambda: 0.0, config, out, said.append)
    return said


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    config = TrainConfig(steps=12, batch=4, length=16, warmup=2, save_every=4, compile=False)
    straight = small_llama()
    run_training(straight, tmp_path / "straight", config)
    with pytest.raises(InterruptedError):
        run_training(small_llama(), tmp_path / "broken", config, stop_at=10)
    resumed = small_llama(seed=5)  # what it starts from must not matter: the checkpoint holds everything
    said = run_training(resumed, tmp_path / "broken", config)
    assert "resuming broken at step 8 of 12" in said[0]
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_learns_and_refuses_another_runs_folder(tmp_path: Path) -> None:
    config = TrainConfig(steps=60, batch=8, length=16, warmup=2, compile=False)
    run_training(small_llama(), tmp_path, config)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 2
    with pytest.raises(ValueError, match="other settings"):
        run_training(small_llama(), tmp_path, TrainConfig(steps=61, batch=8, length=16))


def test_windows_cover_every_token_once_an_epoch_and_are_repeatable() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    windows = Windows(stream, 10, seed=3)
    first = [windows.batch(step, 7) for step in range(windows.per_epoch // 7)]
    targets = torch.cat(first)[:, 1:].flatten().tolist()
    assert len(targets) == len(set(targets)) == windows.per_epoch * 10
    assert torch.equal(Windows(stream, 10, seed=3).batch(5, 7), first[5])
    assert not torch.equal(windows.batch(windows.per_epoch // 7, 7), first[0])
    with pytest.raises(ValueError, match="too few"):
        Windows(stream[:20], 10)


def test_own_output_is_the_targets_and_is_not_made_twice(tmp_path: Path) -> None:
    target, stream = small_llama().eval(), periodic_stream()
    windows = own_output(target, stream, tmp_path, sequences=8, length=24, rows=4, say=lambda _: None)
    assert windows.shape == (8, 25)
    prompt = 3  # the first part is greedy behind an eighth of the window
    for row in windows[:4]:
        ids = torch.tensor(row[None, :prompt].astype(np.int64))
        alone = target.generate(ids, do_sample=False, max_new_tokens=22, eos_token_id=None, pad_token_id=0)
        assert alone[0].tolist() == row.tolist()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = own_output(target, stream, tmp_path, sequences=8, length=24, rows=4, say=lambda _: None)
    assert np.array_equal(windows, again)
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_distillation_brings_the_draft_to_the_target(tmp_path: Path) -> None:
    target = small_llama(layers=2)
    config = TrainConfig(steps=60, batch=8, length=24, warmup=2, compile=False)
    run_training(target, tmp_path / "target", TrainConfig(steps=60, batch=8, length=24, warmup=2, compile=False))
    draft = small_llama(seed=9)
    own = own_output(target, periodic_stream(), tmp_path / "own", sequences=32, length=24, rows=16, say=lambda _: None)
    held = torch.from_numpy(own[-1:].astype(np.int64))
    before = agreement(target, draft, held)
    distill(target, draft, own, periodic_stream(), config, tmp_path / "draft", say=lambda _: None)
    assert before < 0.5 < agreement(target, draft, held)


def test_distinct_share() -> None:
    assert distinct_share([1, 2] * 20) == pytest.approx(2 / 37)
    assert distinct_share(list(range(40))) == 1.0


def test_read_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "thr\u2028ee"}\n', encoding="utf-8")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert list(read_texts([str(tmp_path)])) == ["one", "two", "thr\u2028ee"]
    with pytest.raises(ValueError, match="not UTF-8"):
        list(read_texts([str(tmp_path / "c.bin")]))
    with pytest.raises(ValueError, match="cannot read"):
        list(read_texts([str(tmp_path / "nothing.txt")]))
    (tmp_path / "d.jsonl").write_text('{"prompt": "two"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl line 1"):
        list(read_texts([str(tmp_path / "d.jsonl")]))


def small_tree(folder: Path) -> Path:
    """A source tree with files in every split and enough text for the smallest recipe."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number in range(60):
        lines = []
        for _ in range(30):
            name, other = rng.choice(WORDS, 2)
            lines.append(f"def {name}_{other}(x):\n    return {other}(x) + {rng.integers(100)}\n\n")
        (folder / f"{number}.py").write_text("".join(lines))
    assert {split_of(f"{number}.py") for number in range(60)} == {"train", "validation", "test"}
    return folder


@pytest.mark.slow
def test_train_pair_goes_on_after_sigkill(tmp_path: Path) -> None:
    settings = {
        "vocabulary": 320,
        "context": 128,
        "batch": 2,
        "window": 32,
        "target_width": 64,
        "target_layers": 2,
        "target_heads": 1,
        "target_mlp": 64,
        "target_steps": 60,
        "grown_steps": 4,
        "draft_width": 64,
        "draft_layers": 1,
        "draft_heads": 1,
        "draft_mlp": 64,
        "draft_steps": 5,
        "own_sequences": 64,
        "distill_steps": 5,
    }
    out = tmp_path / "run"
    command = [*COMMAND, "train", "pair", "--no-compile", "--threads", "1", "--out", str(out)]
    command += ["--corpus", str(small_tree(tmp_path / "tree"))]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    checkpoint = out / "target" / "checkpoint.safetensors"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    done = commands.run(*command[len(COMMAND) :])
    assert done.returncode == 0, done.stderr
    assert "resuming target at step" in done.stdout
    results = json.loads((out / "pair" / "results.json").read_text())
    assert results["recipe"]["target_steps"] == 60
    assert set(results["gate"]) and "gate " in done.stdout

    assert json.loads((out / "pair" / "target" / "config.json").read_text())["num_hidden_layers"] == 4
    decoder = forerun.load(out / "pair" / "target", draft=out / "pair" / "draft", method="sd")
    plain = forerun.load(out / "pair" / "target", method="ar")
    assert (
        decoder.generate("def alpha", max_new_tokens=40).tokens == plain.generate("def alpha", max_new_tokens=40).tokens
    )

    other = commands.run(*command[len(COMMAND) :], "--set", "draft_steps=21")
    assert other.returncode == 2
    assert "other settings" in other.stderr


def test_a_deeper_model_begins_as_the_shallow_one_and_can_learn_everywhere() -> None:
    shallow = small_llama(vocab=300, layers=2)
    deep = deepen(shallow)
    tokens = torch.randint(300, (2, 12))
    torch.testing.assert_close(deep(tokens).logits, shallow(tokens).logits)
    assert deep.config.num_hidden_layers == 4
    assert deep.lm_head.weight is deep.model.embed_tokens.weight
    deep(tokens).logits.square().sum().backward()
    assert all(layer.self_attn.o_proj.weight.grad.abs().sum() > 0 for layer in deep.model.layers)


def test_the_best_place_between_two_models_is_found_and_taken() -> None:
    model = small_llama(vocab=300)
    end = {name: value.clone() for name, value in model.state_dict().items()}
    start = {name: value + 1.0 for name, value in end.items()}
    wanted = {name: value + 0.4 for name, value in end.items()}  # three fifths of the way

    def loss() -> float:
        return float(sum((value - wanted[name]).square().mean() for name, value in model.state_dict().items()))

    losses = best_between(start, model, loss)
    assert list(losses) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name])


@pytest.mark.slow
def test_train_draft_for_any_target(tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    tokenizer = train_tokenizer([path.read_text() for path in tree.iterdir()], 300)
    small_llama(vocab=300, layers=2).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    command = [*COMMAND, "train", "draft", "--target", str(tmp_path / "target"), "--data", str(tree)]
    command += ["--out", str(tmp_path / "draft"), "--layers", "1", "--width", "64", "--steps", "5", "--batch", "4"]
    command += ["--length", "32", "--sequences", "16", "--no-compile", "--threads", "1"]
    command += ["--hot", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "its 150 tokens are" in done.stdout
    decoder = forerun.load(tmp_path / "target", draft=tmp_path / "draft")
    assert decoder.draft is not None and len(decoder.draft.hot.tokens) == 150
    result = decoder.generate("def alpha", max_new_tokens=30)
    assert result.stats.drafted > 0
    assert (
        result.tokens == forerun.load(tmp_path / "target", method="ar").generate("def alpha", max_new_tokens=30).tokens
    )
    other = commands.run(*(part if part != "16" else "18" for part in command[len(COMMAND) :]))
    assert other.returncode == 2
    assert "other settings" in other.stderr


_TOGETHER = """
import sys
from pathlib import Path
import torch
from torch import nn
from forerun.train.loop import TrainConfig, train
from forerun.train.processes import processes

sharing, out, size = processes(), Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Linear(3, 1)
windows = torch.randn(12, 2, 3)
batch = lambda step: windows[step] if size == 1 else torch.cat([windows[2 * step], windows[2 * step + 1]])
config = TrainConfig(6, size, 2, warmup=1, save_every=3, compile=False)
train(model, lambda x: model(x).square().mean(), batch, lambda: 0.0, config, out, print, sharing)
if sharing.is_first:
    torch.save(model.state_dict(), out / "weights.pt")
"""


@pytest.mark.slow
def test_processes_that_train_together_are_one_with_a_larger_batch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_TOGETHER)
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, start, size in (("alone", [], "2"), ("together", together, "1")):
        command = [sys.executable, *start, str(script), str(tmp_path / name), size]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
        assert done.returncode == 0, done.stderr
    alone, both = (torch.load(tmp_path / name / "weights.pt") for name in ("alone", "together"))
    for name, value in alone.items():
        torch.testing.assert_close(value, both[name])
    assert len((tmp_path / "together" / "log.jsonl").read_text().splitlines()) == 6  # the first one's alone
