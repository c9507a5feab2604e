"""From bodies to requests of the engine. Runs in threads for that, as texts may be long."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.loading import encode
from forerun.api.requests import requests
from forerun.engine.sequence import Request
from forerun.sampling.params import SamplingParams
from forerun.server.errors import ApiError, blame
from forerun.server.schemas import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from forerun.text.chat import chat_prompt

CHAT_TOKENS = 1024  # new tokens of an answer in a chat, where no number is given; OpenAI's for plain prompts is 16
COMPLETION_TOKENS = 16
MOST_CHOICES = 256  # answers of one request
CHARACTERS = 32  # of a text for each token of the context; to tokenize more than that would hold up other requests

# Names that a chat template cannot be given anew: what is said elsewhere in a body or is ours to say, and tools.
_TAKEN = {"messages", "system", "tokenizer", "template_args", "functions", "tool_choice"}
_TAKEN |= set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
# Fields that SamplingParams have under the same names.
_SAME = [
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "response_format",
]
_PROMPT = "prompt must be text, a list of texts, token ids, or a list of them"


@dataclass(frozen=True)
class Prepared:
    """A body, ready for the engine.

    Attributes:
        prompts: token ids of each.
        requests: one a choice, those of a prompt side by side.
        echo: the text of each prompt, where answers are to begin with it.
    """

    body: SamplingBody
    prompts: list[list[int]]
    requests: list[Request]
    echo: list[str] | None = None


def prepare_chat(body: ChatBody, decoder: Decoder, ends: frozenset[int]) -> Prepared:
    """Turn a chat into requests. `ends`: tokens that end a turn. Raises ApiError."""
    given = body.chat_template_kwargs or {}
    with blame("chat_template_kwargs"):
        for name in given:
            if not name.isidentifier() or name in _TAKEN:
                raise ValueError(f"chat_template_kwargs cannot have the name {name[:40]!r}")
        _check_length(len(json.dumps(given)) if given else 0, decoder)
    with blame("messages"):
        prompt = _render(body.messages, decoder, **given)
        _, rows = encode(prompt, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _prepare(body, rows, decoder, CHAT_TOKENS, top, frozenset() if body.ignore_eos else ends)


def prepare_completion(body: CompletionBody, decoder: Decoder) -> Prepared:
    """Turn plain prompts into requests. Raises ApiError."""
    with blame("prompt"):
        rows = encode_prompts(body.prompt, decoder)
    prepared = _prepare(body, rows, decoder, COMPLETION_TOKENS, body.logprobs, frozenset())
    if not body.echo:
        return prepared
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [
        each if isinstance(each, str) else text_of(decoder, row)
        for each, row in zip(given if len(given) == len(rows) else rows, rows, strict=True)
    ]
    found, copies = list(prepared.requests), body.n or 1
    if body.logprobs is not None:  # of each prompt once
        found[::copies] = [replace(each, prompt_logprobs=True) for each in found[::copies]]
    return replace(prepared, echo=texts, requests=found)


def encode_prompts(prompt: Any, decoder: Decoder) -> list[list[int]]:
    """Return token ids of a string, a list of strings, tokens, or a list of token lists. Raises ValueError."""
    is_tokens = isinstance(prompt, list) and bool(prompt) and _is_token(prompt[0])
    many = [prompt] if isinstance(prompt, str) or is_tokens else prompt
    if not isinstance(many, list) or not many:
        raise ValueError(_PROMPT)
    if len(many) > MOST_CHOICES:
        raise ValueError(f"at most {MOST_CHOICES} prompts")
    for each in many:
        if isinstance(each, str):
            _check_text(each, decoder)
        elif not isinstance(each, list) or not all(map(_is_token, each)):
            raise ValueError(_PROMPT)
    return encode(many, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)[1]


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
    special = body.add_special_tokens is not False
    return [int(each) for each in decoder.tokenizer(body.prompt, add_special_tokens=special)["input_ids"]]


def detokenize(body: DetokenizeBody, decoder: Decoder) -> str:
    """Return the text of tokens. Raises ApiError."""
    tokens, size = body.tokens, decoder.target.vocab_size
    if not isinstance(tokens, list) or not all(_is_token(each) and each < size for each in tokens):
        raise ApiError(400, f"tokens must be token ids within 0..{size - 1}", "tokens")
    return text_of(decoder, tokens)


def text_of(decoder: Decoder, tokens: Sequence[int]) -> str:
    assert decoder.tokenizer is not None
    return str(decoder.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _render(messages: Any, decoder: Decoder, **template: Any) -> list[int]:
    """Return the tokens of messages, which may have any form. Raises ValueError.

    What clients send along is left out: nulls, and names of speakers. The newer name of the system's role is known.
    """
    size, cleaned = 0, messages
    if isinstance(messages, list):
        cleaned = []
        for message in messages:
            if isinstance(message, dict):
                message = {key: each for key, each in message.items() if each is not None and key != "name"}
                if message.get("role") == "developer":
                    message["role"] = "system"
                content = message.get("content")
                parts = content if isinstance(content, list) else [content]
                texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
                size += sum(len(text) for text in texts if isinstance(text, str))
            cleaned.append(message)
    _check_length(size, decoder)
    return chat_prompt(decoder.tokenizer, cleaned, **template)


def _check_length(characters: int, decoder: Decoder) -> None:
    context = decoder.target.context
    if context is not None and characters > CHARACTERS * context:
        raise ValueError(f"{characters} characters are more than the context of {context} tokens can hold")


def _check_text(text: str, decoder: Decoder) -> None:
    _check_length(len(text), decoder)
    if "\0" in text:
        raise ValueError("prompt has a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("prompt has half of a surrogate pair, which is no character") from None


def _prepare(
    body: SamplingBody,
    rows: list[list[int]],
    decoder: Decoder,
    default: int,
    logprobs: int | None,
    ends: frozenset[int],
) -> Prepared:
    copies = body.n or 1
    if len(rows) * copies > MOST_CHOICES:
        raise ApiError(400, f"n times prompts is {len(rows) * copies}; at most {MOST_CHOICES}", "n")
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    try:
        params = SamplingParams(
            max_new_tokens=body.max_completion_tokens or body.max_tokens or default,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            stop=body.stop,
            logit_bias=body.logit_bias,
            **given,
        )
        each = requests([row for row in rows for _ in range(copies)], params, decoder.target, decoder.tokenizer)
    except ValueError as error:  # their first word is the field, but for what a grammar's compiler says
        named = re.match(r"\w+", str(error))
        param = named[0] if named and named[0] in SamplingBody.model_fields else None
        if param is None and body.response_format is not None:
            param = "response_format"
        raise ApiError(400, str(error), param) from None
    more: dict[str, Any] = {"plain": body.forerun_method == "ar", "logprobs": logprobs, "salt": body.cache_salt or ""}
    return Prepared(body, rows, [replace(one, eos=one.eos | ends, **more) for one in each])
