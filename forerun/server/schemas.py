"""What clients are told, for /openapi.json: clients that are generated from it know the answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

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
    role: Literal["assistant"]
    content: str
    refusal: None


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


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: AnswerMetrics
    timings: Timings


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
