"""Answers of Ollama's API, which are records: a line of JSON each."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from forerun.engine.engine import Step
from forerun.server.answers import Answer, call_id
from forerun.server.errors import OLLAMA_PATH, ApiError
from forerun.server.job import Job
from forerun.server.logprobs import TokenTexts, as_json
from forerun.server.ollama_models import timestamp
from forerun.server.ollama_schemas import OllamaBody, OllamaChatBody
from forerun.server.requests import Prepared
from forerun.server.schemas import ChatBody

# Names of a chat's fields in errors, and the names that they have here.
_OTHER_NAMES = {
    "max_tokens": "num_predict",
    "response_format": "format",
    "thinking": "think",
    "reasoning_effort": "think",
}


def renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the name that its field has here."""
    param = _OTHER_NAMES.get(error.param or "")
    if error.param is None or param is None:
        return error
    message = error.message.replace(error.param, param)
    return ApiError(error.status, message, param, error.code)


class OllamaAnswer(Answer):
    """An answer as records. The last one has the figures."""

    def __init__(
        self, body: OllamaBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        stop = body.options.stop if body.options is not None else ()
        chat_body = ChatBody.model_construct(
            messages=[], stop=stop, logprobs=body.logprobs, stream=body.stream
        )
        super().__init__(chat_body, prepared, job, texts, model)
        self._model = model
        self._is_message = isinstance(body, OllamaChatBody)

    def _whole_json(self) -> bytes:
        return self._record(self._new_content(), self._figures())

    def idle_event(self) -> bytes:
        """Return a record without content, because records have no comments."""
        return self._record({})

    async def _step_events(self, index: int, step: Step, at: float) -> list[bytes]:
        await self._take(index, step, at)
        content = self._new_content()
        return [self._record(content)] if content else []

    def _last_events(self, error: ApiError | None = None) -> list[bytes]:
        if error is not None:
            return [as_json(renamed(error).body(OLLAMA_PATH)) + b"\n"]
        return [self._record({}, self._figures())]

    def _new_content(self) -> dict[str, Any]:
        """Return what has come since the last call, by the names of a message."""
        (choice,) = self.choices
        content: dict[str, Any] = {"content": choice.text, "thinking": choice.reasoning}
        if choice.tools is not None:
            first = len(choice.tools.calls) - len(choice.calls)
            content["tool_calls"] = [
                {
                    "id": call_id(choice.tools.form),
                    "function": {
                        "index": at,
                        "name": call.name,
                        "arguments": json.loads(call.arguments),
                    },
                }
                for at, call in enumerate(choice.calls, first)
            ]
        if choice.logprobs is not None:
            content["logprobs"] = json.loads(choice.logprobs.take())["content"]
        choice.clear()
        return {name: value for name, value in content.items() if value}

    def _record(self, content: dict[str, Any], figures: dict[str, Any] | None = None) -> bytes:
        return record(self._model, self._is_message, content, figures)

    def _figures(self) -> dict[str, Any]:
        """Return the last record's members. Durations are in nanoseconds."""
        counts = self.counts
        reason = self.choices[0].finish_reason
        timings = counts.statistics()["timings"]
        return {
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": int(1e9 * (perf_counter() - counts.started_at)),
            "load_duration": int(1e9 * (counts.queued_at - counts.started_at + counts.waited)),
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": int(1e6 * timings["prompt_ms"]),
            "eval_count": counts.tokens,
            "eval_duration": int(1e6 * timings["predicted_ms"]),
        }


def record(
    model: str, is_message: bool, content: dict[str, Any], ending: dict[str, Any] | None
) -> bytes:
    """Return a line of an answer.

    Args:
        model: the model's name.
        is_message: whether the content is a message, as in a chat, or a response to a prompt.
        content: as a message has it, without what is empty.
        ending: further members of the last record; None for others.
    """
    logprobs = {name: content.pop(name) for name in ("logprobs",) if name in content}
    text = content.pop("content", "")
    if is_message:
        body: dict[str, Any] = {"message": {"role": "assistant", "content": text, **content}}
    else:
        body = {"response": text, **content}
    about = {"model": model, "created_at": timestamp(datetime.now(UTC))}
    end = {"done": ending is not None, **(ending or {})}
    return as_json({**about, **body, **logprobs, **end}) + b"\n"
