"""From bodies to requests of the engine.

All of this runs in the threads of the readers, because texts may be long.
"""

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

CHAT_TOKENS = 1024  # new tokens of a chat by default
COMPLETION_TOKENS = 16  # new tokens of a plain prompt by default, as in OpenAI's API
MAX_CHOICES = 256  # answers of one request
# Characters of a text per token of the model's context. A longer text is refused, because to
# tokenize it would hold up other requests.
CHARACTERS_PER_TOKEN = 32

# Names that `chat_template_kwargs` must not contain: other fields of a body, names that the server
# gives to the template, and tools.
_RESERVED = {"messages", "system", "tokenizer", "template_args", "functions", "tool_choice"}
_RESERVED |= set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
# Fields that have the same name in SamplingParams.
_SAME_NAME = (
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "response_format",
)
_PROMPT_FORMS = (
    "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
)

_turn_ends = lru_cache(1)(turn_ends)
_infill_form = lru_cache(1)(infill_form)


@dataclass(frozen=True)
class Prepared:
    """What the engine and the answer need of a body.

    Attributes:
        requests: for each prompt, one request for each of its `n` answers.
        echo: the texts of the prompts if the answers begin with them, otherwise None.
        tools: how the tools of the body are used.
    """

    requests: list[Request]
    echo: list[str] | None = None
    tools: Tools = NO_TOOLS


def prepare_chat(body: ChatBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the requests of a chat.

    `parser` names the form of tool calls, as in `Settings.tool_parser`. Raises ApiError.
    """
    template = body.chat_template_kwargs or {}
    with blame("chat_template_kwargs"):
        for name in template:
            if not name.isidentifier() or name in _RESERVED:
                raise ValueError(f"chat_template_kwargs must not contain the name {name[:40]!r}")
        _check_length(len(json.dumps(template)), decoder)
    tools = read_tools(body, decoder, parser)
    with blame("messages"):
        row = _render(body.messages, decoder, tools=tools.given, **template)
        encode(row, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
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
            400, "ignore_eos cannot be given if tool calls must follow a schema", "ignore_eos"
        )
    return tools


def prepare_completion(body: CompletionBody, decoder: Decoder) -> Prepared:
    """Return the requests of plain prompts. Raises ApiError."""
    prompt: Any = body.prompt
    is_list_of_prompts = isinstance(prompt, list) and prompt and not _is_token(prompt[0])
    prompts = prompt if is_list_of_prompts else [prompt]
    ends = frozenset[int]()
    if body.suffix:
        prompts, ends = _fill_in_the_middle(prompts, body, decoder)
    with blame("prompt"):
        rows = encode_prompts(prompts, decoder)
    made = _requests(body, rows, decoder, COMPLETION_TOKENS, body.logprobs, ends)
    if not body.echo:
        return Prepared(made)
    if body.logprobs is not None:
        made = [replace(request, prompt_logprobs=True) for request in made]
    echo = [
        prompt if isinstance(prompt, str) else text_of(decoder, row)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    return Prepared(made, echo)


def _fill_in_the_middle(
    prompts: list[Any], body: CompletionBody, decoder: Decoder
) -> tuple[list[list[int]], frozenset[int]]:
    """Return prompts that ask for the text between a body's prompts and its suffix.

    Returns also the tokens that end such a text. Raises ApiError.
    """
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    form = _infill_form(tokenizer)
    suffix = body.suffix or ""
    with blame("suffix"):
        if form is None:
            raise ValueError(
                "suffix is not supported: this model's tokenizer has no tokens for filling in the "
                "middle"
            )
        if body.echo:
            raise ValueError("suffix and echo cannot be given together")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("suffix requires prompts of text, not of token ids")
        _check_text(suffix, decoder, "suffix")
    with blame("prompt"):
        _check_count(prompts)
        for prompt in prompts:
            _check_text(prompt, decoder)
    ends = frozenset[int]() if body.ignore_eos else form.ends
    return form.prompts(tokenizer, prompts, suffix), ends


def encode_prompts(prompts: list[Any], decoder: Decoder) -> list[list[int]]:
    """Return token ids of texts and of lists of tokens. Raises ValueError for anything else."""
    _check_count(prompts)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text(prompt, decoder)
        elif not isinstance(prompt, list) or not all(map(_is_token, prompt)):
            raise ValueError(_PROMPT_FORMS)
    return encode(prompts, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)[1]


def tokenize(body: TokenizeBody, decoder: Decoder) -> list[int]:
    """Return the tokens of a text or of a chat. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if body.prompt is None:
        with blame("messages"):
            return _render(body.messages, decoder)
    with blame("prompt"):
        _check_text(body.prompt, decoder)
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    has_special = body.add_special_tokens is not False
    return list(tokenizer(body.prompt, add_special_tokens=has_special)["input_ids"])


def detokenize(body: DetokenizeBody, decoder: Decoder) -> str:
    """Return the text of tokens. Raises ApiError."""
    tokens = body.tokens
    size = decoder.target.vocab_size
    if not isinstance(tokens, list) or not all(_is_token(token, size) for token in tokens):
        raise ApiError(400, f"tokens must be a list of token ids from 0 to {size - 1}", "tokens")
    return text_of(decoder, tokens)


def text_of(decoder: Decoder, tokens: Sequence[int]) -> str:
    """Return the text of tokens, with the texts of special tokens."""
    assert decoder.tokenizer is not None
    return str(decoder.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _is_token(value: Any, size: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _render(messages: Any, decoder: Decoder, **template: Any) -> list[int]:
    """Return the tokens of messages, which a client may have sent in any form.

    Raises ValueError for messages that are no chat, or that the chat template refuses.
    """
    _check_length(len(json.dumps(messages, ensure_ascii=False)), decoder)
    if isinstance(messages, list):
        messages = [
            _normalised(message) if isinstance(message, dict) else message for message in messages
        ]
    return chat_prompt(decoder.tokenizer, messages, **template)


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what clients send and templates lack.

    Nulls and the names of speakers are left out, and the role `developer` becomes `system`.
    """
    kept = {key: value for key, value in message.items() if value is not None and key != "name"}
    if kept.get("role") == "developer":
        kept["role"] = "system"
    return kept


def _check_count(prompts: list[Any]) -> None:
    if len(prompts) > MAX_CHOICES:
        raise ValueError(f"a request may have at most {MAX_CHOICES} prompts")


def _check_length(characters: int, decoder: Decoder) -> None:
    context = decoder.target.context
    if context is not None and characters > CHARACTERS_PER_TOKEN * context:
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
    default_tokens: int,
    logprobs: int | None,
    ends: frozenset[int],
    tools: Tools = NO_TOOLS,
) -> list[Request]:
    """Return the requests of prompts. Raises ApiError.

    Args:
        body: the body, whose sampling parameters are read.
        rows: the token ids of each prompt.
        decoder: the decoder that is to answer.
        default_tokens: the number of new tokens if the body does not say it.
        logprobs: the number of most probable tokens to return with each token; None for none.
        ends: tokens that end an answer, beside the decoder's own.
        tools: how the tools of the body are used.
    """
    copies = body.n or 1
    if len(rows) * copies > MAX_CHOICES:
        raise ApiError(
            400,
            f"n times the number of prompts is {len(rows) * copies}; at most {MAX_CHOICES} "
            "answers can be asked for",
            "n",
        )
    given = {name: vars(body)[name] for name in _SAME_NAME if vars(body)[name] is not None}
    if tools.grammar is not None:
        given["response_format"] = tools.grammar
    try:
        params = SamplingParams(
            max_new_tokens=body.max_completion_tokens or body.max_tokens or default_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            stop=body.stop,
            logit_bias=body.logit_bias,
            **given,
        )
        prompts = [row for row in rows for _ in range(copies)]
        made = requests(prompts, params, decoder.target, decoder.tokenizer)
    except ValueError as error:
        raise _sampling_error(str(error), body, tools) from None
    is_plain = body.forerun_method == "ar"
    cache_salt = body.cache_salt or ""
    return [
        replace(request, eos=request.eos | ends, plain=is_plain, logprobs=logprobs, salt=cache_salt)
        for request in made
    ]


def _sampling_error(message: str, body: SamplingBody, tools: Tools) -> ApiError:
    """Return the ApiError for a message of SamplingParams, or of a grammar's compiler.

    The first word of a message is the field, except in messages of a grammar's compiler. A grammar
    that was made from tools is a mistake in their schemas, because the body has no response_format.
    """
    if tools.grammar is not None and "response_format" in message:
        message = message.replace("response_format.grammar", "the schemas")
        return ApiError(400, message.replace("response_format", "a schema"), "tools")
    first_word = re.match(r"\w+", message)
    param = None
    if first_word and first_word[0] in SamplingBody.model_fields:
        param = first_word[0]
    elif body.response_format is not None:
        param = "response_format"
    return ApiError(400, message, param)
