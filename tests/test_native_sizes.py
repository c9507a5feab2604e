"""C refuses sizes that do not fit, once a call, before it reads or writes anything."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from families import tiny
from test_hidden import features_of
from test_native_heads import TEXTS, head_of
from toys import tiny as small_model

from forerun.backends.hot import prepare_draft
from forerun.backends.native import library
from forerun.backends.native_heads import tiles_of
from forerun.backends.stored import store
from forerun.backends.tiles import Room, has_tiles, room
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import BLOCK, KVCache

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")
products = pytest.mark.skipif(not has_tiles(), reason="a processor without VNNI in 512 bits")
REFUSED = "in C was given sizes that do not fit"


def begun(kind: str) -> CausalLM:
    """With one row that has all its buffers but one position."""
    model = prepare_draft(store(tiny("llama", max_position_embeddings=2048), kind), None, None)
    list(model.prefill([5, 6, 7], 8))
    model.join(0, BLOCK)
    for _ in range(4):
        model.extend([0], [[9] * 63])
    assert model.length(0) == BLOCK - 1 and model.cache.capacity == BLOCK
    return model


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache whose buffers do not grow any more, whatever is asked for."""

    def stay() -> None:
        monkeypatch.setattr(KVCache, "reserve", lambda *_: None)

    return stay


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("int8", marks=products)])
def test_a_forward_beyond_the_buffers(kind: str, full: Any) -> None:
    model = begun(kind)
    full()
    with pytest.raises(RuntimeError, match=rf"{'attend' if kind == 'bfloat16' else 'run_layers'} {REFUSED}"):
        model.extend([0], [[3, 4]])
    assert model.length(0) == BLOCK - 1
    model.extend([0], [[3]])  # the last position is there
    model.cache.add(1)
    with pytest.raises(RuntimeError, match=REFUSED):  # a row that is not
        model.extend([1], [[3]])


@products
def test_a_chain_beyond_the_buffers(full: Any) -> None:
    model = begun("int8")
    full()
    with pytest.raises(RuntimeError, match=f"draft_chain {REFUSED}"):
        model.chain(0, [3], 2, 0.0, 0.0, [])
    with pytest.raises(RuntimeError, match=f"draft_chain {REFUSED}"):
        model.chain(0, [model.vocab_size], 1, 0.0, 0.0, [])
    assert model.length(0) == BLOCK - 1
    assert model.chain(0, [3], 1, 0.0, 0.0, []) is not None
    model.cache.add(1)
    with pytest.raises(RuntimeError, match=f"draft_chain {REFUSED}"):
        model.chain(1, [3], 1, 0.0, 0.0, [])


@products
def test_a_heads_chain_beyond_the_buffers(full: Any) -> None:
    target = CausalLM(small_model("llama"))
    head, features = head_of(target), features_of(target, TEXTS[9])
    chain, given, behind = head.chain, features[:3], TEXTS[9][1:4]
    assert chain is not None
    head.add(0)
    chain(head.cache, 0, given, behind, 6, 4)
    full()
    head.cache.lengths[0] = head.cache.capacity - 10
    with pytest.raises(RuntimeError, match=f"draft_states {REFUSED}"):
        chain(head.cache, 0, given, behind, 6, 9)
    assert head.length(0) == head.cache.capacity - 10
    chain(head.cache, 0, given, behind, 6, 8)
    with pytest.raises(RuntimeError, match=f"run_layers {REFUSED}"):
        head.native.extend(head.cache, [0], features[:8], [8])


@products
def test_sizes_of_single_functions() -> None:
    found, weight = library(), tiles_of(torch.randn(64, 64))
    x, y, own = room(2, 64, dtype=torch.bfloat16), room(2, 64, dtype=torch.bfloat16), Room(2, 64)
    for bits, rows, threads in ((8, -1, 1), (8, 2, 0), (5, 2, 1)):
        argument = weight.argument
        argument.bits = bits
        with pytest.raises(RuntimeError, match=f"multiply {REFUSED}.*'bits': {bits}.*{rows}"):
            given = ctypes.byref(argument), x.data_ptr(), rows, ctypes.byref(own.argument), y.data_ptr(), threads
            found.multiply(*given)
    for size in (0, 24, -16):
        with pytest.raises(RuntimeError, match=rf"gate {REFUSED}.*{size}"):
            found.gate(x.data_ptr(), 1, size, y.data_ptr())
        with pytest.raises(RuntimeError, match=f"add_and_norm {REFUSED}"):
            found.add_and_norm(x.data_ptr(), None, x.data_ptr(), 1.0, 1, size, y.data_ptr(), None)
