"""Bodies of requests. /openapi.json is made from them.

null means absent. Unknown fields are accepted, and the log names them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SkipValidation,
)

from forerun.server.errors import ApiError

MOST_STOPS, LONGEST_STOP = 16, 1000
LONGEST_SALT = 256
MOST_BIASES = 1024
MOST_COPIES = 128
MOST_LOGPROBS = 20

_NO_VALUE = (
    "audio prediction web_search_options prompt_logprobs truncate_prompt_tokens chat_template structured_outputs "
    "guided_json guided_regex guided_choice guided_grammar grammar json_schema n_predict"
)
_EMPTY = "functions stop_token_ids bad_words allowed_token_ids documents logits_processors"
_ZERO = "min_tokens dry_multiplier xtc_probability mirostat"
_ONE = "best_of length_penalty repeat_penalty typical_p tfs_z"
_FALSE = (
    "use_beam_search include_stop_str_in_output continue_final_message return_tokens_as_token_ids"
)
_TRUE = "skip_special_tokens add_generation_prompt add_special_tokens"
# Known fields that are not supported, each with the values that ask for nothing. Any other value is refused: output
# that is silently not what was asked for would be worse.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NO_VALUE.split(), ()),
    **dict.fromkeys(_EMPTY.split(), ([],)),
    **dict.fromkeys(_ZERO.split(), (0,)),
    **dict.fromkeys(_ONE.split(), (1,)),
    **dict.fromkeys(_FALSE.split(), (False,)),
    **dict.fromkeys(_TRUE.split(), (True,)),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),  # of chats; a plain prompt may have one
}
# Those of /v1/responses: what needs state, hosted tools or reasoning, and what is called otherwise there.
UNSUPPORTED_RESPONSES: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **dict.fromkeys(
        ("previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation"), ()
    ),
    **dict.fromkeys(("messages", "max_tokens", "max_completion_tokens", "response_format"), ()),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("background", "logprobs"), (False,)),
    **dict.fromkeys(("context_management", "stop"), ([],)),
    "logit_bias": ({},),
    "n": (1,),
    "repetition_penalty": (1,),
    "include": ([], ["reasoning.encrypted_content"]),
    "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    return () if value is None else (value,)


def _bias(value: Any) -> Any:
    """Turn keys into token ids; SamplingParams check the values."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise ValueError(f"must be an object of at most {MOST_BIASES} numbers by token id")
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value):
        raise ValueError("its keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character") from None
    return text


class Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Token = Annotated[int, Field(ge=0)]
StopString = Annotated[
    str, Field(min_length=1, max_length=LONGEST_STOP), AfterValidator(_encodable)
]
Stop = Annotated[
    tuple[StopString, ...],
    Field(max_length=MOST_STOPS),
    BeforeValidator(_as_tuple, json_schema_input_type=str | list[str] | None),
]
Bias = Annotated[Any, PlainValidator(_bias, json_schema_input_type=dict[str, float] | None)]
# `forerun.server.requests`, `responses` and `forerun.text.tools` check these; their messages are clearer.
Prompt = SkipValidation[str | list[str] | list[Token] | list[list[Token]]]
Messages = SkipValidation[Annotated[list[ChatMessage], Field(min_length=1)]]
GivenTools = SkipValidation[list[Tool] | None]
ToolChoice = SkipValidation[Literal["none", "auto", "required"] | Tool | None]
Salt = Annotated[str, Field(min_length=1, max_length=LONGEST_SALT), AfterValidator(_encodable)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """Fields that all bodies have."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: Annotated[str, Field(max_length=500)] | None = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields. Raises ApiError for known ones that are not supported."""
        extra = self.model_extra or {}
        for name, harmless in self.unsupported.items():
            value = extra.get(name)
            if value is not None and (type(value) is bool, value) not in [
                (type(x) is bool, x) for x in harmless
            ]:
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        return sorted(name for name in extra if name not in self.unsupported)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnsweredBody(Body):
    """Fields of all bodies that the model answers. SamplingParams check the other bounds."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    user: str | None = None
    cache_salt: Salt | None = None
    forerun_method: Literal["ar"] | None = None


class SamplingBody(AnsweredBody):
    """Fields that chats and plain prompts share."""

    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: Stop = ()
    n: Annotated[int, Field(ge=1, le=MOST_COPIES)] | None = None
    logit_bias: Bias = {}
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    forerun: bool | None = None


class ChatBody(SamplingBody):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: GivenTools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SamplingBody):
    prompt: Prompt
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None


class InputItem(BaseModel):
    type: Literal["message", "function_call", "function_call_output"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None


class FlatTool(Function):
    type: Literal["function"]


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(AnsweredBody):
    """`forerun.server.responses` checks `input` and what concerns tools."""

    unsupported = UNSUPPORTED_RESPONSES

    input: SkipValidation[str | Annotated[list[InputItem], Field(min_length=1)]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    text: TextOptions | None = None
    tools: SkipValidation[list[FlatTool] | None] = None
    tool_choice: SkipValidation[Literal["none", "auto", "required"] | FlatTool | None] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class TokenizeBody(Body):
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    tokens: SkipValidation[list[Token]]


class ErrorBody(BaseModel):
    """The shape of every error."""

    class Detail(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Detail
