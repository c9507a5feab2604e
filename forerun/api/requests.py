"""Requests from prompts and SamplingParams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from forerun.engine.sequence import Request
from forerun.model.causal_lm import CausalLM
from forerun.sampling.grammar import Grammar, compiled, end_of
from forerun.sampling.params import SamplingParams
from forerun.sampling.response_format import form_of
from forerun.sampling.sampler import Sampler, ThinkingBudget
from forerun.sampling.thoughts import NO_MARKS, AnswerMarks
from forerun.text.chat import turn_ends
from forerun.text.stop_strings import LateStopStrings, StopStrings

Prompt = str | Sequence[int]

# These keep state from call to call, or run a model, so calls for drafted tokens would change what
# they do.
_STATEFUL = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}


def encode(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    context: int | None,
    vocab_size: int,
) -> tuple[bool, list[list[int]]]:
    """Return whether `prompts` is one prompt, and the token ids of each prompt.

    Raises ValueError for what cannot be decoded.
    """
    if hasattr(prompts, "tolist"):  # tensors and arrays, without padding
        prompts = prompts.tolist()
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    many: Sequence[Any] = [prompts] if is_single else prompts
    if not many:
        raise ValueError("no prompts were given")
    rows = []
    for number, prompt in enumerate(many):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("text prompts need a tokenizer; give token ids or tokenizer=...")
            prompt = encode_text(prompt, tokenizer)
        row = [int(token) for token in prompt]
        if not row:
            raise ValueError(f"prompt {number} is empty; it needs at least one token")
        if min(row) < 0 or max(row) >= vocab_size:
            raise ValueError(f"prompt {number} has token ids outside 0..{vocab_size - 1}")
        if context is not None and len(row) >= context:
            raise ValueError(
                f"prompt {number} has {len(row)} tokens; the target's context of {context} leaves "
                f"room for at most {context - 1}"
            )
        rows.append(row)
    return is_single, rows


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text, with one begin token where the text has written its own."""
    tokens: list[int] = tokenizer(text)["input_ids"]
    begin = tokenizer.bos_token_id
    is_doubled = begin is not None and tokens[:2] == [begin, begin]
    if is_doubled and tokenizer("")["input_ids"][:1] == [begin]:
        return tokens[1:]
    return tokens


def requests(
    rows: Sequence[Sequence[int]],
    params: SamplingParams,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processors: LogitsProcessorList | None = None,
    criteria: StoppingCriteriaList | None = None,
    marks: AnswerMarks = NO_MARKS,
) -> list[Request]:
    """Return a request for each prompt of token ids. Row i samples from stream i of the seed.

    Of the checkpoint's generation config only the end tokens are used. An output also ends at
    the ends of `marks`, unless the parameters say `ignore_eos`. A response format holds for what
    follows its thoughts.

    Raises ValueError for stop strings without a tokenizer, for a token to stop at that is not in
    the vocabulary, and for a response format or a processor that cannot be used.
    """
    check_processors(processors)
    form = form_of(params.response_format)
    eos = frozenset[int]()
    if not params.ignore_eos:
        known = target.model.generation_config.eos_token_id
        eos = marks.ends.union([known] if isinstance(known, int) else known or [])
    if max(params.stop_token_ids, default=0) >= target.vocab_size:
        raise ValueError(f"stop_token_ids has token ids outside 0..{target.vocab_size - 1}")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer; give tokenizer=...")
    stops = StopStrings(tokenizer, params.stop) if params.stop and tokenizer is not None else None
    if form is not None:  # any end token ends such an output, in a chat or not
        eos |= turn_ends(tokenizer) | end_of(tokenizer)
    thoughts = marks.thoughts
    grammar_of = compiled(form, tokenizer, eos, thoughts) if form is not None else None
    eos |= frozenset(params.stop_token_ids)
    made: list[Request] = []
    sampler = None
    grammar = None
    for number, row in enumerate(rows):
        # If the prompts do not matter, all rows share a sampler, so that they are sampled together.
        if sampler is None or not sampler.prefix_free:
            extra = [for_row(processor, number) for processor in processors or ()]
            if params.min_new_tokens and eos:
                extra.append(_no_end(eos, len(row), params.min_new_tokens, target))
            if thoughts is not None and thoughts.budget is not None:
                extra.append(ThinkingBudget(thoughts, len(row)))
            grammar = grammar_of(len(row)) if grammar_of is not None else None
            if grammar is not None:
                extra.append(grammar)
            sampler = Sampler.of(params, len(row), target.vocab_size, extra)
        request = Request(
            tokens=list(row),
            max_new_tokens=params.max_new_tokens,
            sampler=sampler,
            eos=eos,
            stop=_stop(stops, len(row) + params.min_new_tokens, grammar),
            criteria=StoppingCriteriaList(criteria) if criteria else None,
            seed=params.seed,
            stream=number,
        )
        made.append(request)
    return made


def _stop(
    strings: StopStrings | None, first_length: int, grammar: Grammar | None
) -> Callable[[Sequence[int]], bool] | None:
    """Return what ends an output: a stop string beyond its first tokens, or its form."""
    late = None if strings is None else LateStopStrings(strings, first_length)
    return late if grammar is None else grammar.stop(late)


def _no_end(
    ends: frozenset[int], prompt_length: int, min_new_tokens: int, target: CausalLM
) -> LogitsProcessor:
    """Return a processor that forbids end tokens before an output has so many tokens."""
    tokens = torch.tensor(sorted(ends), device=target.device)
    return MinNewTokensLengthLogitsProcessor(prompt_length, min_new_tokens, tokens)


def merged(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Return parameters with fields that are given singly. Raises ValueError for unknown ones."""
    names = SamplingParams.__dataclass_fields__
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    for name in sorted(options.keys() - names):
        raise ValueError(f"unknown option {name!r}; there are {', '.join(names)}")
    return replace(params or SamplingParams(), **options)


def check_processors(processors: LogitsProcessorList | None) -> None:
    """Raise ValueError for transformers' processors that must not be called for drafted tokens."""
    for processor in processors or ():
        if not _STATEFUL.isdisjoint(cls.__name__ for cls in type(processor).__mro__):
            raise ValueError(
                f"{type(processor).__name__} is not supported: it keeps state from call to call, "
                "and drafted tokens would change it"
            )


def for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor of a whole batch for any number of continuations of one of its rows.

    Two kinds of processors treat rows differently. The others are returned as they are.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored[row])
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        # Since transformers 5.24 the number of beams counts returned sequences too.
        prompt = row // int(processor._num_beams)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    return processor
