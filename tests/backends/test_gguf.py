"""Models from GGUF files: values, forwards, tokenizers, and files that are damaged."""

import copy
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

from forerun.api.loading import load_model, translation_for
from forerun.backends import prepare
from forerun.backends.facts import facts_of
from forerun.backends.gguf.model import gguf_config, load_gguf
from forerun.backends.gguf.tokenizer import gguf_tokenizer
from forerun.backends.panels import PackedMatrix, RawMatrix
from forerun.backends.stored import STORED_TYPES, StoredEmbedding, StoredLinear, bytes_by_format
from forerun.cli.info import _shown, file_facts
from forerun.zoo import gguf_file
from forerun.zoo.formats import WIDENED
from forerun.zoo.gguf_file import open_gguf
from forerun.zoo.source import ModelSource, gguf_in
from tests.support import ggufs
from tests.support.toys import refused_file, refuses

OWN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # types of blocks of 32, which stay as they are
IDS = torch.randint(ggufs.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("kind", [*OWN, "BF16", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_keep_their_values(tmp_path: Path, kind: str, tied: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256} if kind.endswith("_K") else {}
    original = ggufs.small(tie_word_embeddings=tied, **sizes)
    expected = ggufs.rounded(original, kind)
    model, note = load_gguf(ggufs.write(tmp_path / "a.gguf", original, kind))
    assert note is None and type(model) is LlamaForCausalLM
    for name, linear in linears(expected).items():
        module = model.get_submodule(name)
        assert isinstance(module, StoredLinear) and isinstance(module.stored, PackedMatrix)
        assert module.stored.type == Type[kind]
        torch.testing.assert_close(
            module.stored.floats(), linear.weight.detach(), rtol=1e-6, atol=1e-7
        )
    embedding = model.model.embed_tokens
    assert isinstance(embedding, StoredEmbedding)
    tokens = torch.arange(ggufs.VOCAB)
    torch.testing.assert_close(
        embedding(tokens), expected.model.embed_tokens(tokens), rtol=0, atol=1e-6
    )
    assert all(
        parameter.dtype == torch.float32 and parameter.ndim == 1 for parameter in model.parameters()
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *OWN])
@pytest.mark.parametrize("architecture", list(ggufs.ARCHITECTURES))
def test_forwards_of_a_file_are_those_of_its_values(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    original = ggufs.small(architecture)
    expected = logits(ggufs.rounded(original, kind))
    path = ggufs.write(tmp_path / "a.gguf", original, kind)
    plain, note = load_gguf(path, "float32")
    assert note is None and not any(isinstance(module, StoredLinear) for module in plain.modules())
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)
    model, _ = load_gguf(path)
    distance = float((logits(model) - expected).norm() / expected.norm())
    assert distance < (1e-5 if kind in ("F32", "F16", "BF16") else 0.045)
    for name, parameter in original.named_parameters():
        if parameter.ndim == 1:
            owner, _, part = name.rpartition(".")
            assert torch.equal(getattr(model.get_submodule(owner), part), parameter)


def test_formats_that_the_library_does_not_know_are_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.backends.gguf.model.WIDENED", {})
    original = ggufs.small(num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    path = ggufs.write(tmp_path / "a.gguf", original, "IQ3_XXS")
    model, note = load_gguf(path)
    line = "9 IQ3_XXS matrices stored anew in 8 bits (0.6 MB, 0.2 MB in the file)"
    assert note == f"a.gguf: {line}"
    assert model.lm_head.stored.type == Type.Q8_0
    for name, linear in linears(load_gguf(path, "float32")[0]).items():
        wanted = RawMatrix.quantised(linear.weight, Type.Q8_0).floats()
        assert torch.equal(model.get_submodule(name).stored.floats(), wanted)


@pytest.mark.parametrize("kind", [kind.name for kind in WIDENED])
def test_formats_of_groups_are_widened_without_rounding(tmp_path: Path, kind: str) -> None:
    original = ggufs.small(num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    path = ggufs.write(tmp_path / "a.gguf", original, kind)
    model, note = load_gguf(path)
    assert note is not None
    assert note.startswith(f"a.gguf: 9 {kind} matrices widened without rounding (0.3 MB, 0.")
    plain = load_gguf(path, "float32")[0]
    for name, linear in linears(plain).items():
        stored = model.get_submodule(name).stored
        assert isinstance(stored, PackedMatrix) and stored.type == WIDENED[Type[kind]]
        assert torch.equal(stored.floats(), linear.weight)
    tokens = torch.arange(ggufs.VOCAB)
    assert torch.equal(model.model.embed_tokens(tokens), plain.model.embed_tokens(tokens))
    quick = prepare(model)  # which looks rows of the embedding up in C
    assert quick.exact == "bitwise"
    quick.add(0, IDS.shape[1])
    found = quick.extend([0], [IDS[0].tolist()])[0]
    expected = logits(plain)[0]
    assert float((found - expected).norm() / expected.norm()) < 0.045


@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "MXFP4"])
def test_tables_of_sixteen_numbers_are_kept(tmp_path: Path, kind: str, weights: str | None) -> None:
    original = ggufs.small(num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    path = ggufs.write(tmp_path / "a.gguf", original, kind)
    model, note = load_gguf(path, weights)
    assert note is None
    plain = load_gguf(path, "float32")[0]
    for name, linear in linears(plain).items():
        module = model.get_submodule(name)
        assert module.stored.type == Type[kind]
        assert torch.equal(module.stored.floats(), linear.weight)
    tokens = torch.arange(ggufs.VOCAB)
    assert torch.equal(model.model.embed_tokens(tokens), plain.model.embed_tokens(tokens))


@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16"])
@pytest.mark.parametrize("file", ["F32", "Q4_1", "Q8_0", "Q5_0"])
def test_weights_are_stored_as_asked_for(
    tmp_path: Path, kind: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK", 64 * 10)  # rows come in several parts
    original = ggufs.small(tie_word_embeddings=False)
    path = ggufs.write(tmp_path / "a.gguf", original, file, types={"output.weight": "Q5_0"})
    model, note = load_gguf(path, kind)
    kept = (file, kind) in (("Q4_1", "int4"), ("Q8_0", "int8"))
    if kept:
        assert note == "a.gguf: 1 Q5_0 matrix stored anew in 8 bits (0.0 MB, 0.0 MB in the file)"
    assert note is not None and (
        kept or f"14 {file} matrices" in note or f"15 {file} matrices" in note
    )
    for name, linear in linears(ggufs.rounded(original, file, {"output.weight": "Q5_0"})).items():
        wanted_type = STORED_TYPES["int8" if kind == "int4" and name == "lm_head" else kind]
        wanted = (
            linear.weight.detach()
            if kept and name != "lm_head"
            else RawMatrix.quantised(linear.weight, wanted_type).floats()
        )
        torch.testing.assert_close(
            model.get_submodule(name).stored.floats(), wanted, rtol=1e-6, atol=1e-7
        )


def test_a_head_keeps_eight_bits_of_its_values_unless_the_file_has_four(tmp_path: Path) -> None:
    for file, head_type in (
        ("F32", Type.Q8_0),
        ("Q5_0", Type.Q8_0),
        ("Q8_0", Type.Q8_0),
        ("Q4_0", Type.Q4_0),
    ):
        model, _ = load_gguf(ggufs.write(tmp_path / "a.gguf", ggufs.small(), file), "int4")
        assert model.lm_head.stored.type == head_type
        assert model.model.layers[0].self_attn.q_proj.stored.type == (
            head_type if file == "Q4_0" else Type.Q4_1
        )


def test_floats_beside_blocks_stay_floats(tmp_path: Path) -> None:
    original = ggufs.small()
    types = {
        "token_embd.weight": "F16",
        "blk.0.ffn_up.weight": "F32",
        "blk.1.attn_q.weight": "BF16",
    }
    model, note = load_gguf(ggufs.write(tmp_path / "a.gguf", original, "Q8_0", types=types))
    assert note is None
    layers = model.model.layers
    assert torch.equal(
        layers[0].mlp.up_proj.stored.floats(), original.model.layers[0].mlp.up_proj.weight
    )
    own = original.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(layers[1].self_attn.q_proj.stored.floats(), own.bfloat16().float())
    half = original.model.embed_tokens.weight.half().float()
    assert torch.equal(model.model.embed_tokens(torch.arange(ggufs.VOCAB)), half)
    assert torch.equal(model.lm_head.stored.floats(), half)
    refuses(
        "unknown weights 'int3'; there are float32, bfloat16, int8, int4",
        load_model,
        "",
        "target",
        weights="int3",
    )
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(intermediate_size=80), "F16")
    refuses(r"blk\.0\.ffn_down\.weight has 80 inputs.*choose bfloat16", load_gguf, path, "int4")
    load_gguf(path, "bfloat16")


def test_the_configuration_is_the_models_own(tmp_path: Path) -> None:
    original = ggufs.small("qwen3", num_attention_heads=8)
    metadata = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.padding_token_id": 5}
    metadata["tokenizer.ggml.eom_token_id"] = 9
    path = ggufs.write(tmp_path / "a.gguf", original, "F16", metadata=metadata)
    config = gguf_config(open_gguf(path))
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
    )
    for name in (
        *sizes,
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(config, name) == getattr(original.config, name), name
    assert config.model_type == "qwen3" and config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope_parameters["rope_theta"] == 5000 and config.pad_token_id == 5
    model, _ = load_gguf(path)
    assert config.eos_token_id == model.generation_config.eos_token_id == [2, 7, 9]
    untied = open_gguf(ggufs.write(path, ggufs.small(tie_word_embeddings=False), "F16"))
    assert not gguf_config(untied).tie_word_embeddings
    plain = gguf_config(open_gguf(ggufs.write(path, original, "F16", tokenizer=False)))
    assert (plain.bos_token_id, plain.eos_token_id, plain.pad_token_id) == (None, None, None)
    model = ggufs.small(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    older = open_gguf(
        ggufs.write(path, model, "F16")
    )  # without the size of a head and the rotation
    for key in (
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.dimension_count",
    ):
        older.fields.pop(f"llama.{key}")
    config = gguf_config(older)
    assert (config.head_dim, config.rope_parameters["rope_theta"]) == (16, 10000)


def test_rotations_and_windows_are_read_from_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    expected = logits(ggufs.small(rope_parameters=rope))
    for metadata in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},  # the old key
    ):
        path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F32", metadata=metadata)
        torch.testing.assert_close(logits(load_gguf(path)[0]), expected, rtol=0, atol=1e-5)
    # Llama 3.1 has its factors as a tensor.
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = ggufs.small(rope_parameters=rope)
    plain = ggufs.small()
    factors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    path = ggufs.write(path, plain, "F32", tensors={"rope_freqs.weight": factors})
    for kind in (None, "float32"):
        torch.testing.assert_close(
            logits(load_gguf(path, kind)[0]), logits(scaled), rtol=0, atol=1e-5
        )
    # A sliding window makes a Mistral.
    path = ggufs.write(path, plain, "F32", metadata={"llama.attention.sliding_window": 16})
    model = load_gguf(path)[0]
    expected = logits(plain)
    assert type(model) is MistralForCausalLM and model.config.sliding_window == 16
    torch.testing.assert_close(logits(model)[:, :16], expected[:, :16], rtol=0, atol=1e-5)
    assert not torch.allclose(logits(model)[:, 30:], expected[:, 30:], atol=1e-2)


def test_tokenizers_cut_texts_as_their_kind_does(tmp_path: Path) -> None:
    for pre, text, tokens in (
        ("smollm", "  12 the", ["ĠĠ", "1", "2", "Ġthe"]),  # digits by themselves
        ("gpt-2", "  12 the", ["Ġ", "Ġ", "12", "Ġthe"]),  # with the space before them
        ("llama-bpe", "  1234 the", ["Ġ", "Ġ", "123", "4", "Ġthe"]),  # three at most
        ("qwen2", " 12A\u030a", ["Ġ", "1", "2", "Ã", "ħ"]),  # composed: one letter
        ("tekken", "12lowTHE", ["1", "2", "l", "ow", "T", "H", "E"]),
        ("default", " 1234=the", ["Ġ", "123", "4", "=", "t", "he"]),
        ("gpt-4o", " 1234lowTHE's", ["Ġ", "123", "4", "l", "ow", "T", "H", "E", "'", "s"]),
        ("dbrx", " 1234 the", ["Ġ", "123", "4", "Ġthe"]),
        ("seed-coder", "12 the", ["1", "2", "Ġthe"]),
        ("hunyuan-dense", "1234 the", ["123", "4", "Ġthe"]),
        ("qwen35", " 12 the", ["Ġ", "1", "2", "Ġthe"]),
    ):
        tokenizer = gguf_tokenizer(ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16", pre=pre))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        strange = "  x\n\tthé 東京 \U0001f600 12345 it's <|im_end|>"
        ids = tokenizer(strange)["input_ids"]
        assert tokenizer.decode(ids) == strange and ids[-1] == 2
        assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_pieces_are_cut_as_sentencepiece_does(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16", pre="pieces")
    tokenizer = gguf_tokenizer(path)
    ids = tokenizer(" the low</s>\u00e9")["input_ids"]
    accented = ["<0xC3>", "<0xA9>"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>",
        "▁",
        "▁the",
        "▁",
        "l",
        "ow",
        "</s>",
        "▁",
        *accented,
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " the low \u00e9"
    assert tokenizer.eos_token_id == 2
    path = ggufs.write(
        path, ggufs.small(), pre="pieces", metadata={"tokenizer.ggml.add_space_prefix": False}
    )
    assert gguf_tokenizer(path).tokenize("the low") == ["t", "he", "▁", "l", "ow"]


@pytest.mark.parametrize(
    "pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "pieces"]
)
def test_tokens_equal_those_of_llama_cpp(tmp_path: Path, pre: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16", pre=pre)
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = gguf_tokenizer(path)
    generator = np.random.default_rng(0)
    letters = [
        *"abtheLOW 12 3 \n\t'.,/_",
        "\u00e9",
        "\u00c0",
        "\u6771",
        "\u2003",
        "the",
        " the",
        "<|im_end|>",
        "it's",
    ]
    texts = ["".join(generator.choice(letters, 60)) for _ in range(60)]
    for text in [
        *texts,
        "  12 the",
        " def f(x):\n    return x[3:]  + 1234.5\r\n\n",
        " ",
        "IT'S we'LL",
    ]:
        expected = theirs.tokenize(text.encode(), add_bos=pre == "pieces", special=True)
        assert ours(text)["input_ids"] == expected, text


def test_special_tokens_and_the_chat_template_are_those_of_the_file(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16")
    tokenizer = gguf_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    chat = [{"role": "user", "content": "the low"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nthe low<|im_end|>\n<|im_start|>assistant\n"
    assert max(tokenizer.get_vocab().values()) < ggufs.VOCAB - 40  # without what only fills up
    path = ggufs.write(path, ggufs.small(), "F16", metadata={"tokenizer.ggml.add_bos_token": True})
    assert gguf_tokenizer(path)("the")["input_ids"] == [1, *tokenizer("the")["input_ids"]]


def test_a_large_vocabulary_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks the hub about vocabularies of more than 100,000 tokens by their name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = ggufs.write_vocabulary(tmp_path / "a.gguf", 100_100)
    tokenizer = gguf_tokenizer(path)
    assert len(tokenizer) == 100_100 and tokenizer.name_or_path == str(path)
    assert tokenizer.decode(tokenizer("the low word400")["input_ids"]) == "the low word400"


def test_tokenizers_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": False}, "it has no tokenizer"),
        ({"pre": "new"}, "pre-tokenizer is 'new'; known are default, gpt-2, olmo"),
        (
            {"metadata": {"tokenizer.ggml.eos_token_id": 400}},
            "eos_token_id is 400; there are 320 tokens",
        ),
        ({"metadata": {"tokenizer.ggml.model": "abc"}}, "of kind 'abc'; known are gpt2, llama"),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=rf"a\.gguf.*{message}"):
            gguf_tokenizer(ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16", **changes))


def test_files_with_the_same_tokenizer_need_no_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(name: str, **changes: Any) -> Path:
        return ggufs.write(tmp_path / name, ggufs.small(), "F16", **changes)

    first = file("a.gguf")
    same = file("b.gguf", metadata={"tokenizer.ggml.eos_token_id": 3})
    others = (
        file("c.gguf", pre="qwen2"),
        file("d.gguf", metadata={"tokenizer.ggml.add_bos_token": True}),
    )
    assert open_gguf(first).has_tokenizer_of(open_gguf(same))
    assert not any(open_gguf(first).has_tokenizer_of(open_gguf(other)) for other in others)
    tokenizer = gguf_tokenizer(first)
    with monkeypatch.context() as without:
        without.setattr("forerun.api.loading.load_tokenizer", None)  # it is not made
        assert translation_for(tokenizer, same) is None
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens(["more"])  # no longer what the file says; the other has it not
    for own, other in ((tokenizer, others[0]), (copied, same)):
        refuses("tokenizer, and that of .* differs", translation_for, own, other, "a test")
    assert tokenizer.backend_tokenizer.token_to_id("more") is None


def test_a_header_is_read_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "F16")
    assert open_gguf(path) is not open_gguf(path)  # it may be being written
    monkeypatch.setattr(gguf_file, "time", lambda: time.time() + 10)
    first = open_gguf(path)
    assert open_gguf(path) is first
    ggufs.write(path, ggufs.small(), "F16", pre="qwen2")
    assert open_gguf(path).value("tokenizer.ggml.pre", str) == "qwen2"


def test_what_a_file_needs_is_shown(tmp_path: Path) -> None:
    path = ggufs.write(
        tmp_path / "a.gguf", ggufs.small(), "Q4_1", types={"token_embd.weight": "Q8_0"}
    )
    facts = file_facts(str(path))
    assert facts["kernel"] == facts_of(prepare(load_gguf(path)[0]))["kernel"]
    assert facts["weights"] == open_gguf(path).bytes_by_type and list(facts["weights"]) == [
        "Q4_1",
        "Q8_0",
        "F32",
    ]
    assert (
        facts["kv_bytes_per_token"] == 2 * 2 * 16 * 2 * 2
    )  # layers, heads, their size, keys and values, float16
    assert facts["kv_bytes_at_full_context"] == ggufs.CONTEXT * facts["kv_bytes_per_token"]
    assert (
        facts["bytes_at_full_context"] == facts["weight_bytes"] + facts["kv_bytes_at_full_context"]
    )
    assert not any(name.startswith("draft") for name in facts)
    # Floats of any kind take the memory of float32.
    half, whole = (
        open_gguf(ggufs.write(tmp_path / f"{kind}.gguf", ggufs.small(), kind))
        for kind in ("F16", "F32")
    )
    assert (
        half.memory
        == whole.memory
        == sum(whole.bytes_by_type.values())
        > sum(half.bytes_by_type.values())
    )
    assert half.kv_bytes == 2 * 2 * 16 * 2 * 4  # as above, in float32


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("Q8_0", "llama", {}),
        ("MXFP4", "llama", {}),
        ("IQ4_NL", "llama", {"tie_word_embeddings": False}),
        ("IQ4_XS", "llama", {"hidden_size": 256, "intermediate_size": 256}),
        ("Q2_K", "llama", {"hidden_size": 256, "intermediate_size": 256}),
        ("IQ2_S", "llama", {"hidden_size": 256, "intermediate_size": 256}),
        ("TQ1_0", "llama", {"hidden_size": 256, "intermediate_size": 256}),
        ("MXFP4", "qwen3moe", {}),
    ],
)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_memory_of_a_file_is_what_its_model_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    changes: dict[str, Any],
    has_kernels: bool,
) -> None:
    if not has_kernels:
        monkeypatch.setenv("FORERUN_KERNELS", "none")
    model = ggufs.small(name, **changes)
    metadata = {
        f"{name}.{key}": value for key, value in ggufs.KINDS[name].keys(model.config).items()
    }
    path = ggufs.write(tmp_path / "a.gguf", model, kind, metadata=metadata)
    taken = bytes_by_format(load_gguf(path)[0])
    assert open_gguf(path).memory == sum(taken.values())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("F16", {}),
        ("Q8_0", {}),
        ("Q8_0", {"hidden_size": 96, "head_dim": 16, "intermediate_size": 96}),
        ("F16", {"hidden_size": 60, "head_dim": 16, "intermediate_size": 60}),
        ("F32", {"hidden_act": "sigmoid"}),
    ],
)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_kernel_that_a_file_shows_is_the_one_that_runs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    changes: dict[str, Any],
    has_kernels: bool,
) -> None:
    if not has_kernels:
        monkeypatch.setenv("FORERUN_KERNELS", "none")
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(**changes), kind)
    shown = file_facts(str(path))["kernel"]
    runs = facts_of(prepare(load_gguf(path)[0]))["kernel"]
    assert shown == runs or (shown.startswith("torch: ") and runs.endswith(" products in torch"))


def test_a_file_that_is_refused_shows_why(tmp_path: Path) -> None:
    model = ggufs.small()
    for changes, options, words in (
        ({"general.architecture": "falcon"}, {}, "its architecture is 'falcon'; known are llama"),
        ({"llama.attention.clamp_kqv": 2.0}, {}, "it has llama.attention.clamp_kqv"),
        ({}, {"tokenizer": False}, "tokenizer"),
        ({}, {"pre": "unheard"}, "unheard"),
    ):
        path = ggufs.write(tmp_path / "a.gguf", model, "Q8_0", metadata=changes, **options)
        facts = file_facts(str(path))
        assert facts["kernel"].startswith("none: cannot load ") and words in facts["kernel"]
        assert facts["weights"] and "bytes_at_full_context" not in facts


def test_what_a_files_draft_needs_is_shown_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small(), "Q4_1")
    monkeypatch.setattr("forerun.zoo.ModelSource.own_draft", lambda target: target)
    facts = file_facts(str(path))
    assert facts["draft_kv_bytes_per_token"] == facts["kv_bytes_per_token"] == 256
    assert facts["draft_kv_bytes_at_full_context"] == 256 * ggufs.CONTEXT
    assert _shown("draft_kv_bytes_per_token", 12_288) == "12,288 bytes"
    assert _shown("kv_bytes_at_full_context", 402_653_184) == "402.7 MB"


def test_contents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for changes, words in (
        ({"split.count": 3}, "one of 3 pieces, and its name does not say so"),
        ({"general.architecture": "clip"}, "it is a projector of pictures or sound (mmproj)"),
        (
            {"general.architecture": "falcon"},
            "architecture is 'falcon'; known are llama, qwen2, qwen3, smollm3, gemma3",
        ),
        (
            {"llama.block_count": 4_000_000_000},
            "tensors of 2 layers; llama.block_count is 4000000000",
        ),
        ({"llama.block_count": 0}, "llama.block_count is 0; it must be above 0"),
        ({"llama.embedding_length": "many"}, "llama.embedding_length is 'many', which is no int"),
        ({"llama.embedding_length": 96}, "the sizes in the metadata need"),
        ({"llama.attention.head_count_kv": 3}, "4 heads of 16, 3 of them for keys and values"),
        ({"llama.attention.key_length": 8}, "has 64 outputs; 4 heads of 8 need 32"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; only 16"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only 16"),
        ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base is nan"),
        (
            {"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 4.0},
            "its rotation is scaled ('dynamic', 4)",
        ),
        ({"llama.rope.scaling.factor": -2.0}, "its rotation is scaled ('linear', -2)"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "is 2, which is supported for yarn only"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            "rope.scaling.yarn_ext_factor must be 1",
        ),
        ({"llama.rope.scaling.alpha": 3.0}, "it has llama.rope.scaling.alpha, which is not"),
        ({"llama.rope.dimension_sections": [1, 2]}, "it has llama.rope.dimension_sections"),
        ({"llama.attention.clamp_kqv": 2.0}, "it has llama.attention.clamp_kqv"),
        ({"llama.attention.scale": 1.0}, "it has llama.attention.scale, which is not"),
        ({"llama.logit_scale": 2.0}, "it has llama.logit_scale, which is not supported"),
        ({"llama.final_logit_softcapping": 30.0}, "it has llama.final_logit_softcapping"),
        ({"llama.attention.head_count": [4, 2]}, "head_count differs between layers"),
        ({"llama.expert_count": 8}, "it has llama.expert_count, which is not supported"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "eos_token_id is 1000; there are 320 tokens"),
        (
            {"qwen2.attention.sliding_window": 16},
            "it has qwen2.attention.sliding_window, which is not",
        ),
        ({"blk.1.ffn_up.weight": None}, "it has no tensor blk.1.ffn_up.weight"),
        ({"token_embd.weight": None}, "it has no tensor token_embd.weight"),
        ({"blk.1.attn_norm.weight": np.ones(63, np.float32)}, "blk.1.attn_norm.weight is [63]"),
        ({"blk.0.ffn_up.weight": np.ones((64, 64), np.float32)}, "need [96, 64]"),
        (
            {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)},
            "a tensor blk.0.attn_q_norm.weight, which Llama",
        ),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight must be above 0"),
    ):
        model = ggufs.small("qwen2" if "qwen2.attention.sliding_window" in changes else "llama")
        part = "tensors" if next(iter(changes)).endswith(".weight") else "metadata"
        assert words in refused_file(ggufs.write(tmp_path / "a.gguf", model, **{part: changes}))


def test_a_gguf_source_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    assert gguf_in(Path("org/name")) is None and gguf_in(tmp_path) is None
    file = tmp_path / "a.gguf"
    refuses(r"there is no file '.*a\.gguf'", gguf_in, file)
    file.write_bytes(b"GGUF")
    assert gguf_in(file) == gguf_in(tmp_path) == file
    assert ModelSource.parse(str(file), "target").gguf == file
    (tmp_path / "b.GGUF").write_bytes(b"GGUF")
    refuses(r"holds several GGUF files; give one of a\.gguf, b\.GGUF", gguf_in, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_in(tmp_path) is None
