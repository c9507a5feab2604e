"""Forwards of many rows, trees and chunks at all lengths have the bits of decoding one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.quality.forward_bits import Cases, Check, DifferenceError, contexts, reference_of
from forerun.backends import prepare
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import store
from forerun.engine.draft import Draft
from forerun.engine.target import Output
from forerun.model.causal_lm import CausalLM
from tests.support.families import tiny
from tests.support.native import native_settings

restored = pytest.fixture(autouse=True)(native_settings)

LONGEST, CASES = 480, 24
# Architecture, weights and settings. With float32 weights keys and values are float32, else
# float16.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "1 head a group": ("qwen3", "int4", {}),
    "2 heads a group, float32": ("llama", "float32", {}),
    "2 heads a group, tied": ("qwen2", "int8", {}),
    "3 heads a group": (
        "llama",
        "int4",
        {"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 4},
    ),
    "6 heads a group": ("qwen2", "bfloat16", {"num_attention_heads": 12}),
    "6 heads a group, float32": ("qwen2", "float32", {"num_attention_heads": 12}),
    "7 heads a group": ("qwen2", "int4", {"num_attention_heads": 14, "head_dim": 64}),
    "a window of 20": ("mistral", "int4", {}),
    "a window of 100, float32": (
        "mistral",
        "float32",
        {"sliding_window": 100, "num_key_value_heads": 2},
    ),
    "windows in some layers": ("smollm3", "bfloat16", {"sliding_window": 70}),
    "a window of 5": ("smollm3", "float32", {}),
}


def model_of(name: str) -> CausalLM:
    family, weights, settings = MODELS[name]
    model = tiny(family, **settings)
    return prepare(model if weights == "float32" else store(model, weights))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_bits_of_single_ones_at_all_lengths(name: str) -> None:
    model = model_of(name)
    assert isinstance(model.backend, QuantisedForward)
    check = Check(model, reference_of(model, LONGEST, seed=1))
    cases = Cases(LONGEST, seed=1, multiples=(8, 16, 32, 64))
    for number in range(CASES):
        check.run(cases[number], seed=1)
    assert check.rows > 10 * CASES and check.entries > check.rows / 2


@pytest.mark.parametrize("spoilt", ["logits", "keys"])
def test_a_bit_that_differs_is_told_with_its_place(
    spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit changes in forwards of more than 8 rows behind more than 100 tokens."""
    model = model_of("2 heads a group, tied")
    reference = reference_of(model, 200, seed=1)
    forward = CausalLM.forward

    def wrong(self: CausalLM, ids: list[int], drafts: list[Draft], capture: Any = "") -> Output:
        output = forward(self, ids, drafts, capture)
        if len(drafts[0]) > 8 and self.length(ids[0]) > 100:
            if spoilt == "logits":
                output.logits[0].view(torch.int32)[5, 17] ^= 1
            else:
                place = self.cache.row(ids[0]), 1, self.length(ids[0])
                self.cache.layers[1].keys.view(torch.int16)[*place, 3] ^= 1
        return output

    monkeypatch.setattr(CausalLM, "forward", wrong)
    cases = Cases(200, seed=1, multiples=(8, 64), kinds=["chain"])
    check = Check(model, reference)
    with pytest.raises(DifferenceError) as error:
        for case in cases:
            check.run(case)
    told = str(error.value)
    place = "1 of 130 logits differ" if spoilt == "logits" else "layer 1, head 1, position"
    assert place in told and "kind='chain'" in told and "together" in told


def test_cases_are_all_combinations_each_once() -> None:
    cases = Cases(40, multiples=(8, 32), of_variants=["plain", "avx2"])
    whole = {(case.kind, case.variant, case.threads, case.context, case.size) for case in cases}
    assert len(whole) == len(cases) == len(contexts(40, (8, 32))) * 64 * 5 * 2 * 3
    few = [cases[number] for number in range(60)]
    assert {case.kind for case in few} == {"chain", "tree", "chunks", "batch", "walk"}
    assert {case.threads for case in few} == {1, 2, 3} and {case.variant for case in few} == {
        "plain",
        "avx2",
    }
    assert min(case.size for case in few) < 8 and max(case.size for case in few) > 56
