"""Requests from SamplingParams, or from a transformers GenerationConfig."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode

from forerun.engine.sequence import Request
from forerun.model.causal_lm import CausalLM
from forerun.model.compat import prompt_of_row
from forerun.sampling.grammar import compiled, end_of
from forerun.sampling.params import SamplingParams
from forerun.sampling.response_format import form_of
from forerun.sampling.sampler import Sampler
from forerun.text.chat import turn_ends
from forerun.text.stop_strings import StopStrings

# They keep state from call to call or run a model of their own: calls for drafted tokens would change what they do.
_STATEFUL = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}


def requests(
    rows: Sequence[Sequence[int]],
    params: SamplingParams | GenerationConfig,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processors: LogitsProcessorList | None = None,
    criteria: StoppingCriteriaList | None = None,
) -> list[Request]:
    """Return a request for each prompt of token ids; row i samples from stream i of the seed.

    SamplingParams stand alone: of the checkpoint's generation config only the end tokens are used. A GenerationConfig
    is completed by the checkpoint's, as in transformers. It has no seed: torch's own state gives one, so that what is
    sampled can be repeated, though a draft model's tokens are accepted less often then.

    Raises:
        ValueError: what the loop cannot do, stop strings without a tokenizer, no room after a prompt, a response
            format that cannot be used.
    """
    check_processors(processors)
    config: Any = params
    criteria, form = StoppingCriteriaList(criteria or []), None
    if isinstance(params, SamplingParams):
        seed, form = params.seed, form_of(params.response_format)
        ends = None if params.ignore_eos else target.model.generation_config.eos_token_id
    else:
        config = _completed(params, target)
        greedy, ends = not config.do_sample, config.eos_token_id
        seed = None if greedy else int(torch.randint(2**31, (1,)))
        if config.max_time is not None:
            criteria.append(MaxTimeCriteria(config.max_time))
    eos = frozenset([ends] if isinstance(ends, int) else ends or [])
    strings = stop_strings(config)
    if strings and tokenizer is None:
        raise ValueError("stop strings need a tokenizer; give tokenizer=...")
    stops = StopStrings(tokenizer, strings) if strings and tokenizer is not None else None
    if form is not None:  # any of them ends such an output, in a chat or not
        eos |= turn_ends(tokenizer) | end_of(tokenizer)
    grammar_of = compiled(form, tokenizer, eos) if form is not None else None
    found: list[Request] = []
    sampler = grammar = None
    for i, row in enumerate(rows):
        # One sampler for all rows where prompts do not matter, so that rows can be sampled together.
        if sampler is None or not sampler.prefix_free:
            extra = [for_row(each, i) for each in processors or ()]
            grammar = grammar_of(len(row)) if grammar_of is not None else None
            extra += [grammar] if grammar is not None else []
            if isinstance(params, SamplingParams):
                sampler = Sampler.of(params, len(row), target.vocab_size, extra)
            else:
                sampler = Sampler(greedy, target.processors(config, len(row), LogitsProcessorList(extra)))
        new = config.max_new_tokens
        if new is None:
            new = config.max_length - len(row)
            if new < 1:
                raise ValueError(f"max_length {config.max_length} leaves no room for new tokens in prompt {i}")
        found.append(
            Request(
                tokens=list(row),
                max_new_tokens=new,
                sampler=sampler,
                eos=eos,
                stop=stops if grammar is None else grammar.stop(stops),
                criteria=criteria or None,
                seed=seed,
                stream=i,
                params=params if isinstance(params, SamplingParams) else None,
            )
        )
    return found


def stop_strings(config: GenerationConfig | SamplingParams) -> list[str]:
    """Return the stop strings of parameters."""
    found = config.stop if isinstance(config, SamplingParams) else config.stop_strings
    return [found] if isinstance(found, str) else list(found or ())


def merged(
    params: SamplingParams | GenerationConfig | None, options: dict[str, Any]
) -> SamplingParams | GenerationConfig:
    """Return parameters with single options in their place. Raises ValueError for an unknown one."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, GenerationConfig):
        if options:
            raise ValueError(f"options {sorted(options)} cannot be given beside a GenerationConfig; set them in it")
        return params
    unknown = sorted(set(options) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; there are {', '.join(SamplingParams.__dataclass_fields__)}")
    return replace(params, **options)


def check_supported(config: GenerationConfig, copies: bool = False) -> None:
    """Raise ValueError for what the loop cannot do; with `copies`, several sequences a prompt are fine."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not supported; greedy search and sampling are")
    for name, allowed in (
        ("num_return_sequences", (None, 1)),
        ("guidance_scale", (None, 1)),
        ("watermarking_config", (None,)),
        ("forced_eos_token_id", (None,)),
        ("encoder_repetition_penalty", (None, 1)),
        ("encoder_no_repeat_ngram_size", (None, 0)),
    ):
        if copies and name == "num_return_sequences":
            continue
        if getattr(config, name, None) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)} is not supported")


def check_processors(processors: LogitsProcessorList | None) -> None:
    """Raise ValueError for transformers' processors that must not be called for drafted tokens."""
    for processor in processors or ():
        if not _STATEFUL.isdisjoint(cls.__name__ for cls in type(processor).__mro__):
            raise ValueError(
                f"{type(processor).__name__} is not supported: it keeps state from call to call, and drafted tokens "
                "would change it"
            )


def for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor of a whole batch for any number of continuations of one of its rows."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored[row])
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        prompt = prompt_of_row(processor, row)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    return processor


def _completed(config: GenerationConfig, target: CausalLM) -> GenerationConfig:
    """Return a configuration completed by the checkpoint's. Raises ValueError for what the loop cannot do."""
    found, unused = target.model._prepare_generation_config(config)
    if unused:
        raise ValueError(f"these are not generation settings: {sorted(unused)}")
    check_supported(found)
    if found.max_new_tokens is None and config.max_length is None:
        found.max_new_tokens = SamplingParams().max_new_tokens
    return found
