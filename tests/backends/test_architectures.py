"""Models of all architectures, from files and from transformers, in the forward in C."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.backends import architectures, prepare
from forerun.backends.architectures.architecture import Architecture, Settings
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.gguf.model import load_gguf
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import StoredExperts, store
from tests.support import families, ggufs
from tests.support.toys import refuses

IDS = torch.randint(ggufs.VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits[0]


def in_c(model: PreTrainedModel) -> Tensor:
    """The logits of the forward in C, of which each part is run after the part before it."""
    quick = prepare(model)
    assert isinstance(quick.backend, QuantisedForward) and quick.exact == "bitwise"
    quick.add(0)
    parts = [quick.extend([0], [part.tolist()])[0] for part in IDS[0].split([30, 1, 9])]
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ggufs.NEW_ARCHITECTURES)
def test_a_float_file_gives_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.gguf"
    original = ggufs.write_kind(path, kind)
    expected = logits(original)
    model, note = load_gguf(path)
    assert note is None and type(model) is type(original)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(in_c(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ggufs.NEW_ARCHITECTURES)
def test_a_file_in_few_bits_runs_in_c_with_its_values(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.gguf"
    ggufs.write_kind(path, kind, "Q8_0")
    model, note = load_gguf(path)
    expected = logits(load_gguf(path, "float32")[0])
    assert note is None
    # Inputs of products are rounded to 8 bits. A token that chooses other experts differs more.
    for found in (in_c(model), logits(model)):
        distances = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(distances.median()) < 0.05


@pytest.mark.parametrize("name", ["mistral", "phi3", "starcoder2", "qwen3_moe"])
def test_a_window_of_all_layers_is_kept(name: str) -> None:
    """No file of these has one, or no test above; a checkpoint may."""
    sizes = {"vocab_size": ggufs.VOCAB, "use_sliding_window": True, "sliding_window": 6}
    model = families.tiny(name, **sizes)
    expected = logits(model)
    assert (logits(families.tiny(name, **sizes | {"sliding_window": 60})) - expected).norm() > 1
    torch.testing.assert_close(in_c(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "granitemoe", "gpt_oss"])
def test_checkpoints_with_experts_run_in_few_bits(name: str) -> None:
    model = families.tiny(name)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(ids).logits[0]
    quick = prepare(store(model, "int8"))
    assert isinstance(quick.backend, QuantisedForward)
    assert any(isinstance(module, StoredExperts) for module in quick.model.modules())
    assert all(parameter.numel() < 1000 for parameter in quick.model.parameters())
    quick.add(0)
    found = quick.extend([0], [ids[0].tolist()])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_a_file_of_experts_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for metadata, words in (
        ({"qwen3moe.expert_used_count": 7}, "a token takes 7 of 6 experts"),
        ({"qwen3moe.expert_count": 5}, r"ffn_gate_inp.weight is \[6, 64\]"),
        ({"qwen3moe.expert_feed_forward_length": 64}, r"_exps.weight is \[6, 32, 64\]"),
        ({"qwen3moe.expert_gating_func": 2}, "it has qwen3moe.expert_gating_func"),
    ):
        ggufs.write_kind(path, "qwen3moe", metadata=metadata)
        refuses(words, load_gguf, path)


def test_an_architecture_is_added_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As "Add an architecture" describes it: a name, a class, tensors and settings."""

    def settings(metadata: Metadata, common: Settings) -> Settings:
        return {"attention_bias": bool(metadata.value("attention.biased", int, 0))}

    monkeypatch.setattr(architectures, "_KNOWN", dict(architectures._KNOWN))
    path = tmp_path / "a.gguf"
    original = ggufs.small("qwen3")
    sizes = ggufs.metadata_of(original)
    added = {f"mine.{key.partition('.')[2]}": value for key, value in sizes.items()}
    ggufs.write(path, original, "F32", metadata=added | {"general.architecture": "mine"})
    refuses("its architecture is 'mine'; known are llama", load_gguf, path)
    like = architectures.of_file("qwen3")
    assert like is not None
    architectures.register(
        Architecture("mine", ("Qwen3ForCausalLM",), like.table, like.tensors, settings)
    )
    torch.testing.assert_close(in_c(load_gguf(path)[0]), logits(original), rtol=0, atol=1e-4)


def test_a_file_of_gemma_2_may_leave_out_the_numbers_that_all_sizes_share(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small("gemma2"), "F32")
    model, _ = load_gguf(path)
    config = model.config
    assert config.sliding_window == 4096
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    assert config.layer_types == kinds[: config.num_hidden_layers]
