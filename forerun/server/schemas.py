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

MAX_STOPS = 64  # the autocomplete of editors sends two dozen
MAX_STOP_LENGTH = 1000  # characters
MAX_STOP_TOKENS = 256
MAX_SALT_LENGTH = 256  # characters
MAX_BIASES = 1024
MAX_COPIES = 128
MAX_LOGPROBS = 20

# Keys of messages that are read, or known and refused. Others are ignored, and the log names them.
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
MESSAGE_KEYS |= {"reasoning_content", "reasoning", "refusal", "annotations"}
MESSAGE_KEYS |= {"audio", "function_call"}

# Known fields that are not supported, by the values that ask for nothing and so are accepted. Any
# other value is refused, because output that silently is not what was asked for would be worse.
_NEVER = (
    "audio prediction web_search_options prompt_logprobs truncate_prompt_tokens chat_template "
    "structured_outputs guided_json guided_regex guided_choice guided_grammar grammar json_schema "
    "n_predict samplers repetition_detection"
)
_EMPTY = "functions bad_words allowed_token_ids documents logits_processors logprob_token_ids"
_ZERO = "min_tokens dry_multiplier xtc_probability mirostat dynatemp_range n_probs priority"
_ONE = "best_of length_penalty repeat_penalty tfs_z"
_FALSE = (
    "use_beam_search include_stop_str_in_output continue_final_message return_tokens_as_token_ids "
    "return_token_ids echo"
)
_TRUE = "skip_special_tokens add_generation_prompt add_special_tokens"
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(_EMPTY.split(), ([],)),
    **dict.fromkeys(_ZERO.split(), (0,)),
    **dict.fromkeys(_ONE.split(), (1,)),
    **dict.fromkeys(_FALSE.split(), (False,)),
    **dict.fromkeys(_TRUE.split(), (True,)),
    "function_call": ("none", "auto"),
    "stop_token_ids": ([],),
    "top_n_sigma": (0, -1),
    "t_max_predict_ms": (0, -1),
    "modalities": (["text"],),
    "suffix": ("",),  # of chats: a plain prompt may have one
}
# The unsupported fields of /v1/responses: those that need state or hosted tools, and fields of a
# chat that have another name there.
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
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    return () if value is None else (value,)


def _bias(value: Any) -> Any:
    """Turn keys into token ids. SamplingParams checks the values."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids with their biases")
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value):
        raise ValueError("the keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is not a character") from None
    return text


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. In Python, but not in JSON, true equals 1."""
    return (type(value) is bool) == (type(other) is bool) and bool(value == other)


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer.

    Some clients send such, and JSON Schema, in which /openapi.json is written, calls them integers.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


class Function(BaseModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool of a chat. Functions are the only type."""

    type: Literal["function"]
    function: Function


class AllowedTools(BaseModel):
    """The tools that an answer may or must call."""

    class Choice(BaseModel):
        """The mode, and the tools by their names."""

        mode: Literal["auto", "required"]
        tools: list[dict[str, Any]]

    type: Literal["allowed_tools"]
    allowed_tools: Choice


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


# WHOLE stands after a Field, because only then pydantic writes its limits as JSON Schema has them.
WHOLE = BeforeValidator(_whole)
Token = Annotated[int, Field(ge=0), WHOLE]
StopString = Annotated[
    str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_encodable)
]
Stop = Annotated[
    tuple[StopString, ...],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_tuple, json_schema_input_type=str | list[str] | None),
]
Bias = Annotated[Any, PlainValidator(_bias, json_schema_input_type=dict[str, float] | None)]
# Pydantic only describes these. `requests`, `responses` and `forerun.text.tools` check them,
# because their messages are clearer.
Prompt = SkipValidation[str | list[str] | list[Token] | list[list[Token]]]
Messages = SkipValidation[Annotated[list[ChatMessage], Field(min_length=1)]]
GivenTools = SkipValidation[list[Tool] | None]
ToolChoice = SkipValidation[Literal["none", "auto", "required"] | Tool | AllowedTools | None]
CacheSalt = Annotated[
    str, Field(min_length=1, max_length=MAX_SALT_LENGTH), AfterValidator(_encodable)
]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
# -1 and -2 are no limit, as in llama.cpp.
TokenLimit = Annotated[int, Field(ge=-2, lt=2**31), WHOLE]
ThinkingLimit = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]  # -1 is no limit
Effort = Annotated[str, Field(max_length=40), AfterValidator(_encodable)]


class Fields(BaseModel):
    """Fields that a client sends. Unknown ones are accepted."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    def unknown(self) -> list[str]:
        """Return the names of unknown fields.

        Raises ApiError for known fields that are not supported.
        """
        extra = self.model_extra or {}
        for name, harmless in self.unsupported.items():
            value = extra.get(name)
            if value is not None and not any(_is_same(value, other) for other in harmless):
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        return sorted(name for name in extra if name not in self.unsupported)


class Body(Fields):
    """The fields that all bodies have."""

    model: Annotated[str, Field(max_length=500)] | None = None


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnsweredBody(Body):
    """The fields of all bodies that the model answers."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**62), WHOLE] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None
    forerun_method: Literal["ar"] | None = None


class SamplingBody(AnsweredBody):
    """The fields that chats and plain prompts share."""

    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COPIES), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_COPIES), WHOLE] | None = None
    logit_bias: Bias = {}
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    forerun: bool | None = None


class Thinking(BaseModel):
    """Whether the model is to think, and how long.

    "adaptive" lets a model think that can. Others answer without thoughts.
    """

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingLimit | None = None


class ChatBody(SamplingBody):
    """A chat that the model continues."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: GivenTools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    thinking_budget_tokens: ThinkingLimit | None = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields, and those of unknown keys of messages."""
        messages = self.messages if isinstance(self.messages, list) else []
        keys: set[Any] = set().union(*(message for message in messages if _is_object(message)))
        return super().unknown() + sorted(f"messages.{key}" for key in keys - MESSAGE_KEYS)


class CompletionBody(SamplingBody):
    """Plain prompts that the model continues."""

    prompt: Prompt
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    echo: bool | None = None


class InputItem(BaseModel):
    """An item of the input of /v1/responses: a message, thoughts, a call, or its output."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None


class FlatTool(Function):
    """A tool of /v1/responses. Functions are the only type."""

    type: Literal["function"]


class FlatAllowedTools(AllowedTools.Choice):
    """The tools that a response may or must call."""

    type: Literal["allowed_tools"]


class TextOptions(BaseModel):
    """The form of a response's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    """How much the model is to think. There are no summaries of thoughts."""

    model_config = ConfigDict(strict=True)

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponsesBody(AnsweredBody):
    """What the model answers as a response."""

    unsupported = UNSUPPORTED_RESPONSES

    input: SkipValidation[str | Annotated[list[InputItem], Field(min_length=1)]]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    text: TextOptions | None = None
    tools: SkipValidation[list[FlatTool] | None] = None
    tool_choice: SkipValidation[
        Literal["none", "auto", "required"] | FlatTool | FlatAllowedTools | None
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    thinking_budget_tokens: ThinkingLimit | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class EmbeddingsBody(Body):
    """Texts to turn into vectors."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None


class TokenizeBody(Body):
    """A text or a chat to turn into tokens."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    """Tokens to turn into text."""

    tokens: SkipValidation[list[Token]]


class ErrorBody(BaseModel):
    """The shape of every error."""

    class Detail(BaseModel):
        """The error."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Detail
