"""Our own product of 8-bit integers, and a forward in one call of C."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families import tiny
from torch import Tensor

from forerun.backends import bits as bits_module
from forerun.backends import scores as scores_module
from forerun.backends.bits import Blocks, for_torch, pack, quantise
from forerun.backends.exact import is_invariant
from forerun.backends.facts import facts_of
from forerun.backends.native import library
from forerun.backends.native_family import NativeForward
from forerun.backends.scores import scores
from forerun.backends.stored import store
from forerun.backends.tiles import Tiles, beside, has_tiles, tile
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM

pytestmark = pytest.mark.skipif(not has_tiles(), reason="no C compiler, or a processor without VNNI in 512 bits")


def blocks_of(bits: int, ieee: bool, out: int = 96, inputs: int = 320) -> Blocks:
    """A random weight as a GGUF file has it (`ieee`), or as we make it."""
    weight = torch.randn(out, inputs) * torch.logspace(-6, 1, out)[:, None]
    if not ieee:
        return quantise(weight, bits)
    codes = torch.randint(2**bits, (out, inputs), dtype=torch.uint8)
    scales = (torch.rand(out, inputs // 32) / 50).half().float()
    least = -128 * scales if bits == 8 else -(torch.rand(out, inputs // 32) / 5).half().float()
    return Blocks(codes, scales, least, bits)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Inputs as the product sees them, in float64."""
    parts = x.double().unflatten(1, (-1, 32))
    step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    whole = (parts / step).round()
    if bits == 8:
        whole += ((parts / step - whole) * 254).round() / 254
    return (whole * step).flatten(1)


@pytest.mark.parametrize("ieee", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_stored_weight(bits: int, ieee: bool) -> None:
    torch.manual_seed(bits)
    blocks = blocks_of(bits, ieee)
    packed = pack(blocks)
    assert isinstance(packed, Tiles) and packed.ieee == ieee
    assert (packed.out, packed.inputs, packed.bits) == (96, 320, bits)
    assert torch.equal(packed.values(), blocks.values())
    x = torch.randn(19, 320).bfloat16() * torch.logspace(-3, 2, 19)[:, None].bfloat16()
    x[3] = 0
    x[5, 64:96] = 0
    wanted = rounded(x, bits) @ blocks.values().double().T
    # A number that lies between two may be rounded to either; then the output is rounded to bfloat16.
    most = x.double().abs() @ blocks.values().double().abs().T
    assert ((packed(x).double() - wanted).abs() <= 2**-8 * wanted.abs() + 2**-10 * most).all()
    assert is_invariant(packed, x[:16])


@pytest.mark.parametrize("bits", [4, 8])
def test_both_kernels_mean_the_same_weight(bits: int) -> None:
    torch.manual_seed(0)
    blocks, x = blocks_of(bits, False), torch.randn(9, 320).bfloat16()
    ours, torchs = pack(blocks)(x).float(), for_torch(blocks)(x).float()
    assert (ours - torchs).norm() < (0.01 if bits == 4 else 0.005) * torchs.norm()


def test_what_does_not_fit_is_left_to_torch() -> None:
    blocks = blocks_of(4, False, out=40)
    assert tile(blocks.codes, blocks.scales, blocks.least, 4) is None
    odd = torch.full((32, 1), 1 / 3)
    assert tile(torch.zeros(32, 32, dtype=torch.uint8), odd, odd, 4) is None
    parts = [pack(blocks_of(bits, False)) for bits in (4, 8)]
    assert beside([part for part in parts if isinstance(part, Tiles)]) is None


@pytest.mark.parametrize("out", [3000, 3003, 9])
@pytest.mark.parametrize("form", [partial(quantise, bits=8), lambda weight: weight.bfloat16()])
def test_the_heads_logits_are_those_of_torch(form: Any, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own, x = form(torch.randn(out, 64)), torch.randn(21, 64)
    x[4] = 0
    ours = scores(own)
    assert ours.tiles is not None
    monkeypatch.setattr(scores_module, "has_tiles", lambda: False)
    torchs = scores(own)
    assert torchs.tiles is None and ours.out == torchs.out == out
    assert torch.allclose(ours(x), torchs(x), rtol=1e-3, atol=2e-3)
    assert torch.equal(ours(x).argmax(-1), torchs(x).argmax(-1))
    assert is_invariant(ours, x[:16])


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_one_call_gives_the_bits_of_many(name: str, kind: str) -> None:
    """All layers in one call beside the same functions called one by one from Python; batches, trees, long prompts."""
    compiled = library()
    stored = store(tiny(name), kind)
    forward = NativeForward(stored, compiled)
    assert forward.whole is not None
    assert "integers" in facts_of(CausalLM(stored, forward))["kernel"]
    maker = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 130, (length,), generator=maker).tolist() for length in (1, 40, 300)]
    drafts = [Draft.chain(5, [6, 7]), Draft([5, 9, 9, 11, 12], [-1, 0, 0, 1, 2], origins=["draft"] * 5), Draft.root(8)]
    found = []
    for whole in (forward.whole, None):
        forward.whole = whole
        model = CausalLM(stored, forward)
        for id, prompt in enumerate(prompts):
            model.add(id)
            model.extend([id], [prompt])
        logits, hidden = model.forward([0, 1, 2], drafts, "head")
        assert hidden is not None
        found.append([*logits, *hidden])
    assert all(torch.equal(one, many) for one, many in zip(*found, strict=True))


def test_threads_change_no_bit() -> None:
    packed, x = pack(blocks_of(4, True)), torch.randn(5, 320).bfloat16()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(packed(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_without_such_a_processor_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_module, "has_tiles", lambda: False)
    assert not isinstance(pack(blocks_of(4, False)), Tiles)
    stored = store(tiny("llama"), "int4")
    assert NativeForward(stored, library()).whole is None
