"""The recipe of the embedded pair, small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forerun
from benchmarks.embedded import pair
from forerun.train.corpus import split_of

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=True, **sizes))


def test_windows_cover_every_token_once_an_epoch_and_are_repeatable() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    windows = pair.Windows(stream, 10, seed=3)
    first = [windows.batch(step, 7) for step in range(windows.per_epoch // 7)]
    targets = torch.cat(first)[:, 1:].flatten().tolist()
    assert len(targets) == len(set(targets)) == windows.per_epoch * 10
    assert torch.equal(pair.Windows(stream, 10, seed=3).batch(5, 7), first[5])
    assert not torch.equal(windows.batch(windows.per_epoch // 7, 7), first[0])
    with pytest.raises(ValueError, match="too few"):
        pair.Windows(stream[:20], 10)


def test_a_deeper_model_begins_as_the_shallow_one_and_can_learn_everywhere() -> None:
    shallow = small_llama()
    deep = pair.deepen(shallow)
    tokens = torch.randint(300, (2, 12))
    torch.testing.assert_close(deep(tokens).logits, shallow(tokens).logits)
    assert deep.config.num_hidden_layers == 4 and deep.lm_head.weight is deep.model.embed_tokens.weight
    deep(tokens).logits.square().sum().backward()
    assert all(layer.self_attn.o_proj.weight.grad.abs().sum() > 0 for layer in deep.model.layers)


def test_the_best_place_between_two_models_is_found_and_taken() -> None:
    model = small_llama()
    end = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = {name: value + 0.4 for name, value in end.items()}  # three fifths of the way

    def loss() -> float:
        return float(sum((value - wanted[name]).square().mean() for name, value in model.state_dict().items()))

    losses = pair.best_between({name: value + 1.0 for name, value in end.items()}, model, loss)
    assert list(losses) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name])


def test_distinct_share() -> None:
    assert pair.distinct_share([1, 2] * 20) == pytest.approx(2 / 37) and pair.distinct_share(list(range(40))) == 1.0


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
def test_a_pair_is_made_and_goes_on(tmp_path: Path) -> None:
    sizes = {"target_width": 64, "target_layers": 2, "target_heads": 1, "target_mlp": 64, "target_steps": 6}
    sizes |= {"draft_width": 64, "draft_layers": 1, "draft_heads": 1, "draft_mlp": 64, "draft_steps": 5}
    recipe = pair.PairRecipe(320, 128, 2, 32, **sizes, grown_steps=4, own_sequences=64, distill_steps=5)
    out, tree, said = tmp_path / "run", small_tree(tmp_path / "tree"), list[str]()
    pair.train_pair(out, recipe, tree, compiled=False, say=said.append)
    results = json.loads((out / "pair" / "results.json").read_text())
    assert results["recipe"]["target_steps"] == 6 and results["gate"]
    decoder = forerun.load(out / "pair" / "target", draft=out / "pair" / "draft", method="sd")
    plain = forerun.load(out / "pair" / "target", method="ar")
    assert decoder.target.config.num_hidden_layers == 4
    found, wanted = (each.generate("def alpha", max_new_tokens=40) for each in (decoder, plain))
    assert found.tokens == wanted.tokens
    said.clear()
    assert pair.train_pair(out, recipe, tree, compiled=False, say=said.append)["sha256"] == results["sha256"]
    assert any(line.startswith("resuming draft-corpus at step 5") for line in said)
    with pytest.raises(ValueError, match="other settings"):
        pair.train_pair(out, pair.PairRecipe(), tree, compiled=False)
