"""Small models in the shape of big ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forerun.bench.shapes import SHAPES, Shape, expand

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
BIG = Shape(60, 5, 15, 3, 72, 64, 16)


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
def test_a_big_model_says_what_the_small_one_says(architecture: str, kv_heads: int, shape: Shape) -> None:
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
    assert all(shape.num_attention_heads % shape.num_key_value_heads == 0 for shape in SHAPES.values())
