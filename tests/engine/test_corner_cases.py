"""Parameters at the ends of their ranges: drafts change neither greedy output nor any law."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)

from forerun import Decoder
from forerun.methods import METHODS, method
from forerun.model.causal_lm import CausalLM
from tests.support.toys import (
    joint_distribution,
    noisy_copy,
    p_value,
    random_head,
    random_layer,
    refuses,
    tiny,
)

LOOP = [1, 2, 3] * 12  # what loops, and so is drafted easily
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.15},
    {"presence_penalty": -2.0, "repetition_penalty": 0.9},
    {"frequency_penalty": -2.0, "presence_penalty": 2.0, "logit_bias": {1: 1.0}},
    {"stop_token_ids": [*range(40)], "min_new_tokens": 20, "frequency_penalty": -0.5},
]


def made(name: str = "sd", vocab: int = 64, **options: Any) -> Decoder:
    model = tiny("llama", vocab=vocab)
    kind = method(name).head
    head = random_head(CausalLM(model), kind=kind) if kind is not None else None
    draft = noisy_copy(model, 0.05) if method(name).needs_draft else None
    layer = None
    if method(name).layer is not None:
        layer = random_layer(model, noisy_copy(model, 0.05))
        draft = noisy_copy(model, 0.05)
    options |= {"head": head, "pre_verifier": layer}
    return Decoder(model, None, draft, method(name), False, **options)


@cache
def plain_outputs() -> list[list[int]]:
    """What plain decoding says with each of PENALTIES."""
    plain = made("ar")
    return [plain.generate(LOOP, max_new_tokens=40, **asked).tokens for asked in PENALTIES]


@pytest.mark.parametrize("name", sorted({*METHODS} - {"ar"}))
def test_greedy_output_with_penalties_is_that_of_plain_decoding(name: str) -> None:
    drafted = made(name)
    for penalties, wanted in zip(PENALTIES, plain_outputs(), strict=True):
        tokens = drafted.generate(LOOP, max_new_tokens=40, **penalties).tokens
        assert tokens == wanted, penalties
        if "min_new_tokens" in penalties:
            assert len(tokens) >= 20 and all(token >= 40 for token in tokens[:20])


LAWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "typical": (
        {"typical_p": 0.6, "temperature": 1.4},
        [TemperatureLogitsWarper(1.4), TypicalLogitsWarper(0.6)],
    ),
    "no end yet": (
        {"temperature": 1.0, "stop_token_ids": [0, 2], "min_new_tokens": 2},
        [MinNewTokensLengthLogitsProcessor(len(LOOP), 2, [0, 2])],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", ["sd", "suffix"])
@pytest.mark.parametrize("law", LAWS)
def test_sampling_follows_the_law(law: str, name: str, seed: int | None) -> None:
    asked, processors = LAWS[law]
    decoder = made(name, vocab=6, max_rows=100)
    joint = joint_distribution(decoder.target.model, LOOP, 2, LogitsProcessorList(processors))
    torch.manual_seed(7)
    rows = decoder.generate([LOOP] * 400, max_new_tokens=4, seed=seed, **asked)
    assert p_value([row.tokens[:2] for row in rows], joint) > 1e-4
    if "min_new_tokens" in asked:
        assert {row.finish_reason for row in rows} == {"stop", "length"}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", ["sd", "suffix", "lyanna"])
def test_the_ends_of_sampling_are_greedy(name: str, seed: int | None) -> None:
    wanted = made("ar").generate(LOOP, max_new_tokens=30).tokens
    decoder = made(name)
    for asked in ({"top_p": 1e-9, "temperature": 3.0}, {"temperature": 1e-5}, {"top_k": 1}):
        sampling = {"temperature": 1.0} | asked
        for row in decoder.generate([LOOP] * 3, max_new_tokens=30, seed=seed, **sampling):
            assert row.tokens == wanted


def test_values_out_of_range_are_refused() -> None:
    decoder = made("ar")
    for options, message in [
        ({"typical_p": 0}, "typical_p must be above 0 and at most 1, not 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "from 0 to max_new_tokens, which is 8, not 9"),
        ({"stop_token_ids": [64]}, r"stop_token_ids has token ids outside 0..63"),
        ({"stop_token_ids": [-1]}, "a token id of stop_token_ids must be 0 or more"),
        ({"stop_token_ids": 3}, "stop_token_ids must be token ids, not 3"),
        (
            {"min_new_tokens": 2, "response_format": {"type": "json_object"}},
            "min_new_tokens cannot be given with response_format",
        ),
    ]:
        refuses(message, decoder.generate, LOOP, **options)
