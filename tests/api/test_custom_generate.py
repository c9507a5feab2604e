"""`model.generate(custom_generate=forerun.custom_generate)` on tiny models.

Its output is compared with that of transformers' own loop.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from scipy.stats import chisquare
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

import forerun
from forerun.api.custom_generate import _KEPT
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import SD, Cumulative, Pacer
from forerun.model.causal_lm import CausalLM
from forerun.model.compat import CACHE_NAMES, cache_argument
from tests.support import commands
from tests.support.toys import (
    CONTEXT,
    COSTS,
    VOCAB,
    noisy_copy,
    random_head,
    random_layer,
    refuses,
    tiny,
    tiny_tokenizer,
)

pytestmark = pytest.mark.versions

NEW = 28
_generator = torch.Generator().manual_seed(2)
PROMPTS = [
    torch.randint(2, VOCAB, (length,), generator=_generator).tolist()
    for length in (7, 1, 23, 33, 12)
]
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
FIVE = SD(gamma=5)


@cache
def target(architecture: str = "llama") -> PreTrainedModel:
    return tiny(architecture)


@cache
def draft(architecture: str = "llama") -> PreTrainedModel:
    return noisy_copy(tiny(architecture), 0.04)


@cache
def layer(architecture: str = "llama") -> PreVerifier:
    return random_layer(target(architecture), draft(architecture))


def padded(prompts: Sequence[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def fast(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, **options: Any) -> Any:
    options = {"guard": False} | options  # else time decides which steps draft
    return model.generate(
        **(inputs or padded(PROMPTS[:1])), **options, custom_generate=forerun.custom_generate
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [5]},
    "lengths": {
        "eos_token_id": [4, 9, 17, 30],
        "min_new_tokens": 6,
        "exponential_decay_length_penalty": (8, 1.2),
    },
    "one row's tokens": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(2 + row, VOCAB, 2))
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma2"])
def test_greedy_output_equals_transformers(architecture: str, settings: str) -> None:
    model = target(architecture)
    new = 16
    options = GREEDY | SETTINGS[settings] | {"max_new_tokens": new}
    for prompts in (PROMPTS[:1], PROMPTS):
        wanted = model.generate(**padded(prompts), **options).tolist()
        stats: list[Any] = []
        small = {"draft": draft(architecture), "stats": stats}
        paced = {"method": Pacer(threshold=0.4), "pre_verifier": layer(architecture)}
        ways: list[dict[str, Any]] = [{}, {"method": "ar"}, {"method": SD(2), "draft": model}]
        for way in (small, *ways, small | paced, small | {"method": Cumulative(0.2)}):
            assert fast(model, padded(prompts), **options, **way).tolist() == wanted
        assert len(stats) == 3 * len(prompts)
        for taken in zip(*[iter(stats)] * len(prompts), strict=True):
            assert 0 < sum(row.accepted for row in taken) <= sum(row.tested for row in taken)
    assert len({tuple(row[-new:]) for row in wanted}) == len(wanted)


def test_prefix_functions_are_called_with_the_index_that_transformers_calls_them_with() -> None:
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    inputs = padded(PROMPTS[:2])
    called = list[set[int]]()
    for generate in (partial(target().generate, **inputs), partial(fast, target(), inputs)):
        indexes: set[int] = set()

        def fn(prompt: int, ids: Tensor, indexes: set[int] = indexes) -> list[int]:
            indexes.add(prompt)
            return list(range(2 + prompt, VOCAB, 3))

        outputs = generate(**options, prefix_allowed_tokens_fn=fn)
        assert indexes in ({0, 1}, set(range(6)))  # of prompts; of rows before transformers 5.24
        for row, tokens in enumerate(outputs[:, inputs["input_ids"].shape[1] :].tolist()):
            assert {token % 3 for token in tokens} == {(2 + row * len(indexes) // 6) % 3}
        called.append(indexes)
    assert called[0] == called[1]


def test_pacer_takes_its_layer_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    asked = []
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.setattr(
        "forerun.api.build.measure_costs", lambda *models, **options: asked.append(models) or COSTS
    )
    wanted = fast(model, padded(PROMPTS), **GREEDY, draft=draft(), method=FIVE).tolist()
    assert not asked  # by a method that goes by no costs
    layer().save_pretrained(tmp_path)
    for method, given in (("pacer", layer()), ("pacer", tmp_path), (None, str(tmp_path))):
        stats: list[Any] = []
        options = {"draft": draft(), "method": method, "pre_verifier": given, "stats": stats}
        assert fast(model, padded(PROMPTS), **GREEDY, **options).tolist() == wanted
        assert len({row.drafted for row in stats}) > 1
    assert len(asked) == 1
    with pytest.raises(ValueError, match="belongs to another draft"):
        fast(model, **GREEDY, draft=tiny("llama", seed=1), method="pacer", pre_verifier=layer())


@pytest.mark.slow
def test_lyanna_takes_its_head_or_a_folder(tmp_path: Path) -> None:
    model = tiny("llama")
    head = random_head(CausalLM(model))
    head.save_pretrained(tmp_path)
    wanted = fast(model, padded(PROMPTS), **GREEDY).tolist()
    for method, given in (("lyanna", head), ("lyanna", tmp_path), ("pacer-lyanna", head)):
        stats: list[Any] = []
        for _ in range(2):
            output = fast(
                model,
                padded(PROMPTS),
                **GREEDY,
                method=method,
                head=given,
                guard=False,
                stats=stats,
            )
            assert output.tolist() == wanted
        assert sum(row.drafted for row in stats) > 0
    refuses(
        "belongs to another target",
        fast,
        noisy_copy(model, 0.04, seed=1),
        **GREEDY,
        method="lyanna",
        head=head,
    )


def test_no_mask_is_all_ones_and_max_length_counts_the_prompt() -> None:
    ids = {"input_ids": torch.tensor([PROMPTS[0]])}
    for options in (
        {"max_length": 20, "do_sample": False},
        {"do_sample": False},
        GREEDY | {"use_cache": False},
    ):
        wanted = target().generate(**ids, **options)
        assert torch.equal(fast(target(), ids, **options, **_cache(DynamicCache())), wanted)
        whole = fast(
            target(),
            ids,
            **options,
            position_ids=torch.arange(7)[None],
            return_dict_in_generate=True,
        )
        assert isinstance(whole, GenerateDecoderOnlyOutput) and torch.equal(whole.sequences, wanted)


def test_rows_end_at_the_context() -> None:
    model = tiny("gpt2", context=48)
    small = tiny("gpt2", context=24, seed=4)
    output = fast(model, padded([PROMPTS[2], PROMPTS[0]]), **GREEDY, draft=small)
    first = model.generate(**padded([PROMPTS[2]]), **GREEDY | {"max_new_tokens": 25})
    other = model.generate(**padded([PROMPTS[0]]), **GREEDY)
    assert output[0].tolist() == [*first[0].tolist(), 0, 0, 0] and torch.equal(
        output[1, 16:], other[0]
    )


SAMPLED = {"do_sample": True, "max_new_tokens": 12, "top_k": 20, "pad_token_id": 0}


def test_several_draws_are_independent_and_repeatable() -> None:
    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return fast(
            target(), padded(PROMPTS[:2]), **SAMPLED, draft=draft(), num_return_sequences=3
        ).tolist()

    first = drawn(1)
    assert [row[:7] for row in first] == [
        row for row in padded(PROMPTS[:2])["input_ids"].tolist() for _ in range(3)
    ]
    assert len({tuple(row) for row in first}) == 6 and drawn(1) == first != drawn(2)
    torch.manual_seed(1)
    assert not torch.equal(fast(target(), **SAMPLED), fast(target(), **SAMPLED))


@pytest.mark.parametrize("kind", ["draft", "suffix"])
def test_sampled_tokens_follow_transformers_distribution(kind: str) -> None:
    # Two tokens are asked for, so that the first may be a draft's.
    prompt, count = [11, 12, 13, 11, 12], 600
    inputs = padded([prompt])
    with torch.no_grad():
        best, tokens = target()(inputs["input_ids"]).logits[0, -1].div(1.5).topk(5)
    torch.manual_seed(3)
    options = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 5,
        "max_new_tokens": 2,
        "num_return_sequences": count,
    }
    stats: list[Any] = []
    # A copy has no decoder of another test, whose costs would forbid drafts in such a batch.
    model = copy.deepcopy(target())
    output = fast(model, inputs, **options, draft=draft() if kind == "draft" else None, stats=stats)
    observed = [int((output[:, len(prompt)] == token).sum()) for token in tokens]
    assert sum(observed) == count and sum(row.tested for row in stats) >= count
    assert (
        chisquare(observed, (best.softmax(-1).double() * count).numpy(), sum_check=False).pvalue
        > 1e-3
    )


def test_a_streamer_is_given_what_transformers_gives_it() -> None:
    ours = Mock()
    theirs = Mock()
    output = fast(target(), **GREEDY, draft=draft(), token_streamer=ours)
    target().generate(**padded(PROMPTS[:1]), **GREEDY, streamer=theirs)
    calls, wanted = (
        [[each[0], *map(Tensor.tolist, each.args)] for each in one.method_calls]
        for one in (ours, theirs)
    )
    assert calls == wanted and calls[1:] == [
        *(["put", [token]] for token in output[0, 7:].tolist()),
        ["end"],
    ]


def stops_at(text: str) -> StoppingCriteriaList:
    return StoppingCriteriaList([transformers.StopStringCriteria(tiny_tokenizer(), [text])])


def test_a_stop_string_inside_an_accepted_chunk_ends_the_row() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny("llama", vocab=len(tokenizer))
    for row, prompt in enumerate(PROMPTS[:3]):
        words = [
            tokenizer.decode([token])
            for token in fast(model, padded([prompt]), **GREEDY)[0, len(prompt) :]
        ]
        fresh = [word for i, word in enumerate(words) if i % 6 in (2, 3) and word not in words[:i]]
        stop = next(word for word in fresh if word.isascii() and word.strip())
        theirs = model.generate(
            **padded([prompt]), **GREEDY, stop_strings=[stop], tokenizer=tokenizer
        )
        stats: list[Any] = []
        ours = fast(
            model,
            padded([prompt]),
            **GREEDY,
            draft=model,
            stopping_criteria=stops_at(stop),
            stats=stats,
        )
        assert torch.equal(ours, theirs)
        assert stats[0].tokens % 6 and stats[0].tokens < NEW  # six would be a whole chunk
        together = fast(
            model, padded(PROMPTS[:3]), **GREEDY, draft=model, stopping_criteria=stops_at(stop)
        )
        assert together[row, 23:].tolist()[: stats[0].tokens + 1] == [
            *ours[0, len(prompt) :].tolist(),
            0,
        ]


def test_criteria_are_asked_token_by_token_with_the_padding_in_front() -> None:
    seen: list[list[int]] = []

    def asked(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        seen.append(input_ids[0].tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    given = {"draft": target(), "method": FIVE, "stopping_criteria": StoppingCriteriaList([asked])}
    output = fast(target(), padded([PROMPTS[1], PROMPTS[0][:5]]), **GREEDY, **given)
    assert output.shape == (2, 9)
    assert seen == [row[:n] for row in output.tolist() for n in range(6, 10)]
    stats: list[Any] = []
    output = fast(
        target(), **GREEDY, draft=target(), method=FIVE, max_time=0.0, stats=stats
    )  # time is a criterion too
    assert output.shape == (1, 8) and stats[0].drafted == 5


@pytest.mark.slow
def test_changed_weights_are_noticed_and_others_are_not_prepared_again() -> None:
    model = tiny("llama", seed=5)
    other = tiny("llama", seed=6)
    fast(model, **GREEDY, draft=other)
    kept = vars(model)[_KEPT]
    for options in ({"draft": other}, {"method": "ar"}, {}, {"draft": other, "method": SD(3)}):
        fast(model, **GREEDY, **options)
        assert vars(model)[_KEPT] is kept
    before = fast(model, **GREEDY).tolist()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            )
    after = fast(model, **GREEDY, draft=other).tolist()
    assert after == model.generate(**padded(PROMPTS[:1]), **GREEDY).tolist() != before
    with torch.no_grad():
        other.lm_head.weight.copy_(model.lm_head.weight)
    kept = vars(model)[_KEPT]
    fast(model, **GREEDY, draft=other)
    assert vars(model)[_KEPT] is not kept
    fast(model, **GREEDY, draft=model)
    assert vars(model)[_KEPT].draft is model


def test_copies_start_without_what_was_prepared_and_models_are_collected_after_use() -> None:
    model = tiny("llama", seed=5)
    small = tiny("llama", seed=6)
    fast(model, **GREEDY, draft=small)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other)[_KEPT] is None
        assert torch.equal(fast(other, **GREEDY), fast(model, **GREEDY))
        assert vars(other)[_KEPT].model is other
    assert set(model.state_dict()) == set(tiny("llama").state_dict())
    gone = [*map(weakref.ref, (model, small))]
    del model, small
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def _cache(cache: DynamicCache) -> dict[str, DynamicCache]:
    return {cache_argument(target().forward): cache}


def _masked(*row: int) -> dict[str, Any]:
    return {
        "inputs": {
            "attention_mask": torch.tensor([row]),
            "input_ids": torch.tensor([[5] * len(row)]),
        }
    }


UNPADDED = {"inputs": padded(PROMPTS[:2]), "pad_token_id": None}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"num_beams": 2},
        "generation mode 'beam_search' is not supported; greedy search and sampling are",
    ),
    ({"penalty_alpha": 0.6, "top_k": 4}, "generation mode 'contrastive_search' is not supported"),
    ({"prompt_lookup_num_tokens": 3}, "generation mode 'assisted_generation' is not supported"),
    ({"dola_layers": "high"}, "generation mode 'dola_generation' is not supported"),
    ({"guidance_scale": 2.0}, r"guidance_scale=2.0 is not supported"),
    ({"forced_eos_token_id": 3}, "forced_eos_token_id=3 is not supported"),
    ({"encoder_repetition_penalty": 1.5}, r"encoder_repetition_penalty=1.5 is not supported"),
    ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size=2 is not supported"),
    *(
        (
            {name: True, "return_dict_in_generate": True},
            f"{name} is not supported; only sequences are returned",
        )
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    ),
    (
        _masked(1, 1, 0),
        "attention_mask may have zeros on the left of a row alone: pad with padding_side='left'",
    ),
    (_masked(0, 1, 0, 1), "attention_mask may have zeros on the left"),
    (_masked(0, 0), "attention_mask may have zeros on the left"),
    (
        {"position_ids": torch.arange(1, 8)[None]},
        "position_ids must count the tokens that attention_mask shows",
    ),
    (
        {"token_type_ids": torch.zeros(1, 7).long(), "model": target("gpt2")},
        "token_type_ids is not supported; only tok",
    ),
    ({"draft": "my-draft"}, "draft must be a loaded transformers model, not 'my-draft'"),
    ({"method": "sd"}, "method 'sd' needs a draft model: give a draft"),
    ({"method": "magic"}, "unknown method 'magic'; there are ar, sd, pacer, suffix"),
    (
        {"token_streamer": Mock(), "num_return_sequences": 2, "do_sample": True},
        "takes a single sequence, not 2",
    ),
    (_masked(*[1] * CONTEXT), "prompt 0 has 256 tokens; the target's context of 256 leaves room"),
    ({"draft": tiny("llama", vocab=32)}, "vocabulary has 32 entries, the target's 64"),
    ({"model": tiny("llama").train()}, "LlamaForCausalLM is in training mode"),
    ({"draft": tiny("gpt2").train()}, "GPT2LMHeadModel is in training mode"),
    ({"inputs": {"inputs_embeds": torch.zeros(1, 3, 32)}}, "inputs_embeds is not supported"),
    (
        {"model": target("gpt2"), **UNPADDED, "stopping_criteria": stops_at("a")},
        "different lengths; set pad_token_id",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED]
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    fast(target(), **GREEDY, draft=draft())  # what is kept of a call makes no later one pass
    options = (
        {"model": target(), "inputs": {"input_ids": torch.tensor([PROMPTS[0]])}} | GREEDY | options
    )
    refuses(message, fast, **options)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_users_cache_must_be_empty_under_either_name(name: str) -> None:
    ids, mask = padded(PROMPTS[:1]).values()
    options = GREEDY | {"return_dict_in_generate": False}
    wanted = target().generate(ids, attention_mask=mask, **options)
    # Straight to the function, as versions of transformers pass on one name or the other.
    config = transformers.GenerationConfig(**options, eos_token_id=None)
    target()._prepare_special_tokens(config, True)
    rules = (
        transformers.LogitsProcessorList(),
        StoppingCriteriaList([transformers.MaxLengthCriteria(wanted.shape[1])]),
    )
    called = partial(forerun.custom_generate, target(), ids, *rules, config, attention_mask=mask)
    assert torch.equal(called(**{name: DynamicCache()}), wanted)
    filled = DynamicCache()
    target()(torch.tensor([PROMPTS[0][:3]]), use_cache=True, **_cache(filled))
    refuses(f"^{name} must be empty and not quantized", called, **{name: filled})


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    done = commands.run("--max-new-tokens", "6", program=path.read_text())
    assert done.returncode == 0 and "target forward" in done.stdout, done.stderr
    assert len(path.read_text().splitlines()) <= 52  # short enough to copy
    if path.name == "greedy.py":
        assert "same tokens as plain generate: True" in done.stdout
    if path.name == "own_method.py":
        assert "same tokens as plain decoding: True" in done.stdout
        assert "\n1.00 tokens per target forward" not in done.stdout
