"""Bodies of requests and of answers; /openapi.json is made from them.

null means absent. Unknown fields are accepted, for the log to name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

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
_EMPTY = "tools functions stop_token_ids bad_words allowed_token_ids documents logits_processors"
_ZERO = "min_tokens dry_multiplier xtc_probability mirostat"
_ONE = "best_of length_penalty repeat_penalty typical_p tfs_z"
_FALSE = "use_beam_search include_stop_str_in_output continue_final_message return_tokens_as_token_ids"
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
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "modalities": (["text"],),
    "suffix": ("",),
}


# Requests.


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    return () if value is None else (value,)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise ValueError(f"must be an object of at most {MOST_BIASES} numbers by token id")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("its values must be numbers between -100 and 100")
        found[int(key)] = float(bias)
    return found


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character") from None
    return text


def _unchecked(value: Any) -> Any:
    """Leave a value to `forerun.server.requests`, whose messages say better what is wrong."""
    return value


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]


Token = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP), AfterValidator(_encodable)]
Stop = Annotated[
    tuple[StopString, ...],
    Field(max_length=MOST_STOPS),
    BeforeValidator(_as_tuple, json_schema_input_type=str | list[str] | None),
]
Bias = Annotated[Any, PlainValidator(_bias, json_schema_input_type=dict[str, float] | None)]
Prompt = Annotated[
    Any, PlainValidator(_unchecked, json_schema_input_type=str | list[str] | list[Token] | list[list[Token]])
]
Messages = Annotated[
    Any, PlainValidator(_unchecked, json_schema_input_type=Annotated[list[ChatMessage], Field(min_length=1)])
]
TokenIds = Annotated[Any, PlainValidator(_unchecked, json_schema_input_type=list[Token])]
Salt = Annotated[str, Field(min_length=1, max_length=LONGEST_SALT), AfterValidator(_encodable)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)] | None = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields. Raises ApiError for known ones that are not supported."""
        extra = self.model_extra or {}
        for name, harmless in UNSUPPORTED.items():
            value = extra.get(name)
            if value is not None and (type(value) is bool, value) not in [(type(x) is bool, x) for x in harmless]:
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        return sorted(name for name in extra if name not in UNSUPPORTED)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """How to decode, the same for chats and for plain prompts. Other bounds are those of SamplingParams."""

    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: Stop = ()
    n: Annotated[int, Field(ge=1, le=MOST_COPIES)] | None = None
    logit_bias: Bias = {}
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    forerun: bool | None = None
    forerun_method: Literal["ar"] | None = None


class ChatBody(SamplingBody):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds


# Answers.

Reason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class TokenDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """OpenAI's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails


class SpeculativeDecoding(BaseModel):
    """Index j of the histogram counts the steps that accepted exactly j drafted tokens; their sum is
    `num_spec_steps`. `tested_acceptance_rate` is accepted / tested, `draft_acceptance_rate` accepted / drafted."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    tested_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_tested_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(BaseModel):
    """vLLM's."""

    time_to_first_token_ms: float
    queue_time_ms: float
    generation_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: SpeculativeDecoding


class Timings(BaseModel):
    """llama.cpp's."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class Statistics(BaseModel):
    """What an answer says of itself, in three shapes."""

    usage: Usage
    metrics: AnswerMetrics
    timings: Timings


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Of the first token of a prompt there is none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Message(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class _Answer(Statistics):
    id: str
    created: int
    model: str


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forerun"
    max_model_len: int | None


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Text(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str
