"""Bodies of Ollama's API, as of its version 0.12. null means absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SkipValidation

from forerun.server.schemas import (
    MAX_LOGPROBS,
    UNSUPPORTED,
    WHOLE,
    Body,
    Fields,
    GivenTools,
    Penalty,
    Stop,
    TokenLimit,
)

# Sampling parameters belong into `options`. Beside it they would change nothing.
_OPTIONS = "temperature top_p top_k min_p seed stop num_predict num_ctx max_tokens response_format"
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **dict.fromkeys(_OPTIONS.split(), ()),
    "tool_choice": ("auto",),
}
_UNSUPPORTED_GENERATE: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_FIELDS,
    **dict.fromkeys(("context", "tools", "messages"), ([],)),
    "template": ("",),
}
_UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **dict.fromkeys(("vocab_only", "embedding_only", "logits_all"), (False,)),
    "penalize_newline": (True,),
}
_MESSAGE_KEYS = {"role", "content", "thinking", "images", "tool_calls", "tool_call_id", "tool_name"}


_Positive = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


class Options(Fields):
    """How to decode. Names and defaults are Ollama's, except that nothing is penalised."""

    unsupported = _UNSUPPORTED_OPTIONS

    num_predict: TokenLimit | None = None
    num_ctx: _Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**62), WHOLE] | None = None
    stop: Stop = ()
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    # How a model is loaded, and what belongs to options that are off. None of it changes an answer.
    numa: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None


class OptionsBody(Body):
    """The fields of all bodies with options.

    `keep_alive` is accepted and not used, because the model stays loaded.
    """

    unsupported = _UNSUPPORTED_FIELDS

    options: Options | None = None
    keep_alive: Any = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields, and those of unknown options."""
        options = self.options.unknown() if self.options is not None else []
        return super().unknown() + [f"options.{name}" for name in options]


class OllamaBody(OptionsBody):
    """The fields of all bodies that the model answers.

    `truncate` and `shift` are accepted and not used, because no conversation is cut.
    """

    stream: bool | None = None
    format: SkipValidation[Literal["", "json"] | dict[str, Any] | None] = None
    think: SkipValidation[bool | str | None] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    """A chat that the model continues."""

    messages: SkipValidation[list[OllamaMessage] | None] = None
    tools: GivenTools = None

    def unknown(self) -> list[str]:
        """Return the names of unknown fields, and those of unknown keys of messages."""
        messages = self.messages if isinstance(self.messages, list) else []
        keys: set[Any] = set().union(
            *(message for message in messages if isinstance(message, dict))
        )
        return super().unknown() + sorted(f"messages.{key}" for key in keys - _MESSAGE_KEYS)


class OllamaGenerateBody(OllamaBody):
    """A prompt that the model answers; with `raw` or a suffix, one that it continues."""

    unsupported = _UNSUPPORTED_GENERATE

    prompt: str | None = None
    suffix: str | None = None
    images: SkipValidation[list[str] | None] = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedBody(OptionsBody):
    """Texts to turn into vectors. Options are those of an answer; none changes a vector."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None


class OllamaOldEmbedBody(OptionsBody):
    """A text to turn into a vector, as older clients send it."""

    prompt: str | None = None


class OllamaShowBody(Body):
    """A model to describe. `name` is an older name of `model`."""

    name: Annotated[str, Field(max_length=500)] | None = None
    verbose: bool | None = None


class OllamaErrorBody(BaseModel):
    """The shape of every error."""

    error: str
