"""From bodies to requests of the engine. Runs in the readers' threads, as texts may be long."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.requests import encode, requests
from forerun.engine.sequence import Request
from forerun.sampling.params import SamplingParams
from forerun.sampling.response_format import form_of
from forerun.server.errors import ApiError, blame
from forerun.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from forerun.text.chat import chat_prompt, checked_text, turn_ends
from forerun.text.infill import infill_form
from forerun.text.tools import NO_TOOLS, Tools, checked_choice, checked_tools, tools_for

CHAT_TOKENS = 1024  # new tokens by default; OpenAI's for plain prompts is 16
COMPLETION_TOKENS = 16
MOST_CHOICES = 256  # answers of one request
CHARACTERS = 32  # most of a text for each token of the context; to tokenize more would hold up other requests

# Names that `chat_template_kwargs` cannot have: other fields of a body, names that the server gives, and tools.
_RESERVED = {"messages", "system", "tokenizer", "template_args", "functions", "tool_choice"}
_RESERVED |= set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAME_NAME = (
    "top_p",
    "min_p",
    "seed",
    *_PENALTIES,
    "ignore_eos",
    "response_format",
)  # as in SamplingParams
_PROMPT = "prompt must be text, a list of texts, token ids, or a list of them"

_turn_ends = lru_cache(1)(turn_ends)
_infill_form = lru_cache(1)(infill_form)


@dataclass(frozen=True)
class Prepared:
    """A body's requests: for each prompt, one for each of its `n` answers; the texts of its prompts, if answers begin
    with them; and how its tools are used."""

    requests: list[Request]
    echo: list[str] | None = None
    tools: Tools = NO_TOOLS


def prepare_chat(body: ChatBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the requests of a chat. Raises ApiError."""
    template = body.chat_template_kwargs or {}
    with blame("chat_template_kwargs"):
        for name in template:
            if not name.isidentifier() or name in _RESERVED:
                raise ValueError(f"chat_template_kwargs cannot have the name {name[:40]!r}")
        _check_length(len(json.dumps(template)), decoder)
    tools = read_tools(body, decoder, parser)
    with blame("messages"):
        row = _render(body.messages, decoder, tools=tools.given, **template)
        encode(row, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    ends = frozenset[int]() if body.ignore_eos else _turn_ends(decoder.tokenizer)
    return Prepared(_requests(body, [row], decoder, CHAT_TOKENS, top, ends, tools), tools=tools)


def read_tools(body: ChatBody, decoder: Decoder, parser: str | None) -> Tools:
    """Return how the tools of a body are used. Raises ApiError."""
    with blame("tools"):
        given = checked_tools(body.tools or [])
        _check_length(len(json.dumps([tool.given for tool in given])), decoder)
    with blame("tool_choice"):
        choice = checked_choice(body.tool_choice, given)
    with blame("tools"):
        tools = tools_for(
            given, choice, body.parallel_tool_calls is not False, decoder.tokenizer, parser
        )
    with blame("response_format"):
        if tools.form is not None and form_of(body.response_format) is not None:
            raise ValueError(
                "response_format cannot be given beside tools, unless tool_choice is none"
            )
    if tools.grammar is not None and body.ignore_eos:
        raise ApiError(
            400, "ignore_eos cannot be given where calls must follow a schema", "ignore_eos"
        )
    return tools


def prepare_completion(body: CompletionBody, decoder: Decoder) -> Prepared:
    """Return the requests of plain prompts. Raises ApiError."""
    prompt: Any = body.prompt
    prompts = (
        prompt if isinstance(prompt, list) and prompt and not _is_token(prompt[0]) else [prompt]
    )
    ends = frozenset[int]()
    if body.suffix:
        prompts, ends = _fill(prompts, body, decoder)
    with blame("prompt"):
        rows = encode_prompts(prompts, decoder)
    found = _requests(body, rows, decoder, COMPLETION_TOKENS, body.logprobs, ends)
    if not body.echo:
        return Prepared(found)
    given = zip(prompts, rows, strict=True)
    echo = [each if isinstance(each, str) else text_of(decoder, row) for each, row in given]
    if body.logprobs is not None:
        found = [replace(each, prompt_logprobs=True) for each in found]
    return Prepared(found, echo)


def _fill(
    prompts: list[Any], body: CompletionBody, decoder: Decoder
) -> tuple[list[list[int]], frozenset[int]]:
    """Return prompts for what stands between a body's texts and its suffix, and the tokens that end it. Raises
    ApiError."""
    form, suffix, tokenizer = _infill_form(decoder.tokenizer), body.suffix or "", decoder.tokenizer
    assert tokenizer is not None
    with blame("suffix"):
        if form is None:
            raise ValueError(
                "suffix is not supported: this model's tokenizer has no tokens to fill in the middle"
            )
        if body.echo:
            raise ValueError("suffix and echo cannot be given together")
        if not all(isinstance(each, str) for each in prompts):
            raise ValueError("suffix needs a prompt of text, not of tokens")
        _check_text(suffix, decoder, "suffix")
    with blame("prompt"):
        if len(prompts) > MOST_CHOICES:
            raise ValueError(f"at most {MOST_CHOICES} prompts")
        for each in prompts:
            _check_text(each, decoder)
    rows = form.prompts(tokenizer, prompts, suffix)
    return rows, frozenset() if body.ignore_eos else form.ends


def encode_prompts(prompts: list[Any], decoder: Decoder) -> list[list[int]]:
    """Return token ids of texts and lists of tokens. Raises ValueError, also for anything else."""
    if len(prompts) > MOST_CHOICES:
        raise ValueError(f"at most {MOST_CHOICES} prompts")
    for each in prompts:
        if isinstance(each, str):
            _check_text(each, decoder)
        elif not isinstance(each, list) or not all(map(_is_token, each)):
            raise ValueError(_PROMPT)
    return encode(prompts, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)[1]


def tokenize(body: TokenizeBody, decoder: Decoder) -> list[int]:
    """Return the tokens of a text or of a chat. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", "prompt")
    if body.prompt is None:
        with blame("messages"):
            return _render(body.messages, decoder)
    with blame("prompt"):
        _check_text(body.prompt, decoder)
    assert decoder.tokenizer is not None
    return list(
        decoder.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens is not False)[
            "input_ids"
        ]
    )


def detokenize(body: DetokenizeBody, decoder: Decoder) -> str:
    """Return the text of tokens. Raises ApiError."""
    tokens, size = body.tokens, decoder.target.vocab_size
    if not isinstance(tokens, list) or not all(_is_token(each, size) for each in tokens):
        raise ApiError(400, f"tokens must be token ids within 0..{size - 1}", "tokens")
    return text_of(decoder, tokens)


def text_of(decoder: Decoder, tokens: Sequence[int]) -> str:
    assert decoder.tokenizer is not None
    return str(decoder.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _is_token(value: Any, size: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _render(messages: Any, decoder: Decoder, **template: Any) -> list[int]:
    """Return the tokens of messages, which may have any form. Raises ValueError."""
    _check_length(len(json.dumps(messages, ensure_ascii=False)), decoder)
    if isinstance(messages, list):
        messages = [_known_keys(each) if isinstance(each, dict) else each for each in messages]
    return chat_prompt(decoder.tokenizer, messages, **template)


def _known_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out nulls and names of speakers, which clients send; the role `developer` is `system`."""
    found = {key: each for key, each in message.items() if each is not None and key != "name"}
    return found | {"role": "system"} if found.get("role") == "developer" else found


def _check_length(characters: int, decoder: Decoder) -> None:
    context = decoder.target.context
    if context is not None and characters > CHARACTERS * context:
        raise ValueError(
            f"{characters} characters are more than the context of {context} tokens can hold"
        )


def _check_text(text: str, decoder: Decoder, name: str = "prompt") -> None:
    _check_length(len(text), decoder)
    checked_text(name, text)


def _requests(
    body: SamplingBody,
    rows: list[list[int]],
    decoder: Decoder,
    most: int,
    logprobs: int | None,
    ends: frozenset[int],
    tools: Tools = NO_TOOLS,
) -> list[Request]:
    """Return the requests of prompts, with `most` new tokens unless the body says how many."""
    copies = body.n or 1
    if len(rows) * copies > MOST_CHOICES:
        raise ApiError(400, f"n times prompts is {len(rows) * copies}; at most {MOST_CHOICES}", "n")
    given = {name: vars(body)[name] for name in _SAME_NAME if vars(body)[name] is not None}
    if tools.grammar is not None:
        given["response_format"] = tools.grammar
    try:
        params = SamplingParams(
            max_new_tokens=body.max_completion_tokens or body.max_tokens or most,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            stop=body.stop,
            logit_bias=body.logit_bias,
            **given,
        )
        made = requests(
            [row for row in rows for _ in range(copies)], params, decoder.target, decoder.tokenizer
        )
    except (
        ValueError
    ) as error:  # the first word is the field, except in messages of a grammar's compiler
        if tools.grammar is not None and "response_format" in str(error):
            text = (
                str(error)
                .replace("response_format.grammar", "the schemas")
                .replace("response_format", "a schema")
            )
            raise ApiError(400, text, "tools") from None
        named = re.match(r"\w+", str(error))
        param = named[0] if named and named[0] in SamplingBody.model_fields else None
        if param is None and body.response_format is not None:
            param = "response_format"
        raise ApiError(400, str(error), param) from None
    is_plain, salt = body.forerun_method == "ar", body.cache_salt or ""
    return [
        replace(each, eos=each.eos | ends, plain=is_plain, logprobs=logprobs, salt=salt)
        for each in made
    ]
