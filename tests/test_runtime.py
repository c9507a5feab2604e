"""The lean forward gives what transformers' own gives."""

from __future__ import annotations

import pytest
import torch
from toys import CONTEXT, VOCAB, random_tree, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.draft import Draft
from forerun.model import CausalLM
from forerun.runtime import lean
from forerun.runtime.lean import lean_forward


@pytest.mark.parametrize("lengths", [[9], [0], [7, 7, 7], [3, 12, 1, 30]])
def test_lean_forward_equals_the_stock_one(lengths: list[int]) -> None:
    model = tiny("llama")
    plain, quick = CausalLM(model), CausalLM(model, lean_forward(model))
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    for lm in (plain, quick):
        lm.start(prompts)
    steps = [[Draft.chain(5, [6, 7, 8])] * len(prompts), [Draft.root(9)] * len(prompts)]
    steps += [[random_tree(9, VOCAB, generator) for _ in prompts], [Draft.chain(3, [4, 5]) for _ in prompts]]
    for drafts in steps:
        for a, b in zip(plain.forward(drafts), quick.forward(drafts), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        # Rows go on from different nodes, so that their lengths and entries differ.
        paths = [draft.path(row % len(draft)) for row, draft in enumerate(drafts)]
        for lm in (plain, quick):
            lm.commit(paths)


def test_the_last_position_of_the_context() -> None:
    model = tiny("llama")
    plain, quick = CausalLM(model), CausalLM(model, lean_forward(model))
    for lm in (plain, quick):
        lm.start([[5] * (CONTEXT - 1)])
    torch.testing.assert_close(plain.extend([[7]])[0], quick.extend([[7]])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_what_is_no_plain_llama_is_left_to_transformers(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert lean_forward(LlamaForCausalLM(LlamaConfig(**sizes))) is not None
    assert lean_forward(LlamaForCausalLM(LlamaConfig(**sizes, **change))) is None
    adapted = LlamaForCausalLM(LlamaConfig(**sizes))
    adapted.model.layers[0].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[0].mlp.up_proj)
    assert lean_forward(adapted) is None
    assert lean_forward(tiny("qwen3")) is None
    monkeypatch.setattr(lean, "LARGEST", 100)
    assert lean_forward(LlamaForCausalLM(LlamaConfig(**sizes))) is None
    assert lean_forward(tiny("gpt2")) is None
