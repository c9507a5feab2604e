"""Features of the engine that only the server uses: log probabilities, plain rows, penalties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from forerun import Decoder
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.sampling.sampler import LogitBias, Penalties
from tests.support.toys import (
    joint_distribution,
    noisy_copy,
    p_value,
    random_head,
    refuses,
    tiny,
    tokens_of,
)

PROMPT = [1, 2, 3, 2, 1, 2]
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "logit_bias": {1: 1.5, 4: -2.0},
}


def made(name: str = "sd", vocab: int = 64, **options: Any) -> Decoder:
    model = tiny("llama", vocab=vocab)
    head = random_head(CausalLM(model), kind=name) if method(name).head else None
    draft = noisy_copy(model, 0.05) if method(name).needs_draft else None
    return Decoder(model, None, draft, method(name), False, head=head, **options)


def test_penalties_are_those_of_openai() -> None:
    ids = torch.tensor([[3, 3, 1, 1, 2], [3, 3, 2, 2, 2]])
    scores = torch.zeros(2, 4)
    assert Penalties(0.5, 0.25, 2)(ids, scores).tolist() == [[0, -1.0, -0.75, 0], [0, 0, -1.25, 0]]
    beyond = Penalties(0.5, 0.25, 2)(
        torch.tensor([[0, 0, 9]]), torch.zeros(1, 4)
    )  # a token that a draft lacks
    assert beyond.tolist() == [[0] * 4]
    assert Penalties(0.5, 0.25, 2)(ids[:, :2], scores) is scores
    assert (
        LogitBias({1: 2.0, 9: 5.0})(ids, scores).tolist() == [[0, 2, 0, 0]] * 2 and not scores.any()
    )


@pytest.mark.parametrize("name", ["sd", "suffix", "lyanna"])
def test_penalties_are_part_of_the_law(name: str) -> None:
    plain = made("ar").generate(PROMPT, max_new_tokens=40, **PENALTIES)
    drafted = made(name)
    found = drafted.generate(PROMPT, max_new_tokens=40, **PENALTIES)
    assert found.tokens == plain.tokens != drafted.generate(PROMPT, max_new_tokens=40).tokens


@pytest.mark.slow
def test_sampling_with_penalties_follows_their_law() -> None:
    decoder = made(vocab=6, max_rows=100)
    law = LogitsProcessorList(
        [LogitBias(PENALTIES["logit_bias"]), Penalties(0.7, 0.9, len(PROMPT))]
    )
    joint = joint_distribution(decoder.target.model, PROMPT, 3, law)
    rows = decoder.generate([PROMPT] * 400, max_new_tokens=4, temperature=1.0, seed=5, **PENALTIES)
    assert p_value([row.tokens[:3] for row in rows], joint) > 1e-4
    tested, accepted = (
        sum(getattr(row.stats, each) for row in rows) for each in ("tested", "accepted")
    )
    assert 0 < accepted < tested


@pytest.mark.parametrize("name", ["sd", "lyanna", "hybrid"])
def test_plain_rows_are_never_drafted_for(name: str) -> None:
    decoder = made(name)
    asked = [decoder.request(PROMPT[:size], max_new_tokens=30) for size in (3, 4, 5, 6)]
    alone = [tokens_of(steps) for steps in made("ar").session.add(asked).collect()]
    answers = decoder.session.add(
        [replace(request, plain=bool(at % 2)) for at, request in enumerate(asked)]
    ).collect()
    assert [tokens_of(steps) for steps in answers] == alone
    assert [len(steps) == 30 for steps in answers][1::2] == [True, True]
    assert not any(step.drafted for steps in answers[1::2] for step in steps)
    assert any(step.drafted for steps in answers[::2] for step in steps)


@pytest.mark.parametrize("name", ["ar", "sd", "hybrid"])
def test_log_probabilities_are_the_models_own(name: str) -> None:
    decoder = made(name)
    (plain,) = decoder.session.add(
        [decoder.request(PROMPT, max_new_tokens=5)]
    ).collect()  # which asks for none
    assert all(
        step.logprobs == () and step.prompt_logprobs is None and step.waited >= 0 for step in plain
    )
    how = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1} | PENALTIES
    asked = [
        replace(decoder.request(prompt, **how), logprobs=top, prompt_logprobs=bool(top))
        for prompt, top in ((PROMPT, 3), (PROMPT[:3] * 50, 2), (PROMPT, 0), (PROMPT[:1], 1))
    ]
    for request, steps in zip(asked, decoder.session.add(asked).collect(), strict=True):
        tokens = [*request.tokens, *tokens_of(steps)]
        with torch.inference_mode():
            law = decoder.target.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        before = steps[0].prompt_logprobs
        assert (before is not None) == request.prompt_logprobs
        assert all(step.prompt_logprobs is None for step in steps[1:])
        entries = [*(before or ()), *(entry for step in steps for entry in step.logprobs)]
        first = len(tokens) - len(entries)
        assert first == (1 if request.prompt_logprobs else len(request.tokens))
        for at, entry in enumerate(entries, first):
            assert entry.token == tokens[at]
            assert entry.logprob == pytest.approx(float(law[at - 1, entry.token]), abs=1e-4)
            best = law[at - 1].topk(request.logprobs).values.tolist() if request.logprobs else []
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)


def test_bad_penalties_are_refused() -> None:
    biases: list[Any] = [{5: 101}, {"5": 1}, {-1: 1}, [1]]
    bad = [
        ("presence_penalty", 2.5),
        ("frequency_penalty", "1"),
        *(("logit_bias", each) for each in biases),
    ]
    for name, value in bad:
        refuses(name, SamplingParams, **{name: value})
    refuses(r"logit_bias has token ids outside 0\.\.63", made().request, PROMPT, logit_bias={64: 1})


def test_parameters_can_be_keys() -> None:
    form = {"type": "regex", "regex": "a"}
    one, other = (SamplingParams(logit_bias={1: 2.0}, response_format=form) for _ in range(2))
    form["regex"] = "b"
    assert (
        hash(one) == hash(other)
        and one == other
        and one.response_format == {"type": "regex", "regex": "a"}
    )
