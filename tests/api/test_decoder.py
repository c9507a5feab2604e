"""The Python interface on tiny models: prompts, parameters, streams, errors."""

import copy
import re
from dataclasses import FrozenInstanceError
from functools import partial
from math import inf, nan

import numpy as np
import pytest
import torch
import transformers
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

import forerun
from forerun import Decoder, EngineOptions
from forerun.methods import METHODS, method
from forerun.sampling.params import SamplingParams
from tests.support.toys import noisy_copy, parts_of, refuses, tiny, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IDS = TOKENIZER("def add")["input_ids"]
Decoders = dict[str, Decoder]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", vocab=len(TOKENIZER), context=96)


@pytest.fixture(scope="module")
def decoders(target: PreTrainedModel) -> Decoders:
    draft = noisy_copy(target, 0.02)
    return {
        name: Decoder(target, TOKENIZER, draft, method(name), **parts_of(name, target, draft))
        for name in METHODS
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_interleaved_streams_give_what_generate_gives(
    decoders: Decoders, name: str, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=7, ignore_eos=True)
    calls = ["def add", "for i in"], ["class"]
    wanted = [result for prompts in calls for result in decoders[name].generate(prompts, params)]
    streams = [decoders[name].stream(prompts, params) for prompts in calls]
    texts = [""] * 3
    tokens = [[] for _ in wanted]
    reasons = [None] * 3
    for turn in [0, 0, 1, 0, 1, 1] * 60:
        if (chunk := next(streams[turn], None)) is not None:
            assert chunk.text == "".join(text for text, _ in chunk.pieces)
            row = 2 * turn + chunk.index
            texts[row] += chunk.text
            tokens[row] += chunk.step.tokens
            reasons[row] = chunk.finish_reason
    assert texts == [result.text for result in wanted]
    assert tokens == [result.tokens for result in wanted] and reasons == ["length"] * 3


def test_text_and_token_prompts_are_the_same(decoders: Decoders) -> None:
    generate = partial(decoders["sd"].generate, max_new_tokens=20)
    by_text = generate("def add")
    for result in (generate(IDS), generate(torch.tensor(IDS)), *generate([IDS])):
        assert result.tokens == by_text.tokens
    assert by_text.text == TOKENIZER.decode(by_text.tokens, skip_special_tokens=True)


def test_users_own_processors_and_criteria_are_obeyed(
    decoders: Decoders, target: PreTrainedModel
) -> None:
    ids = torch.tensor([IDS])
    processors = LogitsProcessorList(
        [transformers.SuppressTokensLogitsProcessor(list(range(0, 300, 2)))]
    )

    def twelve(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] == ids.shape[1] + 12)

    options = {"logits_processor": processors, "stopping_criteria": StoppingCriteriaList([twelve])}
    theirs = target.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=None, **options)[
        0, ids.shape[1] :
    ]
    assert len(theirs) == 12
    for decoder in decoders.values():
        result = decoder.generate("def add", max_new_tokens=40, ignore_eos=True, **options)
        assert (result.tokens, result.finish_reason) == (theirs.tolist(), "stop")


def test_criteria_are_given_the_scores_that_gave_the_token(decoders: Decoders) -> None:
    seen: list[tuple[int, int]] = []

    def see(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        assert scores.shape == (1, decoders["sd"].target.vocab_size)
        seen.append((int(input_ids[0, -1]), int(scores[0].argmax())))
        return torch.zeros(1, dtype=torch.bool)

    for penalty in (1.0, 1.3):
        for name in ("ar", "sd", "lyanna"):
            seen.clear()
            options = {"max_new_tokens": 20, "ignore_eos": True, "repetition_penalty": penalty}
            result = decoders[name].generate(
                "def add", stopping_criteria=StoppingCriteriaList([see]), **options
            )
            assert seen == [(token, token) for token in result.tokens]
    # Processors with a state of their own are refused.
    marks = transformers.SynthIDTextWatermarkLogitsProcessor(
        5, [1, 2, 3], 64, 0, 64, torch.device("cpu")
    )
    with pytest.raises(
        ValueError, match="SynthIDTextWatermarkLogitsProcessor is not supported: it keeps state"
    ):
        decoders["sd"].generate("def add", logits_processor=LogitsProcessorList([marks]))


def test_sampling_params_stand_alone(target: PreTrainedModel) -> None:
    model = copy.deepcopy(target)
    model.generation_config.update(
        do_sample=True, temperature=5.0, repetition_penalty=3.0, max_length=17
    )
    decoder = Decoder(model, TOKENIZER, method=method("ar"))
    plain = Decoder(target, TOKENIZER, method=method("ar"))
    assert (
        decoder.generate("def add", max_new_tokens=30).tokens
        == plain.generate("def add", max_new_tokens=30).tokens
    )


@pytest.mark.slow
def test_without_a_seed_it_follows_torch(decoders: Decoders) -> None:
    params = SamplingParams(max_new_tokens=10, temperature=1.0, ignore_eos=True)
    # Outputs that the others remember, or how often drafts were right, change what is sampled.
    for name in decoders.keys() - {"sd", "suffix", "hybrid"}:
        decoder = decoders[name].replace(guard=False)  # which goes by the clock
        torch.manual_seed(3)
        first = decoder.generate("def", params).tokens
        second = decoder.generate("def", params).tokens
        torch.manual_seed(3)
        assert decoder.generate("def", params).tokens == first != second


@pytest.mark.slow
def test_the_context_ends_a_sequence(decoders: Decoders) -> None:
    for decoder in decoders.values():
        result = decoder.generate(IDS, max_new_tokens=1000, ignore_eos=True)
        assert (len(IDS) + len(result.tokens), result.finish_reason) == (96, "length")


def test_prompts_that_are_refused(decoders: Decoders) -> None:
    for prompts, options, message in (
        ([], {}, "no prompts"),
        ("", {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([1, 5000], {}, r"outside 0\.\.\d+"),
        ([5] * 96, {}, "96 tokens; the target's context of 96"),
        ("a", {"temperature": -0.1}, "temperature must be"),
        ("a", {"tempreature": 1.0}, "unknown option 'tempreature'"),
        (
            "a",
            {"params": transformers.GenerationConfig()},
            "params must be SamplingParams, not GenerationConfig",
        ),
    ):
        for run in (decoders["sd"].generate, decoders["sd"].stream):
            refuses(message, run, prompts, **options)


def test_load_names_what_is_wrong() -> None:
    for options, message in (
        ({"method": "turbo"}, "unknown method 'turbo'; there are ar, sd, pacer, suffix"),
        ({"draft": "embedded", "gama": 3}, "no setting 'gama'"),
        ({"draft": "embedded", "gamma": 0}, "gamma must be an integer of at least 1, not 0"),
        ({"target": "nothing/at/all"}, "no model folder"),
        ({"device": "toaster"}, "cannot use device 'toaster'"),
        ({"dtype": "float12"}, "unknown dtype 'float12'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "meta"}, "cannot use device 'meta'"),
        ({"max_row": 3}, "no setting 'max_row'"),
        ({"target": tiny("llama"), "method": "sd"}, "needs a draft"),
    ):
        refuses(message, forerun.load, **options)


def test_generate_of_text_needs_a_tokenizer(target: PreTrainedModel) -> None:
    for options in ({"prompts": "text"}, {"prompts": [1], "stop": "a"}):
        refuses("need a tokenizer", forerun.load(target).generate, **options)


def test_options_are_objects_or_given_singly_and_a_decoder_does_not_change(
    target: PreTrainedModel,
) -> None:
    one = forerun.load(
        target, method="ar", engine=EngineOptions(max_rows=3, guard=False), kv_memory=10**6
    )
    assert one.options == EngineOptions(max_rows=3, guard=False, kv_memory=10**6)
    with pytest.raises(FrozenInstanceError):
        one.method = method("suffix")  # type: ignore[misc]
    other = one.replace(method=method("suffix"), max_rows=5)
    assert (other.method.name, other.options.max_rows, other.options.guard) == ("suffix", 5, False)
    assert (one.method.name, one.options.max_rows, other.target) == ("ar", 3, one.target)


def test_a_bad_value_is_named() -> None:
    for name, values, message in (
        ("seed", [1.5, True, "7"], "must be an integer, not"),
        ("seed", [-1, 2**62], "must be 0 or more and below 2**62, not"),
        ("max_new_tokens", [0], "must be at least 1, not"),
        ("max_new_tokens", [None, 8.0], "must be an integer, not"),
        ("temperature", ["hot", True], "must be a number, not"),
        ("temperature", [nan, inf, 1e-9], "must be 0 (greedy) or at least 0.00001, not"),
        ("top_k", [2.5], "must be an integer, not"),
        ("top_k", [-1], "must be 0 (all) or more, not"),
        ("top_p", [0], "must be above 0 and at most 1, not"),
        ("top_p", [[0.9]], "must be a number, not"),
        ("min_p", [1.5], "must be between 0 and 1, not"),
        ("repetition_penalty", [nan], "must be above 0, not"),
        ("ignore_eos", ["no"], "must be True or False, not"),
        ("stop", [["a", ""], 5, b"a"], "must be strings that are not empty, not"),
    ):
        for value in values:
            refuses(re.escape(f"{name} {message} {value!r}"), SamplingParams, **{name: value})


def test_numbers_of_numpy_are_numbers_and_a_stop_string_may_stand_alone() -> None:
    numbers = {
        "seed": np.int64(3),
        "temperature": np.float32(0.5),
        "top_k": np.int32(4),
        "max_new_tokens": np.int64(2),
    }
    params = SamplingParams(**numbers)
    assert (params.seed, params.top_k, params.max_new_tokens) == (3, 4, 2)
    wanted = [("a",)] * 3 + [()] * 2
    assert [SamplingParams(stop=stop).stop for stop in ("a", ["a"], ("a",), None, [])] == wanted  # type: ignore[arg-type]
