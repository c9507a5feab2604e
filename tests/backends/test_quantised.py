"""Weights in few bits: what is stored, and that a row's bits do not depend on its neighbours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from forerun import load
from forerun.api.loading import load_model
from forerun.backends import prepare, warn_without_kernels
from forerun.backends.facts import facts_of
from forerun.backends.panels import Dense, RawMatrix, quantise
from forerun.backends.quantised import QuantisedForward, lay_out
from forerun.backends.stored import STORED_TYPES, StoredEmbedding, is_stored, store
from forerun.csrc.library import library
from forerun.engine.draft import Draft
from forerun.model.batch import Inputs
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from forerun.model.kv_cache import KVCache
from tests.support.families import MODELS, tiny
from tests.support.toys import join_all, refuses

KINDS = ("int4", "int8", "bfloat16")
METHODS = (
    "ar",
    "sd",
    "suffix",
    "hybrid",
    "ouroboros",
    "pacer",
    "pacer-ouroboros",
    "lyanna",
    "pacer-lyanna",
)


@pytest.mark.parametrize(("kind", "steps"), [("int4", 15), ("int8", 254)])
def test_quantising_loses_half_a_step_at_most(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    blocks = weight.unflatten(1, (-1, 32))
    size = blocks.amax(-1) - blocks.amin(-1) if kind == "int4" else 2 * blocks.abs().amax(-1)
    apart = (quantise(weight, STORED_TYPES[kind]).floats() - weight).abs().unflatten(1, (-1, 32))
    assert (apart <= size[..., None] / steps * 0.51 + 1e-3 * blocks.abs()).all()
    assert torch.equal(
        quantise(torch.zeros(3, 32), STORED_TYPES[kind]).floats(), torch.zeros(3, 32)
    )


SHAPES = [
    (3, 1, 64),
    (9, 1, 64),
    (3, 1, 128),
    (4, 1, 96),
    (2, 1, 256),
]  # numbers of heads, and their size


@pytest.mark.parametrize(
    ("name", "kind", "heads"),
    [
        *[(name, kind, None) for name in MODELS for kind in KINDS],
        *[("llama", "int8", heads) for heads in SHAPES],
    ],
)
def test_the_forward_is_transformers_own(
    name: str, kind: str, heads: tuple[int, int, int] | None
) -> None:
    """Both run the same stored weights; they round in other places."""
    sizes: dict[str, int] = {}
    if heads is not None:
        sizes = dict(
            zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)
        )
        sizes["hidden_size"] = 32 * heads[0]
    model = store(tiny(name, **sizes), kind)
    quick = prepare(model)
    assert isinstance(quick.backend, QuantisedForward)
    assert f"C for {library().fr_variant().decode()}" == facts_of(quick)["kernel"]
    tokens = [torch.randint(3, 130, (size,)).tolist() for size in (300, 7, 40)]
    drafts = [Draft.chain(5, [6, 7]), Draft([5, 9, 9, 11, 12], [-1, 0, 0, 1, 2]), Draft.root(8)]
    outputs = []
    for lm in (quick, CausalLM(copy.deepcopy(model))):
        for id, prompt in enumerate(tokens):
            lm.add(id)
            lm.extend([id], [prompt])
        output = lm.forward([0, 1, 2], drafts, "head")
        outputs.append((torch.cat(output.logits), torch.cat(output.hidden or [])))
    assert outputs[0][0].dtype == torch.float32
    for numbers, wanted in zip(*outputs, strict=True):  # logits, and states
        assert (numbers - wanted).abs().max() < (0.01 if kind == "bfloat16" else 0.1) * wanted.std()


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_torch_has_the_same_weights(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "none")
    warn_without_kernels.cache_clear()
    model = store(tiny(name), kind)
    plain = prepare(model)
    assert "weights in few bits run on torch's kernels: FORERUN_KERNELS is none" in caplog.text
    assert isinstance(plain.backend, EagerForward) and plain.exact == "rounding"
    assert facts_of(plain)["kernel"] == f"{STORED_TYPES[kind].name} products in torch"
    monkeypatch.delenv("FORERUN_KERNELS")
    quick = prepare(store(tiny(name), kind))
    logits = []
    for each in (plain, quick):
        each.add(0)
        logits.append(each.extend([0], [[5, 6, 7, 8, 9, 10]])[0])
    assert (logits[0] - logits[1]).abs().max() < 0.15 * logits[1].std()
    head = model.get_output_embeddings().stored
    assert isinstance(head, Dense) and head.weight.dtype == torch.float32


@pytest.fixture(
    scope="module", params=[(name, kind) for name in MODELS for kind in KINDS], ids="-".join
)
def model(request: pytest.FixtureRequest) -> CausalLM:
    name, kind = request.param
    found = prepare(store(tiny(name), kind))
    assert isinstance(found.backend, QuantisedForward) and found.exact == "bitwise"
    return found


def _tree(draw: st.DrawFn, tokens: list[int]) -> tuple[Draft, list[int]]:
    """A tree with a path of these tokens, and the nodes of that path."""
    parents = [-1]
    ids = [tokens[0]]
    path = [0]
    while len(path) < len(tokens):
        if draw(st.booleans()) or len(ids) > 24:
            parents.append(path[-1])
            ids.append(tokens[len(path)])
            path.append(len(ids) - 1)
        else:
            parents.append(draw(st.integers(0, len(ids) - 1)))
            ids.append(draw(st.integers(3, 129)))
    return Draft(ids, parents), path


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_verifying_gives_the_bits_of_single_steps(model: CausalLM, data: st.DataObject) -> None:
    """Chains, trees and ragged batches have the bits of single steps.

    So do prompts in any pieces, prefixes from the store, and what is decoded after them.
    """
    length = data.draw(st.sampled_from([1, 3, 9, 40, 250, 254]))
    maker = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    tokens = torch.randint(3, 130, (length + 12,), generator=maker).tolist()
    alone = model.fresh()
    alone.add(0)
    single = [alone.extend([0], [[token]])[0][0] for token in tokens][
        length:
    ]  # a forward for each token
    other = model.fresh(2**24)
    chunk = data.draw(st.sampled_from([1, 5, 64, 512]))
    list(
        other.prefill(tokens[: data.draw(st.integers(0, length))], chunk)
    )  # what the store then holds of the prompt
    other.forget_prompt()
    join_all(other, {0: tokens[:length]}, chunk)
    rows = data.draw(st.integers(1, 3))
    neighbours = []
    for id in range(1, rows):
        other.add(id)
        size = data.draw(st.sampled_from([2, 30, 270]))
        other.extend([id], [torch.randint(3, 130, (size,), generator=maker).tolist()])
        neighbours.append(Draft.chain(5, list(range(6, 6 + data.draw(st.integers(0, 9))))))
    count = data.draw(st.integers(1, 9))
    if data.draw(st.booleans()):
        draft, path = _tree(data.draw, tokens[length : length + count])
    else:
        draft = Draft.chain(tokens[length], tokens[length + 1 : length + count])
        path = list(range(count))
    ids = data.draw(st.permutations(range(rows)))
    drafts = [draft if id == 0 else neighbours[id - 1] for id in ids]
    logits = other.forward(ids, drafts).logits[ids.index(0)]
    for place, node in enumerate(path):
        assert torch.equal(logits[node], single[place])
    other.commit(ids, [path if id == 0 else [0] for id in ids])
    after = other.extend([0], [tokens[length + count : length + count + 2]])[0]
    assert torch.equal(after, torch.stack(single[count : count + 2]))
    ends = other.fresh(2**24)
    ends.prompts.store = other.prompts.store
    other.save_prefix(0, tokens[: length + count + 2])
    join_all(
        ends, {9: tokens[: length + count + 1]}, 7
    )  # decoded keys and values, in place of a prompt's
    assert torch.equal(
        ends.forward([9], [Draft.root(tokens[length + count + 1])]).logits[0][0], single[count + 1]
    )


def test_nothing_is_run_beside_what_was_asked_for() -> None:
    """A long draft in one row is no work for the others, nor are rows without a draft."""
    cache = KVCache(1)
    for id in range(3):
        cache.add(id, 32)
    batch = lay_out(Inputs([2, 1], [range(4), range(1)], tokens=[[7, 8, 9, 10], [11]]), cache)
    assert batch.row.tolist() == [2, 2, 2, 2, 1]


def test_a_model_of_another_architecture_has_its_linear_layers_replaced() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = GPTNeoXConfig(vocab_size=130, **sizes)
    model = GPTNeoXForCausalLM(config).eval()
    tokens = torch.arange(3, 30)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        kept = prepare(store(model, "int8"))
        after = model(tokens).logits
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert kept.exact == "rounding" and isinstance(kept.backend, EagerForward)
    assert 0 < (before - after).abs().max() < 0.05 * before.std() + 0.02


def test_drafts_are_in_8_bits_where_they_can_be(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    for model, fits in ((tiny("llama"), True), (gpt2, False)):
        model.save_pretrained(tmp_path / model.config.model_type)
        for part, weights in (("draft", "auto"), ("draft", "float32"), ("target", None)):
            loaded = load_model(
                tmp_path / model.config.model_type, part, device="cpu", weights=weights
            )
            assert is_stored(loaded) == (fits and weights == "auto")


def test_embeddings_are_the_stored_rows() -> None:
    weight = torch.randn(50, 64)
    ids = torch.tensor([[3, 7], [49, 0]])
    rows = RawMatrix.quantised(weight, Type.BF16)
    assert torch.equal(StoredEmbedding(rows, torch.float32)(ids), weight.bfloat16().float()[ids])
    blocks = RawMatrix.quantised(weight, Type.Q8_0)
    assert torch.equal(
        StoredEmbedding(blocks, torch.bfloat16)(ids), blocks.floats()[ids].bfloat16()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_every_method_says_what_plain_decoding_says(kind: str) -> None:
    said = {}
    asked: dict[str, Any] = {"weights": kind, "guard": False}
    pair = load("embedded", draft="embedded", method="sd", **asked)
    for method in METHODS:
        if "pacer" in method or "lyanna" in method:  # with a layer or a head that is loaded
            decoder = load("embedded", draft="embedded", method=method, **asked)
        else:
            decoder = pair.replace(method=method)
        assert decoder.info()["target"]["exact"] == "bitwise"
        assert decoder.info()["target"]["weights"] == STORED_TYPES[kind].name
        done = decoder.generate(
            ["def first(items):\n", "import os\n\n\ndef walk(path"], max_new_tokens=40
        )
        said[method] = [completion.tokens for completion in done]
        if method != "ar":
            assert sum(completion.stats.tau for completion in done) > 2.2
    assert all(tokens == said["ar"] for tokens in said.values())


def test_what_cannot_be_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with pytest.raises(
        ValueError, match="weights 'int8' are for models that are loaded by name; this target is an"
    ):
        load(model, weights="int8", method="suffix")
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel has no nn\.Linear in its layers to store as int8"
    ):
        store(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)), "int8")
    refuses(
        r"q_proj .* 48 inputs, which blocks of 32 do not divide",
        store,
        tiny("llama", hidden_size=48),
        "int4",
    )
    assert prepare(store(tiny("llama", hidden_size=48), "bfloat16")).exact == "bitwise"
    for wrong, message in (
        (
            {"weights": "int3"},
            "unknown weights 'int3'; there are float32, bfloat16, int8, int4 and auto",
        ),
        ({"weights": "int8", "dtype": "bfloat16"}, "give dtype or weights, not both"),
    ):
        refuses(message, load, **wrong)
    monkeypatch.setenv("FORERUN_KERNELS", "abacus")
    refuses(r"FORERUN_KERNELS must be plain, .* or none on this machine, not 'abacus'", library)
