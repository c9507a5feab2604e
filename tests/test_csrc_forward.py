"""The C library's forward and its chain, against transformers, and against themselves bit by bit."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from forerun.csrc.build import HERE, VARIANTS, build
from forerun.csrc.library import BatchArgument as Batch
from forerun.csrc.library import CacheArgument as Cache
from forerun.csrc.library import ChainArgument as Chain
from forerun.csrc.library import LayerArgument as Layer
from forerun.csrc.library import MatrixArgument as Matrix
from forerun.csrc.library import ModelArgument as Model
from forerun.sampling.seeded import SeededStream as Races

_P = ctypes.c_void_p
FORMATS = {"Q4_0": 3, "Q4_1": 4, "Q8_0": 7, "F32": 10}


STRUCTURES = Layer, Model, Cache, Batch, Chain


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, with functions that refuse by raising ValueError."""
    found = ctypes.CDLL(str(build(tmp_path_factory.mktemp("csrc") / "library.so")))
    found.fr_panel_bytes.restype = ctypes.c_size_t
    found.fr_panel_bytes.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, _P]
    found.fr_pack.argtypes = [ctypes.c_int, _P, ctypes.c_size_t, *[ctypes.c_int] * 2, _P, *[ctypes.c_int] * 2]
    found.fr_select.argtypes = [ctypes.c_char_p]
    found.fr_forward.argtypes = found.fr_chain.argtypes = [_P, _P, _P]
    found.fr_select(b"")
    return found


def variants(library: Any) -> list[bytes]:
    """Those that this machine runs."""
    names = (b"plain", b"avx2", b"avxvnni", b"avx512vnni", b"neon")
    found = [name for name in names if library.fr_select(name) >= 0]
    library.fr_select(b"")
    return found


def pointer(array: np.ndarray | None) -> int | None:
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data


def ints(values: Any) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


@dataclass
class Native:
    """A model of transformers in the library's structures, and a cache for it."""

    library: Any
    model: Any
    layout: str = "F32"
    rows: int = 3
    capacity: int = 320
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, state = self.model.config, self.model.state_dict()
        self.config = config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.groups, self.size = config.num_key_value_heads, size
        rotated = torch.zeros(1, self.capacity, config.hidden_size), torch.arange(self.capacity)[None]
        cos, sin = (self.array(part[0, :, : size // 2]) for part in self.model.model.rotary_emb(*rotated))
        layers = (Layer * config.num_hidden_layers)()
        for number, layer in enumerate(layers):
            start = f"model.layers.{number}."
            for name in ("q", "k", "v", "o"):
                setattr(layer, name, self.matrix(state, f"{start}self_attn.{name}_proj.weight"))
            for name in ("gate", "up", "down"):
                setattr(layer, name, self.matrix(state, f"{start}mlp.{name}_proj.weight"))
            layer.first = pointer(self.array(state[start + "input_layernorm.weight"]))
            layer.second = pointer(self.array(state[start + "post_attention_layernorm.weight"]))
            for name in ("q", "k", "v"):
                if (bias := state.get(f"{start}self_attn.{name}_proj.bias")) is not None:
                    setattr(layer, f"{name}_bias", pointer(self.array(bias)))
                if (gain := state.get(f"{start}self_attn.{name}_norm.weight")) is not None:
                    setattr(layer, f"{name}_norm", pointer(self.array(gain)))
            kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
            slides = kinds[number] == "sliding_attention" or config.model_type == "mistral"
            layer.window = (config.sliding_window or 0) if slides else 0
            layer.turned = size if getattr(config, "no_rope_layers", [1] * len(layers))[number] else 0
        embed = self.array(state["model.embed_tokens.weight"])
        self.kept.append(layers)
        self.argument = Model(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=self.groups,
            size=size,
            layers=len(layers),
            positions=self.capacity,
            vocabulary=config.vocab_size,
            embed_format=FORMATS["F32"],
            layer=ctypes.addressof(layers),
            norm=pointer(self.array(state["model.norm.weight"])),
            cos=pointer(cos),
            sin=pointer(sin),
            embed=pointer(embed),
            embed_row=embed.strides[0],
            head=self.matrix(state, "lm_head.weight"),
            eps=config.rms_norm_eps,
        )
        self.embed = embed
        shape = len(layers), self.rows, 2 * self.groups, self.capacity, size
        self.memory = np.zeros(shape, dtype=np.float16)
        self.caches = (Cache * len(layers))(
            *(
                Cache(
                    keys=pointer(own),
                    values=own[:, self.groups :].ctypes.data,
                    row=own.strides[0] // 2,
                    group=own.strides[1] // 2,
                    rows=self.rows,
                    capacity=self.capacity,
                )
                for own in self.memory
            )
        )

    def array(self, part: torch.Tensor) -> np.ndarray:
        self.kept.append(np.ascontiguousarray(part.detach().float().numpy()))
        return self.kept[-1]

    def matrix(self, state: dict[str, torch.Tensor], name: str) -> Matrix:
        """A packed weight, whose values the model of transformers has from now on as well."""
        weight = self.array(state[name])
        if self.layout == "F32":
            return self.packed(weight, *weight.shape)
        kind = gguf.GGMLQuantizationType[self.layout]
        stored = gguf.quants.quantize(weight, kind)
        state[name].copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
        return self.packed(stored, *weight.shape)

    def packed(self, stored: np.ndarray, outputs: int, inputs: int) -> Matrix:
        layout, format = ctypes.c_int32(), FORMATS[self.layout]
        size = self.library.fr_panel_bytes(format, outputs, inputs, ctypes.byref(layout))
        panels = np.empty(size + 64, dtype=np.uint8)
        panels = panels[-panels.ctypes.data % 64 :][:size]
        args = pointer(stored), stored.nbytes, outputs, inputs, pointer(panels)
        assert size and not self.library.fr_pack(format, *args, 0, -(-outputs // 8))
        self.kept += [stored, panels]
        return Matrix(layout.value, outputs, inputs, panels.ctypes.data)

    def part_of_head(self, tokens: Sequence[int]) -> Matrix:
        """A head of these tokens alone."""
        weight = self.model.lm_head.weight.detach().numpy()[tokens]
        kind = gguf.GGMLQuantizationType[self.layout]
        stored = weight if self.layout == "F32" else gguf.quants.quantize(weight, kind)
        return self.packed(np.ascontiguousarray(stored), *weight.shape)

    def forward(
        self,
        tokens: Sequence[int],
        row: Sequence[int],
        slot: Sequence[int],
        *,
        position: Sequence[int] | None = None,
        length: Sequence[int] | None = None,
        paths: Sequence[Sequence[int]] | None = None,
        head: Matrix | None = None,
        extra: Sequence[int] = (),
        states: np.ndarray | None = None,
        asked: Sequence[int] | None = None,
    ) -> Any:
        """Logits, and states after the last norm."""
        n, d = len(row), self.argument.d
        length = [each + 1 for each in slot] if length is None else length
        longest = max(map(len, paths)) if paths is not None else 0
        asked = list(range(n)) if asked is None else asked
        outputs = (head or self.argument.head).outputs + len(extra)
        logits = np.full((len(asked), outputs), np.nan, dtype=np.float32)
        normed = np.empty((n, d), np.float32)
        arrays = {
            "tokens": None if states is not None else ints(tokens),
            "states": states,
            "row": ints(row),
            "slot": ints(slot),
            "position": ints(slot if position is None else position),
            "length": ints(length),
            "asked": ints(asked),
            "extra": ints(extra),
            "normed": normed,
            "logits": logits,
        }
        if paths is not None:
            arrays["seen"] = ints([len(path) for path in paths])
            arrays["paths"] = ints([[*path, *[-9] * (longest - len(path))] for path in paths])
        batch = Batch(n=n, path=longest, asks=len(asked), extras=len(extra))
        for name, array in arrays.items():
            setattr(batch, name, pointer(array))
        batch.head = None if head is None else ctypes.addressof(head)
        if code := self.library.fr_forward(ctypes.byref(self.argument), self.caches, ctypes.byref(batch)):
            raise ValueError(code)
        return SimpleNamespace(logits=logits, normed=normed)

    def one_by_one(self, tokens: Sequence[int], row: int = 0, start: int = 0, **more: Any) -> np.ndarray:
        parts = [self.forward([token], [row], [start + k], **more).logits for k, token in enumerate(tokens)]
        return np.concatenate(parts)

    def chain(self, row: int, length: int, pending: Sequence[int], most: int, **more: Any) -> Any:
        """Drafted tokens, their probabilities and distributions."""
        request = Chain(row=row, length=length, count=len(pending), most=most, turn=1, top_p=1)
        head = more.pop("head", None)
        drafted, chances = np.full(most, -1, np.int32), np.empty(most, np.float32)
        size = (head or self.argument.head).outputs + len(more.get("extra", ()))
        arrays = {"pending": ints(pending), "drafted": drafted, "chances": chances}
        arrays |= {name: ints(more.pop(name)) for name in ("names", "places", "extra", "ends") if name in more}
        if "numbers" in more:
            arrays["numbers"] = np.asarray(more.pop("numbers"), np.float64)
        if "keys" in more:
            arrays["keys"] = np.asarray(more.pop("keys"), np.uint64)
        probs = np.empty((most, size), np.float32)
        if "numbers" in arrays or "keys" in arrays:
            arrays["probs"] = probs
        for name, array in arrays.items():
            setattr(request, name, pointer(array))
        request.head = None if head is None else ctypes.addressof(head)
        request.extras, request.ended = len(arrays.get("extra", ())), len(arrays.get("ends", ()))
        for name, value in more.items():
            setattr(request, name, value)
        count = self.library.fr_chain(ctypes.byref(self.argument), self.caches, ctypes.byref(request))
        if count < 0:
            raise ValueError(count)
        return SimpleNamespace(drafted=drafted[:count].tolist(), chances=chances[:count], probs=probs[:count])


SIZES: dict[str, Any] = {
    "vocab_size": 157,
    "hidden_size": 96,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES | {"head_dim": 32, "sliding_window": 7}),
    "qwen2": Qwen2Config(**SIZES | {"num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SIZES | {"head_dim": 64, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "smollm3": SmolLM3Config(
        **SIZES
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    ),
}


def made(library: Any, family: str, layout: str = "F32") -> Native:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, part in model.named_parameters():
            if "norm" in name:
                part.uniform_(0.5, 1.5)
            if "bias" in name:
                part.normal_(0, 0.5)
        return Native(library, model, layout)


@pytest.fixture(scope="module")
def small(library: Any) -> Native:
    """A model with biases, in few bits."""
    return made(library, "qwen2", "Q4_0")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], count).tolist()


def expected(native: Native, tokens: Sequence[int]) -> Any:
    with torch.no_grad():
        return native.model(torch.tensor([tokens]), output_hidden_states=True)


def test_structures_have_the_sizes_of_ours(library: Any) -> None:
    sizes = (ctypes.c_int32 * 32)()
    count = library.fr_sizes(sizes, 32)
    assert [*sizes][count - len(STRUCTURES) : count] == [ctypes.sizeof(each) for each in STRUCTURES]


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_states_are_those_of_transformers(library: Any, family: str) -> None:
    native, tokens = made(library, family), some_tokens(40)
    found = native.forward(tokens, [1] * 40, range(40))
    real = expected(native, tokens)
    logits = real.logits[0].numpy()
    assert np.abs(found.logits - logits).max() < 0.01 * logits.std()
    states = real.hidden_states[-1]
    assert np.abs(found.normed - states[0].numpy()).max() < 0.01 * states.std()


@pytest.mark.parametrize(("layout", "bound"), [("Q8_0", 0.05), ("Q4_1", 0.05), ("Q4_0", 0.05)])
def test_few_bits_are_the_dequantised_model_but_for_the_inputs_rounding(
    library: Any, layout: str, bound: float
) -> None:
    native, tokens = made(library, "llama", layout), some_tokens(40)
    found, logits = native.forward(tokens, [0] * 40, range(40)).logits, expected(native, tokens).logits[0].numpy()
    assert np.sqrt(np.mean((found - logits) ** 2)) < bound * logits.std()


def test_many_tokens_have_the_bits_of_single_ones(library: Any, small: Native) -> None:
    tokens = some_tokens(300)
    found = small.forward(tokens, [0] * 300, range(300))
    assert np.array_equal(found.logits, small.one_by_one(tokens, row=1))
    last = small.forward(tokens, [2] * 300, range(300), asked=[299, 0, 130, 131, 131])
    assert np.array_equal(last.logits, found.logits[[299, 0, 130, 131, 131]])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_neighbours_threads_and_variants_change_no_bit(library: Any, data: st.DataObject) -> None:
    """Two rows are read in chunks of any sizes, side by side in any order."""
    native = made(library, data.draw(st.sampled_from(sorted(CONFIGS))), data.draw(st.sampled_from(["Q4_0", "F32"])))
    library.fr_threads(1)
    library.fr_select(data.draw(st.sampled_from(variants(library))))
    texts = [some_tokens(data.draw(st.integers(1, 24)), seed) for seed in (1, 2)]
    alone = [native.one_by_one(text) for text in texts]
    library.fr_threads(data.draw(st.integers(1, 3)))
    library.fr_select(data.draw(st.sampled_from(variants(library))))
    native.memory[:] = 0
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
        logits = native.forward([texts[row][at] for row, at in entries], which, slots).logits
        for row in (0, 1):
            found[row].append(logits[[own == row for own in which]])
    assert all(np.array_equal(np.concatenate(own), one) for own, one in zip(found, alone, strict=True))
    library.fr_select(b"")


@settings(max_examples=25, deadline=None)
@given(parents=st.lists(st.integers(-1, 20), min_size=1, max_size=20), length=st.integers(0, 20), data=st.data())
def test_nodes_of_a_tree_have_the_bits_of_their_paths(
    library: Any, parents: list[int], length: int, data: st.DataObject
) -> None:
    native = made(library, data.draw(st.sampled_from(["llama", "mistral", "smollm3"])))
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
        assert np.array_equal(found.logits[node], path[-1])


def test_states_stand_for_tokens(small: Native) -> None:
    tokens = some_tokens(9)
    plain = small.forward(tokens, [0] * 9, range(9))
    found = small.forward([], [1] * 9, range(9), states=np.ascontiguousarray(small.embed[tokens]))
    assert np.array_equal(found.logits, plain.logits)


def test_a_hot_head_has_the_bits_of_the_whole_one(small: Native) -> None:
    tokens, hot, extra = some_tokens(12), [5, 1, 99, 140, 17, 8, 0, 2, 3, 77, 31], [156, 4, 12]
    whole = small.forward(tokens, [0] * 12, range(12)).logits
    found = small.forward(tokens, [1] * 12, range(12), head=small.part_of_head(hot), extra=extra).logits
    assert np.array_equal(found, whole[:, hot + extra])


def greedy(native: Native, text: Sequence[int], count: int, allowed: Sequence[int]) -> list[int]:
    logits, found = native.one_by_one(text, row=2)[-1], []
    for at in range(count):
        found.append(min(allowed, key=lambda token: (-logits[token], token)))
        logits = native.one_by_one(found[-1:], row=2, start=len(text) + at)[-1]
    return found


def test_a_chain_is_repeated_forwards(small: Native) -> None:
    text = some_tokens(20, 5)
    small.forward(text[:17], [1] * 17, range(17))
    found = small.chain(1, 17, text[17:], 12)
    assert found.drafted == greedy(small, text, 12, range(157))
    logits = small.one_by_one([*text, *found.drafted], row=2)[19:31].astype(np.float64)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = probabilities.max(1) / probabilities.sum(1)
    assert np.allclose(found.chances, probabilities, rtol=1e-5)
    for stop in ({"ends": found.drafted[3:5]}, {"least": float(sorted(found.chances)[2])}, {"product": 0.2}):
        shorter = small.chain(1, 17, text[17:], 12, **stop).drafted
        ends, least, product = stop.get("ends", []), stop.get("least", 0), stop.get("product", 0)
        running = np.cumprod(found.chances)
        stops = [
            k
            for k, token in enumerate(found.drafted)
            if token in ends or not found.chances[k] >= least or not running[k] >= product
        ]
        assert shorter == found.drafted[: min([11, *stops]) + 1]


def test_a_chain_with_a_hot_head_drafts_its_tokens_alone(small: Native) -> None:
    hot, extra, text = list(range(150, 20, -3)), [4, 12, 156], some_tokens(10, 6)
    places = [hot.index(token) if token in hot else -1 for token in range(157)]
    how = {"head": small.part_of_head(hot), "names": hot, "places": places, "extra": extra}
    small.forward(text[:9], [1] * 9, range(9))
    assert small.chain(1, 9, text[9:], 10, **how).drafted == greedy(small, text, 10, hot + extra)
    races = [Races(5).at(position) for position in range(10, 20)]
    found = small.chain(1, 9, text[9:], 10, **how, keys=[race.key for race in races], among=157, turn=0.3, top_p=0.95)
    names = np.array(hot + extra)
    logits = small.one_by_one([*text, *found.drafted], row=2)[9:19, names]
    for race, own, token in zip(races, logits, found.drafted, strict=True):
        probs = torch.from_numpy(own).mul(0.3).softmax(0)
        best, order = probs.sort(descending=True)
        probs[order[best.cumsum(0) - best >= 0.95]] = 0
        own_race = type(race)(race.key, names, 157)
        assert names[own_race.sample(probs / probs.sum())] == token


def test_a_chain_is_sampled_by_the_given_numbers(small: Native) -> None:
    text, numbers = some_tokens(10, 6), np.random.default_rng(0).random(8)
    found = small.chain(0, 0, text, 8, numbers=numbers, turn=0.5)
    logits = small.one_by_one([*text, *found.drafted], row=2)[9:17].astype(np.float64) * 0.5
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    assert np.allclose(found.probs, probs, atol=1e-6)
    ends = np.cumsum(found.probs.astype(np.float64), 1)
    assert found.drafted == [int((own <= number * own[-1]).sum()) for own, number in zip(ends, numbers, strict=True)]
    assert np.array_equal(found.chances, found.probs[range(8), found.drafted])


def test_keys_and_values_are_cut_at_the_largest_half_and_nan_stays(library: Any) -> None:
    native = made(library, "qwen2")
    values = np.zeros(native.groups * native.size, np.float32)
    values[:8] = 1e6, -1e6, 65519.0, np.nan, 1e-7, -3e-8, 1.0009765625 + 2**-12, 6.1e-5
    native.kept.append(values)
    state = np.zeros((1, native.argument.d), np.float32)
    for layer in native.kept:
        if isinstance(layer, ctypes.Array):
            layer[0].v_bias = pointer(values)
    native.forward([], [0], [0], states=state, asked=[])
    stored = native.memory[0, 0, native.groups, 0, :8]
    with np.errstate(over="ignore"):
        wanted = np.clip(values[:8], -65504, 65504).astype(np.float16)
    assert np.array_equal(stored, wanted, equal_nan=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [157]},
        {"tokens": [-1]},
        {"row": [3]},
        {"slot": [320]},
        {"position": [320]},
        {"length": [0]},
        {"length": [321]},
        {"paths": [[320]]},
        {"asked": [1]},
        {"extra": [157]},
    ],
)
def test_what_does_not_fit_is_refused(small: Native, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="-1"):
        small.forward(**{"tokens": [0], "row": [0], "slot": [0], **wrong})
    for request in ({"pending": []}, {"pending": [157]}, {"most": 400}, {"row": 3}, {"length": -1}):
        with pytest.raises(ValueError, match="-1"):
            small.chain(**{"row": 0, "length": 0, "pending": [1], "most": 3, **request})


def test_busy_loops_and_several_callers_do_not_stop_it(library: Any, small: Native) -> None:
    library.fr_threads(3)
    text = some_tokens(30)
    wanted = small.forward(text, [0] * 30, range(30)).logits
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    found: list[np.ndarray] = []
    callers = [
        threading.Thread(target=lambda row=row: found.append(small.forward(text, [row] * 30, range(30)).logits))
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
def test_a_fork_starts_threads_of_its_own(library: Any, small: Native) -> None:
    library.fr_threads(3)
    text = some_tokens(30)
    wanted = small.forward(text, [0] * 30, range(30)).logits
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(small.forward(text, [0] * 30, range(30)).logits, wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(small.forward(text, [0] * 30, range(30)).logits, wanted)


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
                      matrix(VOCABULARY, WIDTH), 1e-6f};
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
    fwrite(memory, sizeof memory, 1, stdout), fwrite(drafted, sizeof drafted, 1, stdout), fwrite(chances,
            sizeof chances, 1, stdout);
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
