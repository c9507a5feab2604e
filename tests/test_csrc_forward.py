"""The C library's forward, bit by bit: what is asked in other pieces, beside other tokens or on other processors."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import MODELS, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from forerun.backends import prepare
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import store
from forerun.csrc.build import HERE, VARIANTS, build
from forerun.csrc.library import BatchArgument, ChainArgument, library, run, variants
from forerun.model.kv_cache import KVCache

VOCABULARY, CAPACITY = 130, 512


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Each test leaves the library with the best variant and torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    library().fr_select(b"")


class Native:
    """A model that runs in C, and a cache of four rows for it, with all that a batch may ask for."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        forward = prepare(store(model, kind)).backend
        assert isinstance(forward, QuantisedForward)
        self.layers, self.embedding = forward.layers, forward.embedding
        self.cache = KVCache(model.config.num_hidden_layers)
        for row in range(4):
            self.cache.add(row, CAPACITY)
        self.layers.rotate_to(CAPACITY)
        self.caches = self.layers.cache(self.cache)

    def call(self, function: str, request: ctypes.Structure, **arrays: Any) -> int:
        kept = {name: np.asarray(each, None if hasattr(each, "dtype") else np.int32) for name, each in arrays.items()}
        for name, array in kept.items():
            setattr(request, name, array.ctypes.data)
        return run(function, ctypes.byref(self.layers.model), self.caches, ctypes.byref(request))

    def forward(self, tokens: Sequence[int], row: Sequence[int], slot: Sequence[int], **more: Any) -> np.ndarray:
        """Logits of the tokens that are asked about, or of all."""
        more = {"position": slot, "length": [each + 1 for each in slot], "asked": range(len(row))} | more
        more |= {"tokens": tokens} if "states" not in more else {}
        logits = np.full((len(more["asked"]), VOCABULARY + len(more.get("extra", ()))), np.nan, dtype=np.float32)
        batch = BatchArgument(n=len(row), asks=len(logits), extras=len(more.get("extra", ())))
        if paths := more.get("paths"):
            batch.path = max(map(len, paths))
            more["seen"] = [len(path) for path in paths]
            more["paths"] = [[*path, *[-9] * (batch.path - len(path))] for path in paths]
        self.call("fr_forward", batch, row=row, slot=slot, logits=logits, **more)
        return logits

    def one_by_one(self, tokens: Sequence[int], row: int = 0, start: int = 0) -> np.ndarray:
        return np.concatenate([self.forward([token], [row], [start + k]) for k, token in enumerate(tokens)])


@pytest.fixture(scope="module")
def small() -> Native:
    """A model with biases, in few bits."""
    return Native(tiny("qwen2"), "int4")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def test_many_tokens_have_the_bits_of_single_ones(small: Native) -> None:
    tokens = some_tokens(300)
    found = small.forward(tokens, [0] * 300, range(300))
    assert np.array_equal(found, small.one_by_one(tokens, row=1))
    last = small.forward(tokens, [2] * 300, range(300), asked=[299, 0, 130, 131, 131])
    assert np.array_equal(last, found[[299, 0, 130, 131, 131]])
    # States stand for tokens, and other tokens' logits may follow all.
    states = small.embedding.floats(tokens[:9]).numpy()
    again = small.forward([], [1] * 9, range(9), states=states, extra=[129, 4, 12])
    assert np.array_equal(again, found[:9][:, [*range(VOCABULARY), 129, 4, 12]])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_neighbours_threads_and_variants_change_no_bit(data: st.DataObject) -> None:
    """Two rows are read in chunks of any sizes, side by side in any order."""
    native = Native(tiny(data.draw(st.sampled_from(sorted(MODELS)))), data.draw(st.sampled_from(["int4", "bfloat16"])))
    names = st.sampled_from(variants())
    torch.set_num_threads(1)
    library().fr_select(data.draw(names).encode())
    texts = [some_tokens(data.draw(st.integers(1, 24)), seed) for seed in (1, 2)]
    alone = [native.one_by_one(text) for text in texts]
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    library().fr_select(data.draw(names).encode())
    for layer in native.cache.layers:
        layer.both.zero_()
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))) for text in texts]
    ends = list(
        zip(*([*own, *[len(text)] * (5 - len(own))] for own, text in zip(cuts, texts, strict=True)), strict=True)
    )
    found: list[list[np.ndarray]] = [[], []]
    for starts, stops in zip([(0, 0), *ends], ends, strict=False):
        entries = [(row, slot) for row in (0, 1) for slot in range(starts[row], stops[row])]
        if not entries:
            continue
        which, slots = zip(*entries, strict=True)
        logits = native.forward([texts[row][at] for row, at in entries], which, slots)
        for row in (0, 1):
            found[row].append(logits[[own == row for own in which]])
    assert all(np.array_equal(np.concatenate(own), one) for own, one in zip(found, alone, strict=True))


@settings(max_examples=25, deadline=None)
@given(parents=st.lists(st.integers(-1, 20), min_size=1, max_size=20), length=st.integers(0, 20), data=st.data())
def test_nodes_of_a_tree_have_the_bits_of_their_paths(parents: list[int], length: int, data: st.DataObject) -> None:
    native = Native(tiny(data.draw(st.sampled_from(["llama", "mistral", "smollm3"]))), "bfloat16")
    before, tokens = some_tokens(length, 3), some_tokens(len(parents), 4)
    trail: list[list[int]] = []
    for node, parent in enumerate(parents):
        parent = min(parent, node - 1)
        trail.append([*(trail[parent] if parent >= 0 else []), node])
    for row in (0, 1):
        if before:
            native.forward(before, [row] * length, range(length))
    found = native.forward(
        tokens,
        [0] * len(tokens),
        range(length, length + len(tokens)),
        position=[length + len(own) - 1 for own in trail],
        length=[length] * len(tokens),
        paths=[[length + node for node in own] for own in trail],
    )
    for node, own in enumerate(trail):
        path = native.one_by_one([tokens[each] for each in own], row=1, start=length)
        assert np.array_equal(found[node], path[-1])


def test_keys_and_values_are_cut_at_the_largest_half_and_nan_stays() -> None:
    model = tiny("qwen2")
    values = np.array([1e6, -1e6, 65519.0, np.nan, 1e-7, -3e-8, 1.0009765625 + 2**-12, 6.1e-5], np.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias[:8] = torch.from_numpy(values)
    native = Native(model, "bfloat16")
    native.forward([], [0], [0], states=np.zeros((1, 64), np.float32), asked=[])
    both = native.cache.layers[0].both
    with np.errstate(over="ignore"):
        wanted = np.clip(values, -65504, 65504).astype(np.float16)
    assert np.array_equal(both[0, both.shape[1] // 2, 0, :8].numpy(), wanted, equal_nan=True)


FORWARDS = [{name: [value]} for name in ("tokens", "extra") for value in (-1, VOCABULARY)]
FORWARDS += [{"row": [4]}, {"slot": [CAPACITY]}, {"position": [CAPACITY]}, {"length": [0]}, {"length": [CAPACITY + 1]}]
FORWARDS += [{"paths": [[CAPACITY]]}, {"asked": [1]}]
CHAINS = [{"count": 0}, {"pending": [VOCABULARY]}, {"most": CAPACITY + 1}, {"row": 4}, {"length": -1}]


def test_what_does_not_fit_is_refused(small: Native) -> None:
    for wrong in FORWARDS:
        with pytest.raises(RuntimeError, match="sizes that do not fit"):
            small.forward(**{"tokens": [0], "row": [0], "slot": [0], **wrong})
    room = {"drafted": np.empty(CAPACITY + 1, np.int32), "chances": np.empty(CAPACITY + 1, np.float32)}
    for wrong in [{}, *CHAINS]:
        asked = {"row": 0, "length": 0, "count": 1, "most": 3, "turn": 1, "top_p": 1} | wrong
        pending = asked.pop("pending", [1])
        if not wrong:
            assert small.call("fr_chain", ChainArgument(**asked), pending=pending, **room) == 3
            continue
        with pytest.raises(RuntimeError, match="sizes that do not fit"):
            small.call("fr_chain", ChainArgument(**asked), pending=pending, **room)


def test_busy_loops_and_several_callers_do_not_stop_it(small: Native) -> None:
    torch.set_num_threads(3)
    text = some_tokens(30)
    wanted = small.forward(text, [0] * 30, range(30))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    found: list[np.ndarray] = []
    callers = [
        threading.Thread(target=lambda row=row: found.append(small.forward(text, [row] * 30, range(30))))
        for row in range(3)
    ]
    try:
        for each in callers:
            each.start()
        for each in callers:
            each.join()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert len(found) == 3 and all(np.array_equal(each, wanted) for each in found)


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


DRIVER = r"""
#include "forward.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { WIDTH = 96, HEADS = 6, GROUPS = 2, SIZE = 16, INNER = 352, LAYERS = 3, VOCABULARY = 157, CAPACITY = 64,
        ROWS = 2 };
static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float *numbers(int n, float size) {
    float *found = malloc(sizeof(float) * n);
    for (int i = 0; i < n; i++) found[i] = size * ((int)(next() % 2001) - 1000) / 1000;
    return found;
}
static fr_matrix matrix(int outputs, int inputs) {
    fr_matrix found = {0, outputs, inputs, NULL};
    size_t size = (fr_panel_bytes(FR_Q4_0, outputs, inputs, &found.layout) + 63) / 64 * 64,
            bytes = (size_t)outputs * inputs / 32 * 18;
    uint8_t *rows = malloc(bytes), *panels = aligned_alloc(64, size);
    for (size_t i = 0; i < bytes; i++) rows[i] = i % 18 == 0 ? next() : i % 18 == 1 ? 0x28 : next();
    /* scales near 1/32 */
    if (fr_pack_all(FR_Q4_0, rows, bytes, outputs, inputs, panels)) exit(5);
    found.panels = panels;
    free(rows);
    return found;
}
int main(int argc, char **argv) { /* variant, threads; out: logits, states, keys and values, what is drafted */
    if (argc != 3 || fr_select(argv[1]) < 0) return 3;
    fr_threads(atoi(argv[2]));
    int kept = GROUPS * SIZE, n = 40;
    fr_layer layers[LAYERS];
    fr_cache caches[LAYERS];
    static uint16_t memory[LAYERS][2][ROWS][GROUPS][CAPACITY][SIZE];
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (fr_layer){matrix(HEADS * SIZE, WIDTH), matrix(kept, WIDTH), matrix(kept, WIDTH), matrix(WIDTH,
                HEADS * SIZE),
                               matrix(INNER, WIDTH), matrix(INNER, WIDTH), matrix(WIDTH, INNER), numbers(WIDTH, 2),
                                       numbers(WIDTH, 2),
                               numbers(HEADS * SIZE, 1), numbers(kept, 1), numbers(kept, 1), numbers(SIZE, 3),
                                       numbers(SIZE, 3),
                               i == 1 ? 5 : 0, i == 2 ? 0 : SIZE};
        caches[i] = (fr_cache){memory[i][0][0][0][0], memory[i][1][0][0][0], kept * CAPACITY, CAPACITY * SIZE,
                ROWS, CAPACITY};
    }
    fr_model model = {WIDTH, HEADS, GROUPS, SIZE, LAYERS, CAPACITY, VOCABULARY, FR_F32, layers, numbers(WIDTH, 2),
                      numbers(CAPACITY * SIZE / 2, 1), numbers(CAPACITY * SIZE / 2, 1), numbers(VOCABULARY * WIDTH,
                              1), WIDTH * sizeof(float),
                      matrix(VOCABULARY, WIDTH), .eps = 1e-6f};
    int32_t token[40], row[40], slot[40], length[40], seen[40], paths[40][2],
            extra[] = {3, 150}, ends[] = {-1};
    static float logits[40][VOCABULARY + 2], normed[40][WIDTH], chances[20];
    for (int i = 0; i < n; i++) { /* row 0: a chain; row 1: pairs of siblings and a child of each second one,
            after the first 10 */
        token[i] = next() % VOCABULARY, row[i] = i >= 20, slot[i] = length[i] = i % 20, seen[i] = 0;
        if (i < 30) length[i]++;
        else seen[i] = 1 + i % 2, length[i] = 10, paths[i][0] = slot[i] - i % 2, paths[i][1] = slot[i];
    }
    fr_batch batch = {.n = n, .path = 2, .tokens = token, .row = row, .slot = slot, .position = slot,
            .length = length, .seen = seen,
                      .paths = paths[0], .normed = normed[0], .asked = slot, .extra = extra,
                      .logits = logits[0], .asks = 20, .extras = 2};
    int32_t drafted[20];
    fr_chain_request chain = {.row = 0, .length = 20, .count = 5, .most = 20, .pending = token, .ends = ends,
            .ended = 1, .drafted = drafted,
                              .chances = chances, .extra = extra, .extras = 2};
    if (fr_forward(&model, caches, &batch) || fr_chain(&model, caches, &chain) != 20) return 4;
    for (int i = 0; i < 20; i++)
        for (int k = 0; k < VOCABULARY + 2; k++)
            if (!isfinite(logits[i][k])) return 6;
    fwrite(logits, sizeof logits, 1, stdout), fwrite(normed, sizeof normed, 1, stdout);
    fwrite(drafted, sizeof drafted, 1, stdout), fwrite(chances, sizeof chances, 1, stdout);
    fr_matrix information = matrix(VOCABULARY, 32);
    model.fuse = matrix(WIDTH, 2 * WIDTH), model.alone = matrix(WIDTH, WIDTH);
    chain.row = 1, chain.count = 3, chain.extras = 0, chain.states = numbers(3 * WIDTH, 1), chain.logits = logits[0];
    chain.old = numbers(4 * VOCABULARY, 1), chain.olds = 4, chain.weight = 0.5f;
    chain.information = &information, chain.token_states = numbers(VOCABULARY * 32, 1);
    if (fr_chain(&model, caches, &chain) != 20) return 7;
    chain.length = 42, chain.count = 1, chain.start = 20, chain.most = 5, chain.logits += 20 * VOCABULARY;
    if (fr_chain(&model, caches, &chain) != 5) return 8;
    fwrite(logits, sizeof logits, 1, stdout), fwrite(memory, sizeof memory, 1, stdout);
    fwrite(drafted, sizeof drafted, 1, stdout), fwrite(chances, sizeof chances, 1, stdout);
    return 0;
}
"""
CROSS = "aarch64-linux-gnu-gcc"
HAS_CROSS = shutil.which(CROSS) and shutil.which("qemu-aarch64")


def driven(
    folder: Path, compiler: str, machine: str, flags: Sequence[str] = (), start: Sequence[str] = ()
) -> set[bytes]:
    """What the driver writes for each variant, by 1 and by 3 threads."""
    build(folder / "libforerun.so", compiler, machine, tuple(flags))
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, "-O1", *flags, f"-I{HERE}", "driver.c", "libforerun.so", "-o", "driver", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, cwd=folder, check=True)
    found = set()
    for variant in VARIANTS.get(machine or platform.machine(), ["plain"]):
        for threads in ("1", "3"):
            command = [*start, str(folder / "driver"), variant, threads]
            own = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # the driver frees nothing
            done = subprocess.run(command, capture_output=True, env=own)
            if done.returncode != 3:  # this processor has the variant
                assert not done.returncode and not done.stderr, done.stderr.decode()
                found.add(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-fsanitize=address,undefined", "-fsanitize=thread"])
def test_sanitizers_find_nothing_and_every_variant_gives_the_same_bits(tmp_path: Path, flags: str) -> None:
    assert len(driven(tmp_path, "cc", "", [flags, "-O1", "-g", "-w"])) == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CROSS, reason="needs a cross compiler for aarch64 and qemu-user")
def test_aarch64_gives_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    qemu = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    assert driven(tmp_path, CROSS, "aarch64", start=qemu) == driven(tmp_path / "own", "cc", "")
