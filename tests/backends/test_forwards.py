"""Fast forwards give what transformers' own give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from forerun.backends import prepare, quantised
from forerun.backends.costs import forward_costs, measure_costs
from forerun.backends.quantised import QuantisedForward, quantised_forward
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from tests.support import families
from tests.support.toys import CONTEXT, join_all, random_tree, refuses, tiny

VOCAB = families.SIZES["vocab_size"]


@pytest.mark.parametrize("architecture", families.MODELS)
@pytest.mark.parametrize("lengths", [[9], [0], [7, 7, 7], [3, 12, 1, 30]])
def test_a_small_float32_forward_in_c_equals_the_stock_one(
    lengths: list[int], architecture: str
) -> None:
    model = families.tiny(architecture)
    plain = CausalLM(model)
    quick = prepare(model)
    assert isinstance(quick.backend, QuantisedForward) and quick.exact == "bitwise"
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = {
        id: torch.randint(VOCAB, (n,), generator=generator).tolist() for id, n in enumerate(lengths)
    }
    ids = list(prompts)
    for lm in (plain, quick):
        join_all(lm, prompts)
    steps = [[Draft.chain(5, [6, 7, 8])] * len(prompts), [Draft.root(9)] * len(prompts)]
    steps += [
        [random_tree(9, VOCAB, generator) for _ in prompts],
        [Draft.chain(3, [4, 5]) for _ in prompts],
    ]
    for drafts in steps:
        for a, b in zip(
            plain.forward(ids, drafts).logits, quick.forward(ids, drafts).logits, strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4 * float(a.std()), rtol=1e-4)
        # Rows go on from different nodes, so that their lengths and entries differ.
        paths = [draft.path(row % len(draft)) for row, draft in enumerate(drafts)]
        for lm in (plain, quick):
            lm.commit(ids, paths)


def test_the_last_position_of_the_context_can_be_used() -> None:
    model = families.tiny("llama", max_position_embeddings=CONTEXT)
    plain = CausalLM(model)
    quick = prepare(model)
    for lm in (plain, quick):
        join_all(lm, {0: [5] * (CONTEXT - 1)})
    torch.testing.assert_close(
        plain.extend([0], [[7]])[0], quick.extend([0], [[7]])[0], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_what_c_does_not_have_is_left_to_transformers(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(**sizes))
    assert quantised_forward(plain) is not None
    assert quantised_forward(LlamaForCausalLM(LlamaConfig(**sizes, **change))) is None
    adapted = LlamaForCausalLM(LlamaConfig(**sizes))
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    assert quantised_forward(adapted) is None
    normed = LlamaForCausalLM(LlamaConfig(**sizes))
    normed.model.norm = torch.nn.LayerNorm(32)
    assert quantised_forward(normed) is None
    assert quantised_forward(tiny("gpt2")) is None
    assert quantised_forward(LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()) is None
    monkeypatch.setattr(quantised, "MAX_COPIED_PARAMETERS", 100)
    assert quantised_forward(plain) is None
    monkeypatch.undo()
    monkeypatch.setenv("FORERUN_KERNELS", "none")
    assert quantised_forward(plain) is None


def test_prepare_takes_the_fastest_forward() -> None:
    llama = families.tiny("llama")
    qwen = tiny("qwen3")  # C has no heads of 8 numbers
    assert not isinstance(prepare(llama).backend, EagerForward)
    assert isinstance(prepare(llama, fast=False).backend, EagerForward)
    assert prepare(llama, fast=False).model is llama
    assert isinstance(prepare(qwen).backend, EagerForward)
    with pytest.raises(ValueError, match="encoder-decoder"):
        prepare(
            T5ForConditionalGeneration(
                T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1)
            )
        )


def test_costs_have_a_figure_for_each_count_that_fits() -> None:
    model = prepare(tiny("llama"))
    costs = forward_costs(model, (1, 2, 8), context=CONTEXT - 2)
    assert list(costs) == [1, 2]
    assert all(value > 0 for value in costs.values())
    assert model.cache.ids == [] and model.prefilled == 0  # it ran elsewhere
    refuses("is full after", forward_costs, model, context=CONTEXT)


def test_costs_count_the_experts_that_different_tokens_choose() -> None:
    model = families.tiny("qwen3_moe", max_position_embeddings=40)
    distinct: dict[int, int] = {}

    def count(module: Any, given: Any, output: Any) -> None:
        chosen = output[-1]
        distinct[len(chosen)] = max(distinct.get(len(chosen), 0), len(chosen.unique()))

    model.model.layers[0].mlp.gate.register_forward_hook(count)
    costs = measure_costs(CausalLM(model))
    assert costs.has_experts and (distinct[1], distinct[16]) == (2, 5)
    assert not measure_costs(
        CausalLM(families.tiny("llama", max_position_embeddings=4))
    ).has_experts


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, given, output: output * 0.5
    )


def _patch(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 0.5


class Halved(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 0.5


def _wrap(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = Halved(model.model.layers[0].mlp)


@pytest.mark.parametrize("change", [_hook, _patch, _wrap])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_was_changed_in_a_model_is_heeded(
    architecture: str, change: Callable[[PreTrainedModel], None]
) -> None:
    model = families.tiny(architecture)
    ids = [3, 4, 5, 6]
    with torch.no_grad():
        before = model(torch.tensor([ids])).logits[0]
        change(model)
        wanted = model(torch.tensor([ids])).logits[0]
    assert not torch.allclose(before, wanted, atol=1e-3)
    quick = prepare(model)
    quick.add(0)
    torch.testing.assert_close(quick.extend([0], [ids])[0], wanted, atol=1e-4, rtol=1e-4)
