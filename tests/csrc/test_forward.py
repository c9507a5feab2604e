"""The C library's forward, bit by bit.

The bits are the same in other pieces, beside other tokens and on other processors.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from forerun.backends import prepare
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import store
from forerun.csrc.build import HERE, LIBRARY, VARIANT_FLAGS, build
from forerun.csrc.library import BatchArgument, ChainArgument, library, run, variants
from forerun.model.kv_cache import KVCache
from tests.support.compiling import CROSS, QEMU, UNINLINED, compiled, cross_library, needs_cross
from tests.support.families import MODELS, tiny
from tests.support.native import native_settings

restored = pytest.fixture(autouse=True)(native_settings)

VOCABULARY, CAPACITY = 130, 512
OWN_VARIANTS = list(VARIANT_FLAGS.get(platform.machine(), ["plain"]))


class Native:
    """A model that runs in C, with a cache of four rows and all that a batch may ask for."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        forward = prepare(model if kind == "float32" else store(model, kind)).backend
        assert isinstance(forward, QuantisedForward)
        self.layers, self.embedding = forward.layers, forward.embedding
        self.cache = KVCache(model.config.num_hidden_layers)
        for row in range(4):
            self.cache.add(row, CAPACITY)
        self.rotated = self.layers.rotate_to(CAPACITY)
        self.caches = self.layers.cache(self.cache)

    def call(self, function: str, request: ctypes.Structure, **arrays: Any) -> int:
        kept = {
            name: np.asarray(each, None if hasattr(each, "dtype") else np.int32)
            for name, each in arrays.items()
        }
        for name, array in kept.items():
            setattr(request, name, array.ctypes.data)
        return run(function, ctypes.byref(self.rotated.model), self.caches, ctypes.byref(request))

    def forward(
        self, tokens: Sequence[int], row: Sequence[int], slot: Sequence[int], **more: Any
    ) -> np.ndarray:
        more = {
            "position": slot,
            "length": [each + 1 for each in slot],
            "asked": range(len(row)),
        } | more
        more |= {"tokens": tokens} if "states" not in more else {}
        logits = np.full(
            (len(more["asked"]), VOCABULARY + len(more.get("extra", ()))), np.nan, dtype=np.float32
        )
        batch = BatchArgument(n=len(row), asks=len(logits), extras=len(more.get("extra", ())))
        if paths := more.get("paths"):
            batch.path = max(map(len, paths))
            more["seen"] = [len(path) for path in paths]
            more["paths"] = [[*path, *[-9] * (batch.path - len(path))] for path in paths]
        self.call("fr_forward", batch, row=row, slot=slot, logits=logits, **more)
        return logits

    def one_by_one(self, tokens: Sequence[int], row: int = 0, start: int = 0) -> np.ndarray:
        return np.concatenate(
            [self.forward([token], [row], [start + k]) for k, token in enumerate(tokens)]
        )


@pytest.fixture(scope="module")
def small() -> Native:
    return Native(tiny("qwen2"), "int4")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def test_many_tokens_have_the_bits_of_single_ones(small: Native) -> None:
    tokens = some_tokens(300)
    logits = small.forward(tokens, [0] * 300, range(300))
    assert np.array_equal(logits, small.one_by_one(tokens, row=1))
    last = small.forward(tokens, [2] * 300, range(300), asked=[299, 0, 130, 131, 131])
    assert np.array_equal(last, logits[[299, 0, 130, 131, 131]])
    # States stand for tokens, and other tokens' logits may follow all.
    states = small.embedding.floats(tokens[:9]).numpy()
    again = small.forward([], [1] * 9, range(9), states=states, extra=[129, 4, 12])
    assert np.array_equal(again, logits[:9][:, [*range(VOCABULARY), 129, 4, 12]])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_neighbours_threads_and_variants_change_no_bit(data: st.DataObject) -> None:
    """Two rows are read in chunks of any sizes, side by side in any order."""
    model = tiny(data.draw(st.sampled_from(sorted(MODELS))))
    native = Native(model, data.draw(st.sampled_from(["int4", "bfloat16", "float32"])))
    names = st.sampled_from(variants())
    torch.set_num_threads(1)
    library().fr_select(data.draw(names).encode())
    texts = [some_tokens(data.draw(st.integers(1, 24)), seed) for seed in (1, 2)]
    alone = [native.one_by_one(text) for text in texts]
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    library().fr_select(data.draw(names).encode())
    for layer in native.cache.layers:
        layer.both.zero_()
    done = [0, 0]
    outputs = [np.empty((0, VOCABULARY), np.float32)] * 2
    for last in (False, False, False, False, True):
        least = [len(text) if last else at for at, text in zip(done, texts, strict=True)]
        ends = [
            data.draw(st.integers(at, len(text))) for at, text in zip(least, texts, strict=True)
        ]
        entries = [(row, slot) for row in (0, 1) for slot in range(done[row], ends[row])]
        done = ends
        if not entries:
            continue
        which, slots = zip(*entries, strict=True)
        logits = native.forward([texts[row][at] for row, at in entries], which, slots)
        outputs = [
            np.concatenate([output, logits[np.array(which) == row]])
            for row, output in enumerate(outputs)
        ]
    assert all(np.array_equal(output, one) for output, one in zip(outputs, alone, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    parents=st.lists(st.integers(-1, 20), min_size=1, max_size=20),
    length=st.integers(0, 20),
    data=st.data(),
)
def test_nodes_of_a_tree_have_the_bits_of_their_paths(
    parents: list[int], length: int, data: st.DataObject
) -> None:
    native = Native(tiny(data.draw(st.sampled_from(["llama", "mistral", "smollm3"]))), "bfloat16")
    before = some_tokens(length, 3)
    tokens = some_tokens(len(parents), 4)
    trail: list[list[int]] = []
    for node, parent in enumerate(parents):
        parent = min(parent, node - 1)
        trail.append([*(trail[parent] if parent >= 0 else []), node])
    for row in (0, 1):
        if before:
            native.forward(before, [row] * length, range(length))
    logits = native.forward(
        tokens,
        [0] * len(tokens),
        range(length, length + len(tokens)),
        position=[length + len(path) - 1 for path in trail],
        length=[length] * len(tokens),
        paths=[[length + node for node in path] for path in trail],
    )
    for node, path in enumerate(trail):
        alone = native.one_by_one([tokens[ancestor] for ancestor in path], row=1, start=length)
        assert np.array_equal(logits[node], alone[-1])


def test_keys_and_values_are_cut_at_the_largest_half_and_nan_stays() -> None:
    model = tiny("qwen2")
    values = np.array(
        [1e6, -1e6, 65519.0, np.nan, 1e-7, -3e-8, 1.0009765625 + 2**-12, 6.1e-5], np.float32
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias[:8] = torch.from_numpy(values)
    native = Native(model, "bfloat16")
    native.forward([], [0], [0], states=np.zeros((1, 64), np.float32), asked=[])
    both = native.cache.layers[0].both
    with np.errstate(over="ignore"):
        wanted = np.clip(values, -65504, 65504).astype(np.float16)
    assert np.array_equal(both[0, both.shape[1] // 2, 0, :8].numpy(), wanted, equal_nan=True)


FORWARDS = [{name: [value]} for name in ("tokens", "extra") for value in (-1, VOCABULARY)]
FORWARDS += [
    {"row": [4]},
    {"slot": [CAPACITY]},
    {"position": [CAPACITY]},
    {"length": [0]},
    {"length": [CAPACITY + 1]},
]
FORWARDS += [{"paths": [[CAPACITY]]}, {"asked": [1]}]
CHAINS = [
    {"count": 0},
    {"pending": [VOCABULARY]},
    {"max_tokens": CAPACITY + 1},
    {"row": 4},
    {"length": -1},
]


def test_what_does_not_fit_is_refused(small: Native) -> None:
    for wrong in FORWARDS:
        with pytest.raises(RuntimeError, match="sizes that do not fit"):
            small.forward(**{"tokens": [0], "row": [0], "slot": [0], **wrong})
    room = {
        "drafted": np.empty(CAPACITY + 1, np.int32),
        "probabilities": np.empty(CAPACITY + 1, np.float32),
    }

    def chain(pending: Sequence[int] = (1,), **wrong: int) -> int:
        asked = {
            "row": 0,
            "length": 0,
            "count": 1,
            "max_tokens": 3,
            "inverse_temperature": 1,
            "top_p": 1,
        } | wrong
        return small.call("fr_chain", ChainArgument(**asked), pending=pending, **room)

    assert chain() == 3
    for wrong in CHAINS:
        with pytest.raises(RuntimeError, match="sizes that do not fit"):
            chain(**wrong)


def test_busy_loops_and_several_callers_do_not_stop_it(small: Native) -> None:
    torch.set_num_threads(3)
    text = some_tokens(30)
    wanted = small.forward(text, [0] * 30, range(30))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with ThreadPoolExecutor(3) as callers:
            outputs = list(
                callers.map(lambda row: small.forward(text, [row] * 30, range(30)), range(3))
            )
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert all(np.array_equal(output, wanted) for output in outputs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_starts_threads_of_its_own(small: Native) -> None:
    torch.set_num_threads(3)
    text = some_tokens(30)
    wanted = small.forward(text, [0] * 30, range(30))
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(small.forward(text, [0] * 30, range(30)), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(small.forward(text, [0] * 30, range(30)), wanted)


def driven(
    program: str,
    names: Sequence[str] = OWN_VARIANTS,
    start: Sequence[str] = (),
    threads: Sequence[str] = ("1", "3"),
) -> set[bytes]:
    """What the driver writes for each of these variants, by each number of threads."""
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # the driver frees nothing

    def write(asked: tuple[str, str]) -> bytes | None:
        done = subprocess.run([*start, program, *asked], capture_output=True, env=environment)
        if done.returncode == 3:  # this processor lacks the variant
            return None
        assert not done.returncode and not done.stderr, done.stderr.decode()
        return done.stdout

    # Side by side, because ThreadSanitizer lets each program sleep for a second before its end.
    with ThreadPoolExecutor() as pool:
        return set(pool.map(write, product(names, threads))) - {None}


@pytest.mark.slow
def test_every_variant_gives_the_same_bits(tmp_path: Path) -> None:
    """In `make sanitize` the library and the driver are built with AddressSanitizer and UBSan."""
    is_sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    flags = ["-fsanitize=address,undefined", "-g"] if is_sanitized else []
    assert len(driven(compiled(tmp_path, "forward", "cc", HERE / LIBRARY, flags))) == 1


@pytest.mark.slow
def test_threads_have_no_races_and_the_compiler_warns_of_nothing(tmp_path: Path) -> None:
    """ThreadSanitizer looks at each variant."""
    # An optimised build takes a minute, and one that inlines as much takes half of one.
    # `make sanitize` makes one, and lets no warning pass either.
    flags = ("-fsanitize=thread", "-Werror", "-O0", "-g", *UNINLINED)
    library = build(tmp_path / "libforerun.so", "cc", extra=flags)
    program = compiled(tmp_path, "forward", "cc", library, flags)
    assert len(driven(program, threads=["3"])) == 1


@pytest.mark.slow
@needs_cross
def test_aarch64_gives_the_same_bits(tmp_path: Path, shared_folder: Path) -> None:
    (tmp_path / "own").mkdir()
    program = compiled(tmp_path, "forward", CROSS, cross_library(shared_folder))
    own_program = compiled(tmp_path / "own", "forward", "cc", HERE / LIBRARY)
    # The test above compares this machine's other variants with the plain one.
    own = driven(own_program, ["plain"], threads=["1"])
    assert driven(program, list(VARIANT_FLAGS["aarch64"]), QEMU) == own
