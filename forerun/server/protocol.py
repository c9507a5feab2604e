"""What clients may ask for. null means absent; fields that are not known are accepted, for the log to name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from forerun.server.errors import ApiError

MOST_STOPS, LONGEST_STOP = 16, 1000
LONGEST_SALT = 256
MOST_BIASES = 1024
MOST_COPIES = 128
MOST_LOGPROBS = 20

# Known fields that are not supported, each with the values that ask for nothing. Any other value is refused: output
# that is silently not what was asked for would be worse.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "add_special_tokens": (True,),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "n_predict": (),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "tfs_z": (1,),
}


def _stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if strings is None:
        return ()
    if not isinstance(strings, list | tuple) or not all(isinstance(each, str) for each in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MOST_STOPS or any(not 0 < len(each) <= LONGEST_STOP for each in strings):
        raise ValueError(f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    for each in strings:
        if not each.isascii():
            _encodable(each)
    return tuple(strings)


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


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _known(value: Any) -> Any:
    return value  # looked at when it is turned into tokens, which has better words for what is wrong


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
_PROMPT = {"anyOf": [*_STRINGS["anyOf"][:2], _TOKENS, {"type": "array", "items": _TOKENS}]}
_NUMBERS = {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}

Stop = Annotated[Any, AfterValidator(_stop), WithJsonSchema(_STRINGS)]
Bias = Annotated[Any, AfterValidator(_bias), WithJsonSchema(_NUMBERS)]
Prompt = Annotated[Any, AfterValidator(_known), WithJsonSchema(_PROMPT)]
Messages = Annotated[Any, AfterValidator(_known), WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
Salt = Annotated[str, Field(min_length=1, max_length=LONGEST_SALT), AfterValidator(_encodable)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)] | None = None

    def unknown(self) -> list[str]:
        """Names of fields that nobody knows. Raises ApiError for known ones that are not supported."""
        extra = self.model_extra or {}
        for name, harmless in UNSUPPORTED.items():
            value = extra.get(name)
            if value is not None and not any(value == each and _is_bool(value) == _is_bool(each) for each in harmless):
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        return sorted(name for name in extra if name not in UNSUPPORTED)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """How to decode, the same for chats and for plain prompts. Bounds that are not here are those of SamplingParams."""

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


class ChatBody(Sampling):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Sampling):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _MESSAGE}, {"type": "null"}]})] = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    tokens: Annotated[Any, AfterValidator(_known), WithJsonSchema(_TOKENS)]
