"""From the sampling fields of a body to requests of the engine."""

from __future__ import annotations

import re
from dataclasses import replace

from forerun.api.decoder import Decoder
from forerun.api.requests import requests
from forerun.engine.sequence import Request
from forerun.model.kv_cache import positions_within
from forerun.sampling.params import MIN_TEMPERATURE, SamplingParams
from forerun.sampling.thoughts import AnswerMarks
from forerun.server.errors import ApiError
from forerun.server.schemas import SamplingBody
from forerun.text.tools import NO_TOOLS, Tools

MAX_CHOICES = 256  # answers of one request
# Fields that have the same name in SamplingParams.
_SAME_NAME = (
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
)


def requests_for(
    body: SamplingBody,
    rows: list[list[int]],
    decoder: Decoder,
    default_tokens: int,
    logprobs: int | None,
    marks: AnswerMarks,
    tools: Tools = NO_TOOLS,
) -> list[Request]:
    """Return the requests of prompts. Raises ApiError.

    Args:
        body: the body, whose sampling parameters are read.
        rows: the token ids of each prompt.
        decoder: the decoder that is to answer.
        default_tokens: the number of new tokens if the body does not say it.
        logprobs: the number of most probable tokens to return with each token; None for none.
        marks: what ends an answer beside the decoder's own tokens, and its thoughts.
        tools: how the tools of the body are used.
    """
    copies = copies_of(body)
    if len(rows) * copies > MAX_CHOICES:
        raise ApiError(
            400,
            f"{len(rows)} prompts with {copies} answers each are more than the {MAX_CHOICES} "
            "answers that can be asked for",
            "n" if body.best_of is None else "best_of",
        )
    given = {name: vars(body)[name] for name in _SAME_NAME if vars(body)[name] is not None}
    if tools.grammar is not None:
        given["response_format"] = tools.grammar
    given |= _penalty(body) | _temperature(body)
    limit = limit_of(body)
    is_unlimited = limit is not None and limit < 0
    capacity = _capacity(decoder, limit_field(body)) if is_unlimited else 0
    if limit is None or is_unlimited:
        limit = max(default_tokens, capacity)
    try:
        params = SamplingParams(
            max_new_tokens=max(1, limit),
            min_new_tokens=body.min_tokens or 0,
            top_k=max(0, body.top_k or 0),
            stop=body.stop,
            logit_bias=body.logit_bias,
            seed=None if body.seed == -1 else body.seed,
            **given,
        )
        prompts = [row for row in rows for _ in range(copies)]
        made = requests(prompts, params, decoder.target, decoder.tokenizer, marks=marks)
    except ValueError as error:
        raise _sampling_error(str(error), body, tools) from None
    is_plain = body.forerun_method == "ar"
    cache_salt = body.cache_salt or ""
    if is_unlimited:
        made = [
            replace(request, max_new_tokens=max(1, capacity - len(request.tokens)))
            for request in made
        ]
    if copies > (body.n or 1):
        logprobs = logprobs or 0  # the best answers are those with the highest ones
    return [
        replace(request, plain=is_plain, logprobs=logprobs, cache_salt=cache_salt)
        for request in made
    ]


def copies_of(body: SamplingBody) -> int:
    """Return how often each prompt is answered. Raises ApiError."""
    count = body.n or 1
    if body.best_of is None:
        return count
    if body.best_of < count:
        raise ApiError(400, f"best_of must be at least n, which is {count}", "best_of")
    if body.best_of > count and body.stream:
        raise ApiError(400, "the best answers cannot be streamed: best_of must be n", "best_of")
    return body.best_of


def limit_field(body: SamplingBody) -> str:
    """Return which of its two names a body uses for the most new tokens."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def limit_of(body: SamplingBody) -> int | None:
    """Return the most new tokens of an answer; below 0 for no limit, None if nothing is said."""
    limit: int | None = vars(body)[limit_field(body)]
    return limit


def _capacity(decoder: Decoder, field: str) -> int:
    """Return the tokens that a text alone may have: those of the context, if memory holds them.

    Raises ApiError, which names the field of the limit, for a model without a context.
    """
    context = decoder.target.context
    if context is None:
        raise ApiError(400, f"this model has no context, so {field} is needed", field)
    kv_memory = decoder.options.kv_memory
    if kv_memory is None:
        return context
    positions = positions_within(kv_memory, decoder.target.position_bytes)
    return min(context, positions - decoder.engine.drafter.extra_nodes)


def _penalty(body: SamplingBody) -> dict[str, float]:
    """Return the repetition penalty under its one name. Raises ApiError.

    llama.cpp names it `repeat_penalty`, and may let it look at the last tokens only.
    """
    penalty = body.repetition_penalty
    if penalty is None:
        penalty = body.repeat_penalty
    if penalty is None:
        return {}
    if body.repeat_penalty not in (None, penalty):
        raise ApiError(400, "repeat_penalty is another repetition_penalty", "repeat_penalty")
    if penalty != 1 and body.repeat_last_n not in (None, -1):
        raise ApiError(
            400, "repeat_last_n is not supported: penalties look at all tokens", "repeat_last_n"
        )
    return {"repetition_penalty": penalty}


def _temperature(body: SamplingBody) -> dict[str, float]:
    """Return temperature and top-p.

    One so small that a single token would be left asks for the most probable token, as greedy
    decoding does.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    if body.top_p == 0 or temperature < MIN_TEMPERATURE:
        return {"temperature": 0.0, "top_p": 1.0}
    return {"temperature": temperature}


def _sampling_error(message: str, body: SamplingBody, tools: Tools) -> ApiError:
    """Return the ApiError for a message of SamplingParams, or of a grammar's compiler.

    The first word of a message is the field, except in messages of a grammar's compiler. A grammar
    that was made from tools is a mistake in their schemas, because the body has no response_format.
    """
    is_of_tools = tools.grammar is not None and body.response_format is None
    if is_of_tools and "response_format" in message:
        message = message.replace("response_format.grammar", "the schemas")
        return ApiError(400, message.replace("response_format", "a schema"), "tools")
    message = message.replace("min_new_tokens", "min_tokens")
    message = message.replace("max_new_tokens", limit_field(body))
    first_word = re.match(r"\w+", message)
    param = None
    if first_word and first_word[0] in SamplingBody.model_fields:
        param = first_word[0]
    elif body.response_format is not None:
        param = "response_format"
    return ApiError(400, message, param)
