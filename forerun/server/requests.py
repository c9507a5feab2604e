"""From bodies to requests of the engine.

All of this runs in the threads of the readers, because texts may be long.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.requests import encode, encode_text
from forerun.engine.sequence import Request
from forerun.sampling.thoughts import NO_MARKS, AnswerMarks, Thoughts
from forerun.server.errors import ApiError, blame
from forerun.server.parameters import (
    MAX_CHOICES,
    copies_of,
    limit_field,
    limit_of,
    requests_for,
)
from forerun.server.schemas import (
    MESSAGE_KEYS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from forerun.text.chat import PromptEnd, chat_prompt, checked_text, has_template, turn_ends
from forerun.text.infill import infill_form
from forerun.text.per_tokenizer import per_tokenizer
from forerun.text.thinking import thinking_marks, thinking_switch, thoughts_after
from forerun.text.tools import (
    NO_TOOLS,
    Tools,
    answer_form,
    checked_choice,
    checked_tools,
    tools_for,
)

CHAT_TOKENS = 1024  # new tokens of a chat by default
COMPLETION_TOKENS = 16  # new tokens of a plain prompt by default, as in OpenAI's API
# Characters of a text per token of the model's context. A longer text is refused, because to
# tokenize it would hold up other requests.
CHARACTERS_PER_TOKEN = 32

# Names that `chat_template_kwargs` must not contain: other fields of a body, names that the server
# gives to the template, and tools.
_RESERVED = {"functions", "tool_choice"} | set(inspect.signature(chat_prompt).parameters)
_RESERVED |= set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_PROMPT_FORMS = "must be a text, a list of texts, a list of token ids, or a list of such lists"

_turn_ends = per_tokenizer(turn_ends)
_infill_form = per_tokenizer(infill_form)
_thinking_marks = per_tokenizer(lambda tokenizer: thinking_marks(tokenizer, _template(tokenizer)))


@dataclass(frozen=True)
class Prepared:
    """What the engine and the answer need of a body.

    Attributes:
        requests: for each prompt, `copies` requests.
        copies: how often each prompt is answered; as many as `best_of` says.
        echo: the texts of the prompts if the answers begin with them, otherwise None.
        is_scoring: whether the answers are to have no token, because `max_tokens` is 0. The engine
            needs a token to score a prompt; it is left out.
        tools: how the tools of the body are used.
        thoughts: the thoughts before the answers; None if there are none to expect.
        limit_field: the body's name of the most new tokens, for errors.
    """

    requests: list[Request]
    copies: int = 1
    echo: list[str] | None = None
    is_scoring: bool = False
    tools: Tools = NO_TOOLS
    thoughts: Thoughts | None = None
    limit_field: str = "max_tokens"


def prepare_chat(body: ChatBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the requests of a chat.

    `parser` names the form of tool calls, as in `Settings.tool_parser`. Raises ApiError.
    """
    tools = read_tools(body, decoder, parser)
    row = chat_tokens(body, decoder, tools)
    with blame("messages"):
        encode(row, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    field = limit_field(body)
    if limit_of(body) == 0:
        raise ApiError(400, f"{field}: a chat needs at least 1 token", field)
    thoughts = _thoughts(body, decoder, row)
    assert decoder.tokenizer is not None
    marks = AnswerMarks(_turn_ends(decoder.tokenizer), thoughts)
    made = requests_for(body, [row], decoder, CHAT_TOKENS, top, marks, tools)
    copies = copies_of(body)
    return Prepared(made, copies, tools=tools, thoughts=thoughts, limit_field=field)


def chat_tokens(body: ChatBody, decoder: Decoder, tools: Tools) -> list[int]:
    """Return the tokens of a chat's prompt, however many. Raises ApiError."""
    template = _template_arguments(body, decoder)
    with blame("messages"):
        end = _prompt_end(body.add_generation_prompt, body.continue_final_message)
        return _render(body.messages, decoder, tools=tools.given, end=end, **template)


def _template_arguments(body: ChatBody, decoder: Decoder) -> dict[str, Any]:
    """Return further names for the chat template. Raises ApiError.

    `reasoning_effort` and `thinking` go to templates that know such a thing under one of their
    names. Where a template does not, they are refused, unless they ask for no thoughts or only
    allow them.
    """
    names = dict(body.chat_template_kwargs or {})
    with blame("chat_template_kwargs"):
        for name in names:
            if not name.isidentifier() or name in _RESERVED:
                raise ValueError(f"chat_template_kwargs must not contain the name {name[:40]!r}")
        _check_length(len(json.dumps(names)), decoder)
    template = _template(decoder.tokenizer)
    effort = body.reasoning_effort
    if effort is not None and re.search(r"\breasoning_effort\b", template):
        names.setdefault("reasoning_effort", effort)
    elif effort is not None:
        names |= _switched("reasoning_effort", effort != "none", template)
    if body.thinking is not None:
        kind = body.thinking.type
        names |= _switched("thinking", kind != "disabled", template, kind == "enabled")
    return names


def _switched(field: str, is_on: bool, template: str, is_needed: bool = True) -> dict[str, bool]:
    """Return the name by which a template switches thoughts.

    Raises ApiError if it has none, and thoughts are needed.
    """
    switch = thinking_switch(template)
    if switch is not None:
        return {switch: is_on}
    if is_on and is_needed:
        raise ApiError(
            400, f"{field} is not supported: this model's chat template has no such switch", field
        )
    return {}


def _template(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the chat template as text; "" without one."""
    if tokenizer is None or not has_template(tokenizer):
        return ""
    template = tokenizer.chat_template
    return "".join(template.values()) if isinstance(template, dict) else str(template)


def _thoughts(body: ChatBody, decoder: Decoder, row: list[int]) -> Thoughts:
    """Return the thoughts that an answer may begin with. Raises ApiError."""
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    last: Any = body.messages[-1]  # the messages have been checked when they were rendered
    content = last.get("content") if last.get("role") == "assistant" else None
    prefill = content if isinstance(content, str) else None
    marks = _thinking_marks(tokenizer)
    thoughts = thoughts_after(marks, tokenizer, row, prefill)
    field = "thinking_budget_tokens"
    budget = body.thinking_budget_tokens
    is_needed = True
    if budget is None and body.thinking is not None:
        field = "thinking"
        budget = body.thinking.budget_tokens
        is_needed = body.thinking.type != "adaptive"
    has_mark = thoughts.close_token is not None
    if budget is None or budget < 0 or not (has_mark or is_needed):
        return thoughts
    if not has_mark:
        raise ApiError(
            400, f"{field} is not supported: {thoughts.close} is no token of this model", field
        )
    return replace(thoughts, budget=budget)


def read_tools(body: ChatBody, decoder: Decoder, parser: str | None) -> Tools:
    """Return how the tools of a body are used. Raises ApiError."""
    with blame("tools"):
        given = checked_tools([] if body.tools is None else body.tools)
        _check_length(len(json.dumps([tool.given for tool in given])), decoder)
    with blame("tool_choice"):
        choice = checked_choice(body.tool_choice, given)
    with blame("response_format"):
        answer = answer_form(body.response_format, choice, given)
    with blame("tools"):
        tools = tools_for(
            given,
            choice,
            decoder.tokenizer,
            parallel=body.parallel_tool_calls is not False,
            parser=parser,
            answer=answer,
        )
    for name in ("ignore_eos", "min_tokens"):
        if tools.grammar is not None and vars(body)[name]:
            raise ApiError(400, f"{name} cannot be given if tool calls must follow a schema", name)
    return tools


def _prompt_end(
    add_generation_prompt: bool | None, continue_final_message: bool | None
) -> PromptEnd | None:
    """Return what a prompt ends with; None if its last message decides. Raises ValueError."""
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other")
    if continue_final_message:
        return PromptEnd.CONTINUE
    if add_generation_prompt is False:
        return PromptEnd.CLOSED
    if add_generation_prompt or continue_final_message is False:
        return PromptEnd.ANSWER
    return None


def prepare_completion(body: CompletionBody, decoder: Decoder) -> Prepared:
    """Return the requests of plain prompts. Raises ApiError."""
    prompts = as_prompts(body.prompt)
    marks = NO_MARKS
    if body.suffix:
        prompts, ends = _fill_in_the_middle(prompts, body, decoder)
        marks = AnswerMarks(ends)
    with blame("prompt"):
        rows = encode_prompts(prompts, decoder)
    is_scoring = limit_of(body) == 0
    field = limit_field(body)
    if is_scoring and not body.echo:
        raise ApiError(400, f"{field}: 0 needs echo, else there is no answer", field)
    made = requests_for(body, rows, decoder, COMPLETION_TOKENS, body.logprobs, marks)
    copies = copies_of(body)
    if not body.echo:
        return Prepared(made, copies, limit_field=field)
    if body.logprobs is not None:
        made = [replace(request, prompt_logprobs=True) for request in made]
    echo = [
        prompt if isinstance(prompt, str) else text_of(decoder, row)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    return Prepared(made, copies, echo, is_scoring, limit_field=field)


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
    return form.prompts(tokenizer, prompts, suffix), form.ends


def as_prompts(given: Any) -> list[Any]:
    """Return the prompts of a field that has one prompt or a list of them, unchecked."""
    is_list_of_prompts = isinstance(given, list) and given and not _is_token(given[0])
    return given if is_list_of_prompts else [given]


def encode_prompts(
    prompts: list[Any], decoder: Decoder, most: int = MAX_CHOICES, field: str = "prompt"
) -> list[list[int]]:
    """Return token ids of texts and of lists of tokens.

    Raises ValueError for anything else, and for more than `most` of them. `field` is where they
    stand in the body.
    """
    _check_count(prompts, most, field)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text(prompt, decoder, field)
        elif not isinstance(prompt, list) or not all(map(_is_token, prompt)):
            raise ValueError(f"{field} {_PROMPT_FORMS}")
    return encode(prompts, decoder.tokenizer, decoder.target.context, decoder.target.vocab_size)[1]


def tokenize(body: TokenizeBody, decoder: Decoder) -> list[int]:
    """Return the tokens of a text or of a chat. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if body.prompt is None:
        with blame("messages"):
            end = _prompt_end(body.add_generation_prompt, body.continue_final_message)
            return _render(body.messages, decoder, end=end)
    with blame("prompt"):
        _check_text(body.prompt, decoder)
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    if body.add_special_tokens is False:
        return list(tokenizer(body.prompt, add_special_tokens=False)["input_ids"])
    return encode_text(body.prompt, tokenizer)


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
    """Return a message with the keys that templates know.

    Nulls, the names of speakers and unknown keys are left out, and the role `developer` becomes
    `system`. Thoughts have one name. An assistant's message may lack a content, and so may the
    result of a tool. An answer that is a refusal has that as its content.
    """
    kept = {
        key: value for key, value in message.items() if value is not None and key in MESSAGE_KEYS
    }
    role = kept.get("role")
    if role == "developer":
        kept["role"] = "system"
    if role != "tool":
        kept.pop("name", None)
    kept.pop("annotations", None)
    refusal = kept.pop("refusal", None)
    thoughts = kept.pop("reasoning", None)
    if thoughts is not None:
        kept.setdefault("reasoning_content", thoughts)
    if role in ("assistant", "tool"):
        kept.setdefault("content", refusal or "")
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    return kept


def _check_count(prompts: list[Any], most: int = MAX_CHOICES, field: str = "prompt") -> None:
    if len(prompts) > most:
        raise ValueError(f"{field}: a request may have at most {most}, not {len(prompts)}")


def _check_length(characters: int, decoder: Decoder) -> None:
    context = decoder.target.context
    if context is not None and characters > CHARACTERS_PER_TOKEN * context:
        raise ValueError(
            f"{characters} characters are more than the context of {context} tokens can hold"
        )


def _check_text(text: str, decoder: Decoder, name: str = "prompt") -> None:
    _check_length(len(text), decoder)
    checked_text(name, text)
