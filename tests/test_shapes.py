"""Small models in the shape of big ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toys import random_head
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forerun.bench.plan import Plan
from forerun.bench.session import bench
from forerun.bench.shapes import difference, expand, expand_head
from forerun.bench.sizes import SHAPES, ModelShape
from forerun.methods import method
from forerun.model import CausalLM
from forerun.runtime.heads import HiddenLM
from forerun.zoo import EMBEDDED

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
BIG = ModelShape(60, 5, 15, 3, 72, 64, 16)


def small(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    options = SMALL | {"tie_word_embeddings": architecture == "llama"} | settings
    kind, config = (LlamaForCausalLM, LlamaConfig) if architecture == "llama" else (Qwen3ForCausalLM, Qwen3Config)
    model: Any = kind(config(**options))
    for parameter in model.parameters():  # norms of 1 would hide that they are moved
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model.eval()


@pytest.mark.parametrize("shape", [BIG, replace(BIG, head_dim=8), replace(BIG, num_attention_heads=12)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_big_model_says_what_the_small_one_says(architecture: str, kv_heads: int, shape: ModelShape) -> None:
    model = small(architecture, num_key_value_heads=kv_heads)
    big = expand(model, shape)
    assert {name: getattr(big.config, name) for name in vars(shape)} == vars(shape)
    ids = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(1))
    wanted, found = model(input_ids=ids).logits, big(input_ids=ids).logits
    torch.testing.assert_close(found[..., :50], wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert big.generate(ids[:1], max_new_tokens=8).tolist() == model.generate(ids[:1], max_new_tokens=8).tolist()
    # Nothing but what writes into the states is left at zero.
    idle = [name for name, weight in big.named_parameters() if not weight.any()]
    assert all(name.split(".")[-2] in ("o_proj", "down_proj") for name in idle) and len(idle) == 2 * 3


@pytest.mark.parametrize(("shape", "hot"), [(BIG, 50), (replace(BIG, head_dim=8), 12)])
@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_a_head_says_in_another_shape_what_it_said(kind: str, shape: ModelShape, hot: int) -> None:
    model = small("llama")
    big = expand(model, shape)
    head = random_head(CausalLM(model), hot, kind=kind)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    wide = expand_head(head, model, shape)
    assert (
        wide.config.hidden_size == 60 and len(wide.hot) == max(hot, 16) and wide.hot[:hot].tolist() == head.hot.tolist()
    )
    heads = []
    for target, each in ((CausalLM(model), head), (CausalLM(big), wide)):
        target.keeps_hidden = target.keeps_prompt = True
        target.add(0, 8)
        target.extend([0], [[5, 7, 9, 11, 2]])
        assert target.hidden is not None
        lm = HiddenLM(each, target, few=False)
        lm.add(0, 8)
        states = [lm.extend([0], [target.hidden[0]], [[7, 9, 11, 2, 4]])]
        for token in (3, 8):
            states.append(lm.extend([0], [states[-1]], None if kind == "lyanna" else [[token]]))
        logits = lm.logits(torch.cat(states))
        heads.append(logits + lm.information(torch.tensor([3, 8, 49])) if kind == "lyanna" else logits)
    torch.testing.assert_close(heads[1][:, :hot], heads[0], rtol=1e-3, atol=1e-3)
    idle = [name for name, weight in wide.named_parameters() if not weight.any()]
    assert not idle


@pytest.mark.slow
def test_a_bench_in_other_shapes_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded pair with its pre-verifier, between models a little larger."""
    monkeypatch.setitem(SHAPES, "wide", ModelShape(384, 17, 6, 6, 900, 4200, 64))
    monkeypatch.setitem(SHAPES, "wide draft", ModelShape(256, 3, 4, 4, 600, 4100, 64))
    methods = {"ar": method("ar"), "sd": method("sd"), "pacer": method("pacer", threshold=0.5)}
    methods["lyanna"] = method("lyanna")
    asked: dict[str, Any] = {"target": EMBEDDED, "draft": EMBEDDED, "limit": 1, "rounds": 1, "max_new_tokens": 24}
    own = bench(Plan(methods, **asked), {}, None)
    wide = bench(Plan(methods, **asked, target_shape="wide", draft_shape="wide draft"), {}, None)
    for name in methods:
        mine, theirs = (run["methods"][name] for run in (own, wide))
        assert theirs["tau"] == mine["tau"] and theirs["exact_match"] == 1.0
    assert wide["arguments"]["target_shape"] == "wide"


def test_a_shape_that_says_something_else_is_noticed() -> None:
    model = small("llama")
    big = expand(model, BIG)
    assert difference(model, big) < 1e-5
    with torch.no_grad():
        big.model.layers[0].self_attn.q_proj.weight[0, 0] += 1  # type: ignore[operator, index]
    assert difference(model, big) > 1e-4


def test_what_does_not_fit_is_refused() -> None:
    model = small("llama")
    for name, size in vars(BIG).items():
        with pytest.raises(ValueError, match=f"the shape's {name} is"):
            expand(model, replace(BIG, **{name: getattr(model.config, name) - 1}))
        assert size
    with pytest.raises(ValueError, match="do not hold heads"):
        expand(model, replace(BIG, head_dim=12))
    with pytest.raises(ValueError, match="do not hold heads"):
        expand(model, replace(BIG, num_attention_heads=4, num_key_value_heads=4))
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be given another shape"):
        expand(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2)), BIG)
    with pytest.raises(ValueError, match="rotation of the type 'linear'"):
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        expand(small("llama", rope_parameters=rope), BIG)
    with pytest.raises(ValueError, match="'hf-ar' cannot be measured in another shape"):
        Plan({"hf-ar": None}, target_shape="llama-2-7b")
    with pytest.raises(ValueError, match="--draft-shape must be one of llama-2-7b"):
        Plan({"ar": method("ar")}, draft_shape="llama")
    assert all(shape.num_attention_heads % shape.num_key_value_heads == 0 for shape in SHAPES.values())
