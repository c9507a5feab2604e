"""PEFT adapters switched between calls: no call uses what another adapter has left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModelForCausalLM, PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel

import forerun
from forerun.api.decoder import Decoder
from forerun.methods import AR, SD
from forerun.model.causal_lm import CausalLM
from tests.support.toys import VOCAB, noisy_copy, refuses, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT reads it

NEW = 8
LONG = torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [LONG[:40], LONG]  # the second one goes on behind the first
Answer = Callable[[list[int]], list[int]]
FAST: dict[str, Any] = {"custom_generate": forerun.custom_generate}


def adapted() -> PeftModelForCausalLM:
    """A tiny Llama with two adapters of random weights, which change what it says."""
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = get_peft_model(tiny("llama"), config, adapter_name="first")
        model.add_adapter("second", config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.5)
    return model.eval()


def plainly(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


def states(model: PeftModelForCausalLM) -> Iterator[str]:
    """Goes through what adapters can be switched to, saying to what."""
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        yield name
    with model.disable_adapter():
        yield "none"
    yield "first"
    model.merge_adapter(["first", "second"])
    yield "both"
    model.unmerge_adapter()
    yield "first"
    model.unload()
    yield "none"


def check(model: PeftModelForCausalLM, answer: Answer) -> None:
    """Whichever adapter was on before, answers equal those of transformers' own `generate`."""
    base = model.get_base_model()
    said = {}
    for state in states(model):
        for prompt in (PROMPTS[0], *PROMPTS):
            wanted = plainly(base, prompt)
            assert answer(prompt) == wanted
            assert said.setdefault((state, len(prompt)), wanted) == wanted
    assert len({tuple(tokens) for tokens in said.values()}) == len(said) == 8


def test_custom_generate_answers_through_the_model_that_peft_wraps_around() -> None:
    model = adapted()
    for name in ("first", "second"):
        model.set_adapter(name)
        assert plainly(model, LONG, **FAST) == plainly(model, LONG)
    with model.disable_adapter():
        assert plainly(model, LONG, **FAST) == plainly(tiny("llama"), LONG)


@pytest.mark.slow
def test_an_adapted_draft_costs_no_wrong_token() -> None:
    target = tiny("llama")
    model = adapted()
    draft = model.get_base_model()
    decoder = Decoder(target, draft=draft, method=SD(3), guard=False)
    for _ in states(model):
        for prompt in PROMPTS:
            wanted = plainly(target, prompt)
            assert decoder.generate(prompt, max_new_tokens=NEW).tokens == wanted
            assert plainly(target, prompt, **FAST, draft=draft) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_answers_are_of_the_adapter_that_is_on(drafts: bool) -> None:
    """Those of `custom_generate` and of a decoder, after a stream that was given up."""
    model = adapted()
    draft = noisy_copy(tiny("llama"), 0.03) if drafts else None
    base = model.get_base_model()
    decoder = Decoder(base, draft=draft, method=SD(3) if drafts else AR(), guard=False)

    def answer(prompt: list[int]) -> list[int]:
        abandoned = decoder.stream(prompt, max_new_tokens=NEW)
        next(abandoned)
        abandoned.close()
        streamed = [
            token
            for chunk in decoder.stream(prompt, max_new_tokens=NEW)
            for token in chunk.step.tokens
        ]
        assert decoder.generate(prompt, max_new_tokens=NEW).tokens == streamed
        assert plainly(base, prompt, **FAST, draft=draft) == streamed
        return streamed

    check(model, answer)


def test_a_stream_under_way_lends_no_other_call_its_keys() -> None:
    model = adapted()
    decoder = Decoder(model.get_base_model(), method=AR())
    stream = decoder.stream(LONG, max_new_tokens=NEW)
    next(stream)
    model.set_adapter("second")
    assert decoder.generate(LONG, max_new_tokens=NEW).tokens == plainly(model, LONG)
    stream.close()
    kept = decoder.engine
    assert decoder.engine is kept  # no call, so what was added to it stays
    decoder.generate(LONG, max_new_tokens=NEW)
    assert decoder.engine is not kept


def test_plain_models_go_on_with_what_was_computed() -> None:
    for model in (tiny("llama"), CausalLM(tiny("llama"))):
        decoder = Decoder(model, method=AR())
        decoder.generate(PROMPTS[0], max_new_tokens=NEW)
        decoder.generate(PROMPTS[1], max_new_tokens=NEW)
        assert decoder.engine.target.prefilled < sum(map(len, PROMPTS)) - 30


def test_merged_adapters_are_noticed_where_weights_were_copied() -> None:
    base = tiny("llama")
    before = plainly(base, LONG, **FAST)
    config = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        merged = get_peft_model(base, config).merge_and_unload()
    assert merged is base  # with the modules and tensors that it had
    assert plainly(base, LONG, **FAST) == plainly(base, LONG) != before


def test_prompt_tuning_is_refused() -> None:
    base = tiny("llama")
    model = get_peft_model(
        base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    refuses(
        "prepare_inputs_for_generation is replaced, as for prompt tuning",
        plainly,
        model,
        LONG,
        **FAST,
    )
    assert plainly(base, LONG, **FAST) == plainly(base, LONG)
