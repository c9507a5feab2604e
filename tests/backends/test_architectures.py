"""Models of all architectures, from files and from transformers, in the forward in C."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.backends import prepare
from forerun.backends.gguf.model import load_gguf
from forerun.backends.quantised import QuantisedForward
from tests.support import ggufs

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


def test_a_file_of_gemma_2_may_leave_out_the_numbers_that_all_sizes_share(tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "a.gguf", ggufs.small("gemma2"), "F32")
    model, _ = load_gguf(path)
    config = model.config
    assert config.sliding_window == 4096
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    assert config.layer_types == kinds[: config.num_hidden_layers]
