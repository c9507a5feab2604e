"""The states below a target's last layer, on every path that a forward can take."""

from __future__ import annotations

import copy

import families
import pytest
import torch
from torch import Tensor, nn
from toys import ARCHITECTURES, extend, tiny

from forerun.backends import prepare
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import store
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import last_layer

PROMPT, CHAINS = [5, 6, 7, 8, 3, 2, 1], [[9, 4, 3], [3]]


def below(lm: CausalLM) -> list[Tensor]:
    """Those of the prompt, run in two parts, and those of the chains behind it."""
    assert list(lm.prefill([], 4, capture="below")) == []
    assert lm.prompt_hidden is not None and lm.prompt_hidden.shape == (0, lm.config.hidden_size)
    assert list(lm.prefill(PROMPT, 4, capture="below")) == [4, 3]
    for id in range(len(CHAINS)):
        lm.join(id)
    hidden = extend(lm, list(range(len(CHAINS))), CHAINS, "below").hidden
    assert hidden is not None
    return [lm.prompt_hidden, *hidden]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_what_all_layers_but_the_last_have_made(architecture: str) -> None:
    lm = CausalLM(tiny(architecture))
    prompt, *found = below(lm)
    for chain, own in zip(CHAINS, found, strict=True):
        with torch.inference_mode():
            whole = lm.model(torch.tensor([[*PROMPT, *chain]]), use_cache=False, output_hidden_states=True)
        wanted = whole.hidden_states[-2][0]
        torch.testing.assert_close(torch.cat([prompt, own]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the lean forward, and packed weights
def test_fast_forwards_of_float32_give_the_same(architecture: str) -> None:
    model = tiny(architecture)
    for ours, theirs in zip(below(prepare(copy.deepcopy(model))), below(CausalLM(model)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", families.MODELS)
def test_the_quantised_are_the_same(name: str, kind: str) -> None:
    """Up to what keys and values in float16 round."""
    model = store(families.tiny(name), kind)
    plain, quick = CausalLM(copy.deepcopy(model)), prepare(model)
    assert isinstance(quick.backend, QuantisedForward)
    for ours, theirs in zip(below(quick), below(plain), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() < 0.05 * theirs.std()
    # What is kept changes no logits.
    logits = quick.extend([0], [[5, 6]])[0]
    other = quick.fresh()
    other.add(0)
    assert torch.equal(other.extend([0], [[*PROMPT, *CHAINS[0], 5, 6]])[0][-2:], logits)


def test_a_model_without_a_list_of_layers_has_none() -> None:
    lm = CausalLM(tiny("qwen3"))
    lm.model.model.layers = nn.ModuleDict({str(at): layer for at, layer in enumerate(lm.model.model.layers)})
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no readable features below its last layer"):
        last_layer(lm.model)
