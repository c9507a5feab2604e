"""Weights in few bits: what is stored, and that a row's bits do not depend on what stands beside it."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from families import MODELS, tiny
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from forerun import load
from forerun.api.loading import load_model
from forerun.backends import native, prepare
from forerun.backends import scores as scores_module
from forerun.backends.bits import Blocks, joined, pack, quantise, stored
from forerun.backends.exact import Fixed, is_invariant
from forerun.backends.family import FamilyForward
from forerun.backends.native import library
from forerun.backends.native_family import NativeForward
from forerun.backends.scores import scores
from forerun.backends.stored import StoredEmbedding, StoredLinear, is_stored, store
from forerun.engine.draft import Draft
from forerun.model.batch import Inputs
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from forerun.model.kv_cache import KVCache

KINDS = ("int4", "int8", "bfloat16")
METHODS = ("ar", "sd", "suffix", "ouroboros", "pacer", "pacer-ouroboros", "lyanna", "pacer-lyanna")


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_changes_no_weight(bits: int) -> None:
    torch.manual_seed(0)
    blocks = quantise(torch.randn(70, 96) * torch.logspace(-3, 1, 70)[:, None], bits)
    packed = pack(blocks).values()
    # The product is rounded to bfloat16, and nothing else is.
    assert torch.equal(packed, blocks.values().bfloat16().float())


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_loses_half_a_step_at_most(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    blocks = quantise(weight, bits)
    apart = (blocks.values() - weight).abs().unflatten(1, (-1, 32))
    # In 4 bits the middle is rounded as well.
    assert (apart <= blocks.scales[..., None] * (0.51 if bits == 8 else 0.6)).all()
    assert int(blocks.codes.max()) < 2**bits
    flat = torch.full((3, 32), 0.25)
    assert torch.allclose(quantise(flat, bits).values(), flat, rtol=0.01)
    assert torch.equal(quantise(torch.zeros(3, 32), bits).values(), torch.zeros(3, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_stored_weight(kind: str) -> None:
    torch.manual_seed(0)
    weight = stored(torch.randn(100, 64), kind)
    x = torch.randn(37, 64).bfloat16()
    values = weight(torch.eye(64, dtype=torch.bfloat16)).T.float()
    assert torch.allclose(weight(x).float(), x.float() @ values.T, rtol=0.02, atol=0.1)
    assert is_invariant(weight, x[:16])


@pytest.mark.parametrize("kinds", [("int4", "int4"), ("int8", "int8"), ("bfloat16", "bfloat16"), ("int4", "int8")])
@pytest.mark.parametrize("outs", [(64, 128), (64, 33)])
def test_joined_products_are_the_single_ones(kinds: tuple[str, str], outs: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parts = [stored(torch.randn(out, 32), kind) for out, kind in zip(outs, kinds, strict=True)]
    x = torch.randn(5, 32).bfloat16()
    assert torch.equal(joined(parts)(x), torch.cat([part(x) for part in parts], 1))


@pytest.mark.parametrize("form", [lambda weight: quantise(weight, 8), lambda weight: weight.bfloat16()])
def test_the_largest_logits_are_those_of_float32(form) -> None:
    torch.manual_seed(0)
    own = form(torch.randn(3000, 64) * torch.logspace(-1, 1, 3000)[:, None])
    values = own.values() if isinstance(own, Blocks) else own.float()
    head, x = scores(own), torch.randn(21, 64)
    logits, exact = head(x), x @ values.T
    best = exact.topk(4).indices
    assert torch.allclose(logits.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert (logits - exact).abs().max() < 0.01 * exact.abs().max()
    assert is_invariant(head, x[:16])


def test_a_product_at_a_fixed_number_of_rows() -> None:
    seen = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * len(x)

    x = torch.randn(21, 4)
    assert torch.equal(Fixed(product, 8)(x), 8 * x)
    assert set(seen) == {8}


def test_a_product_that_looks_at_its_neighbours_is_found() -> None:
    x = torch.randn(16, 8)
    assert is_invariant(lambda rows: rows * 2, x)
    assert not is_invariant(lambda rows: rows * len(rows), x)
    assert not is_invariant(lambda rows: rows.cumsum(0), x)
    assert not is_invariant(lambda rows: rows if len(rows) < 13 else rows + 1e-3, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_familys_forward_is_transformers_own(name: str, kind: str) -> None:
    """Both run the same stored weights; they round in other places."""
    model = store(tiny(name), kind)
    plain = copy.deepcopy(model)
    quick = prepare(model)
    assert not isinstance(quick.backend, EagerForward)
    tokens = [int(token) for token in torch.randint(3, 130, (40,), generator=torch.Generator().manual_seed(1))]
    logits = []
    for each in (quick, CausalLM(plain)):
        each.add(0)
        logits.append(each.extend([0], [tokens])[0])
    assert logits[0].dtype == torch.float32
    apart = (logits[0] - logits[1]).abs().max() / logits[1].std()
    assert apart < 0.15
    # transformers' own forward still runs on what the fast one has joined.
    again = CausalLM(model)
    again.add(0)
    assert (again.extend([0], [tokens])[0] - logits[1]).abs().max() / logits[1].std() < 0.02


CASES = [(name, kind, "C") for name in MODELS for kind in ("int4", "int8")] + [
    (name, "int4", "torch") for name in MODELS
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest) -> CausalLM:
    name, kind, means = request.param
    stored = store(tiny(name), kind)
    if means == "torch":
        found = CausalLM(stored, FamilyForward(stored))
    else:
        found = prepare(stored)
        if not isinstance(found.backend, NativeForward):
            pytest.skip("there is no C compiler here")
    if found.exact == "rounding" and means == "torch":
        pytest.skip("torch's kernels round otherwise among other rows on this machine, and the trial has found it")
    assert found.exact == "bitwise"
    return found


@pytest.mark.parametrize(
    ("name", "heads"),
    [(name, (4, 2, 32)) for name in MODELS]
    + [("llama", sizes) for sizes in ((3, 1, 64), (9, 1, 64), (3, 1, 128), (4, 1, 96), (2, 1, 256))],
)
def test_c_does_what_torch_does(name: str, heads: tuple[int, int, int]) -> None:
    """For any number of heads that share keys, of any size: some of them go together."""
    compiled = library()
    if compiled is None:
        pytest.skip("there is no C compiler here")
    tokens = [[int(token) for token in torch.randint(3, 130, (size,))] for size in (300, 7, 40)]
    drafts = [Draft.chain(5, [6, 7]), Draft([5, 9, 9, 11, 12], [-1, 0, 0, 1, 2], origins=["draft"] * 5), Draft.root(8)]
    logits = []
    for forward in (FamilyForward, partial(NativeForward, library=compiled)):
        sizes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
        stored = store(tiny(name, hidden_size=32 * heads[0], **sizes), "int8")
        each = CausalLM(stored, forward(stored))
        for id, prompt in enumerate(tokens):
            each.add(id)
            each.extend([id], [prompt])
        logits.append(torch.cat(each.forward([0, 1, 2], drafts).logits))
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].std()


def test_without_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORERUN_NATIVE", "0")
    assert type(prepare(store(tiny("llama"), "int4")).backend) is FamilyForward
    monkeypatch.delenv("FORERUN_NATIVE")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native._library.__wrapped__(tmp_path) is None
    odd = store(tiny("llama", hidden_size=72, num_attention_heads=3, num_key_value_heads=1), "bfloat16")
    assert type(prepare(odd).backend) is FamilyForward


def _single(model: CausalLM, tokens: list[int], start: int) -> list[torch.Tensor]:
    """Logits behind every token from `start` on, each from a forward of its own, in a cache that was made likewise."""
    model = model.fresh()
    model.add(0)
    found = [model.extend([0], [[token]])[0][0] for token in tokens]
    return found[start:]


def _tree(draw: st.DrawFn, tokens: list[int]) -> tuple[Draft, list[int]]:
    """A tree with a path of these tokens, and the nodes of that path."""
    parents, ids, path = [-1], [tokens[0]], [0]
    while len(path) < len(tokens):
        if draw(st.booleans()) or len(ids) > 24:
            parents.append(path[-1])
            ids.append(tokens[len(path)])
            path.append(len(ids) - 1)
        else:
            parents.append(draw(st.integers(0, len(ids) - 1)))
            ids.append(draw(st.integers(3, 129)))
    return Draft(tokens=ids, parents=parents, origins=["draft"] * len(ids)), path


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_verifying_gives_the_bits_of_single_steps(model: CausalLM, data: st.DataObject) -> None:
    """Chains, trees, ragged batches, prompts in any pieces, prefixes from the store, and what is decoded after."""
    length = data.draw(st.sampled_from([1, 3, 9, 40, 250, 254]))
    maker = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    tokens = [int(token) for token in torch.randint(3, 130, (length + 12,), generator=maker)]
    single = _single(model, tokens, length)
    other = model.fresh(2**24)
    chunk = data.draw(st.sampled_from([1, 5, 64, 512]))
    cut = data.draw(st.integers(0, length))
    list(other.prefill(tokens[:cut], chunk))  # what the store then holds of the prompt
    other.forget_prompt()
    list(other.prefill(tokens[:length], chunk))
    other.join(0)
    rows = data.draw(st.integers(1, 3))
    neighbours = []
    for id in range(1, rows):
        other.add(id)
        size = data.draw(st.sampled_from([2, 30, 270]))
        other.extend([id], [[int(token) for token in torch.randint(3, 130, (size,), generator=maker)]])
        neighbours.append(Draft.chain(5, list(range(6, 6 + data.draw(st.integers(0, 9))))))
    count = data.draw(st.integers(1, 9))
    if data.draw(st.booleans()):
        draft, path = _tree(data.draw, tokens[length : length + count])
    else:
        draft, path = Draft.chain(tokens[length], tokens[length + 1 : length + count]), list(range(count))
    ids = data.draw(st.permutations(range(rows)))
    drafts = [draft if id == 0 else neighbours[id - 1] for id in ids]
    logits = other.forward(ids, drafts).logits[ids.index(0)]
    for place, node in enumerate(path):
        assert torch.equal(logits[node], single[place])
    other.commit(ids, [path if id == 0 else [0] for id in ids])
    behind = other.extend([0], [tokens[length + count : length + count + 2]])[0]
    assert torch.equal(behind[0], single[count])
    assert torch.equal(behind[1], single[count + 1])
    ends = other.fresh(2**24)
    ends.prompts.store = other.prompts.store
    other.park(0, tokens[: length + count + 2])
    list(ends.prefill(tokens[: length + count + 1], 7))  # decoded keys and values, in place of a prompt's
    ends.join(9)
    assert torch.equal(ends.forward([9], [Draft.root(tokens[length + count + 1])]).logits[0][0], single[count + 1])


@pytest.mark.skipif(library() is None, reason="without C rows are padded")
def test_nothing_is_run_beside_what_was_asked_for() -> None:
    """A long draft in one row is no work for the others, nor are rows without a draft."""
    cache = KVCache(1)
    for id, length in enumerate((5, 9, 2)):
        cache.add(id, 32)
        cache.lengths[id] = length
    batch = native.lay_out_tokens(Inputs([2, 1], [range(4), range(1)], tokens=[[7, 8, 9, 10], [11]]), cache)
    assert batch.ids.tolist() == [7, 8, 9, 10, 11]
    assert batch.row.tolist() == [2, 2, 2, 2, 1]
    assert batch.slot.tolist() == batch.positions.tolist() == [2, 3, 4, 5, 9]
    assert batch.paths.tolist() == [[2, 3, 4, 5]] * 4 + [[9, 10, 11, 12]]
    given = torch.tensor([[0], [11], [7]])  # by the rows of the cache
    assert native.lay_out_tokens(Inputs([2, 1], [range(1)] * 2, given=given), cache).ids.tolist() == [7, 11]


def test_a_model_of_another_architecture_has_its_linear_layers_replaced() -> None:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
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
            loaded = load_model(tmp_path / model.config.model_type, part, device="cpu", weights=weights)
            assert is_stored(loaded) == (fits and weights == "auto")


def test_blocks_that_do_not_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match=r"q_proj .* 48 inputs, which blocks of 32 do not divide"):
        store(tiny("llama", hidden_size=48), "int4")
    assert prepare(store(tiny("llama", hidden_size=48), "bfloat16")).exact in ("bitwise", "rounding")


def test_embeddings() -> None:
    weight = torch.randn(50, 64)
    ids = torch.tensor([[3, 7], [49, 0]])
    assert torch.equal(StoredEmbedding(weight.bfloat16(), torch.float32)(ids), weight.bfloat16().float()[ids])
    blocks = quantise(weight, 8)
    assert isinstance(blocks, Blocks)
    assert torch.equal(StoredEmbedding(blocks, torch.bfloat16)(ids), blocks.values()[ids].bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_keeps_shape_dtype_and_bias(kind: str) -> None:
    linear = nn.Linear(64, 40)
    layer = StoredLinear(stored(linear.weight, kind), 64, linear.bias)
    x = torch.randn(2, 3, 64)
    assert layer(x).dtype == torch.float32 and layer(x).shape == (2, 3, 40)
    assert torch.allclose(layer(x), linear(x), atol=0.15 if kind == "int4" else 0.02)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_every_method_says_what_plain_decoding_says(kind: str) -> None:
    target, draft = ("embedded" for _ in range(2))
    said = {}
    for method in (
        "ar",
        "sd",
        "suffix",
        "hybrid",
        "ouroboros",
        "pacer",
        "pacer-ouroboros",
        "lyanna",
        "pacer-lyanna",
    ):
        decoder = load(target, draft=draft, method=method, weights=kind, guard=False)
        assert decoder.info()["target"]["exact"] == "bitwise"
        assert decoder.info()["target"]["weights"] == kind
        done = decoder.generate(["def first(items):\n", "import os\n\n\ndef walk(path"], max_new_tokens=40)
        said[method] = [each.tokens for each in done]
        if method != "ar":
            assert sum(each.stats.tau for each in done) > 2.2
    assert all(each == said["ar"] for each in said.values())


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    if native._library.__wrapped__(tmp_path / "one") is None:
        pytest.skip("there is no C compiler here")
    (built,) = (tmp_path / "one").iterdir()
    damaged = tmp_path / "two" / built.name
    damaged.parent.mkdir(mode=0o700)
    damaged.write_bytes(b"damaged")
    damaged.chmod(0o600)
    assert native._library.__wrapped__(tmp_path / "two") is not None
    assert damaged.read_bytes() == built.read_bytes()
    assert native._library.__wrapped__(Path("/proc/nowhere")) is not None  # nothing can be kept there


def test_heads_where_integers_are_not_multiplied_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "_multiplies_integers", lambda: False)
    torch.manual_seed(0)
    weight, x = torch.randn(200, 64), torch.randn(5, 64)
    for own in (quantise(weight, 8), weight.bfloat16()):
        head = scores(own)
        values = own.values() if isinstance(own, Blocks) else own.float()
        assert head.out == 200 and torch.equal(head(x).argmax(-1), (x @ values.T).argmax(-1))


def test_what_cannot_be(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="weights 'int8' are for models that are loaded by name; this target is an"):
        load(model, weights="int8", method="suffix")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no nn\.Linear in its layers to store as int8"):
        store(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)), "int8")
    with pytest.raises(ValueError, match="unknown weights 'int3'; there are float32, bfloat16, int8, int4 and auto"):
        load(weights="int3")
    with pytest.raises(ValueError, match="give dtype or weights, not both"):
        load(weights="int8", dtype="bfloat16")
