"""Greedy output equals that of transformers' own `generate`.

Token for token, for every method and architecture.
"""

from __future__ import annotations

from collections import abc
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
)

from benchmarks.baselines.lookup import Lookup
from forerun import Decoder
from forerun.drafters.plain import PlainDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Proposal
from forerun.engine.sequence import Request, Sequence
from forerun.methods import AR, SD, Cumulative, Hybrid, Method, Pacer, Suffix
from forerun.model.causal_lm import CausalLM
from tests.support.toys import (
    ARCHITECTURES,
    CORE,
    VOCAB,
    decode,
    noisy_copy,
    parts_of,
    tiny,
    tokens_of,
)

pytestmark = pytest.mark.versions

NEW = 28  # with the prompts: longer than the sliding window of the toys
_generator = torch.Generator().manual_seed(1)
PROMPTS = [
    torch.randint(2, VOCAB, (length,), generator=_generator).tolist()
    for length in (7, 1, 23, 40, 12)
]

PLAIN = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
CONFIGS = {
    "plain": PLAIN,
    "processors": PLAIN | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@cache
def target(architecture: str) -> PreTrainedModel:
    return tiny(architecture)


@cache
def expected(architecture: str, config: str) -> list[list[int]]:
    """Each prompt alone through transformers."""
    model = target(architecture)
    outputs = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), generation_config=GenerationConfig(**CONFIGS[config])
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def draft(architecture: str, kind: str) -> PreTrainedModel | None:
    model = target(architecture)
    if kind == "same":
        return model
    return (
        noisy_copy(model, 0.04)
        if kind == "noisy"
        else tiny(architecture, seed=9)
        if kind == "random"
        else None
    )


METHODS: dict[str, tuple[Method, str]] = {
    "ar": (AR(), "none"),
    "sd, a draft that agrees": (SD(5), "same"),
    "sd, a draft that agrees sometimes": (SD(4), "noisy"),
    "sd, a draft that never agrees": (SD(2), "random"),
    "lookup": (Lookup(6, 2), "none"),
    "suffix": (Suffix(), "none"),
    "hybrid": (Hybrid(threshold=2.0), "noisy"),
    "pacer": (Pacer(), "noisy"),
    "cumulative": (Cumulative(0.2), "noisy"),
}
_FEW = ("ar", "sd, a draft that agrees sometimes", "lookup")
CASES = [(name, method, config) for name in CORE for method in METHODS for config in CONFIGS]
CASES += [(name, method, "plain") for name in ARCHITECTURES if name not in CORE for method in _FEW]


@pytest.mark.parametrize(("architecture", "method", "config"), CASES)
def test_greedy_output_equals_transformers(architecture: str, method: str, config: str) -> None:
    how, kind = METHODS[method]
    small = draft(architecture, kind)
    decoder = Decoder(
        target(architecture),
        None,
        small,
        how,
        False,
        **parts_of(method, target(architecture), small),
    )
    wanted = expected(architecture, config)
    options: dict[str, Any] = {"max_new_tokens": NEW}
    if config == "processors":
        options |= {"repetition_penalty": 1.3}
        options |= {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(3)])}
    together = decoder.generate(PROMPTS, **options)
    assert [row.tokens for row in together] == wanted
    for i in (1, 2):  # the one-token prompt, and one longer than the window
        assert decoder.generate(PROMPTS[i], **options).tokens == wanted[i]
    assert len({tuple(output) for output in wanted}) == len(wanted)
    if kind == "same":
        assert all(row.stats.alpha == 1.0 for row in together)
    if kind == "noisy":
        assert (
            0.0
            < sum(row.stats.accepted for row in together)
            < sum(row.stats.tested for row in together)
        )


class KnowsTheAnswer(PlainDrafter):
    """Trees that hold the right continuation after wrong siblings.

    So the accepted nodes are never the first ones.
    """

    def __init__(self, outputs: abc.Sequence[abc.Sequence[int]]) -> None:
        self.outputs = outputs

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([self._tree(seq, self.outputs[seq.id][len(seq.output) :]) for seq in seqs])

    def _tree(self, seq: Sequence, answer: abc.Sequence[int]) -> Draft:
        tokens = [seq.tokens[-1]]
        parents = [-1]
        right = 0
        for token in answer[: min(1 + len(seq.tokens) % 4, seq.remaining - 1)]:
            wrong = [(token + shift) % VOCAB for shift in (1, 2)]
            tokens += [wrong[0], token, wrong[1], (token + 5) % VOCAB]
            parents += [
                right,
                right,
                right,
                len(tokens) - 4,
            ]  # the last is a child of the first wrong one
            right = len(tokens) - 3
        return Draft(tokens, parents)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_accepted_tree_paths_leave_the_right_cache(architecture: str) -> None:
    wanted = expected(architecture, "plain")
    requests = [Request(prompt, NEW - 3 * i) for i, prompt in enumerate(PROMPTS)]
    rows = decode(CausalLM(target(architecture)), KnowsTheAnswer(wanted), requests)
    assert [tokens_of(row) for row in rows] == [
        output[: NEW - 3 * i] for i, output in enumerate(wanted)
    ]
    assert sum(step.accepted for row in rows for step in row) > sum(map(len, rows))


@pytest.mark.parametrize("method", [SD(4), Lookup(6, 2)])
def test_the_context_ends_a_sequence_and_a_small_draft_context_does_not(method: Method) -> None:
    model = tiny("gpt2", context=48)
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 48]
    small = Decoder(model, None, tiny("gpt2", context=24, seed=3), method)
    plain = Decoder(model, None, None, AR())
    for batch in (prompts, prompts[2:3], prompts[3:4]):
        done = small.generate(batch, max_new_tokens=40)
        assert [row.tokens for row in done] == [
            row.tokens for row in plain.generate(batch, max_new_tokens=40)
        ]
        ends = [min(48, len(prompt) + 40) for prompt in batch]
        assert [
            len(prompt) + len(row.tokens) for prompt, row in zip(batch, done, strict=True)
        ] == ends
        assert {row.finish_reason for row in done} == {"length"}
