"""Answers, whole or as chunks, from the steps of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.server.errors import ApiError, timed_out
from forerun.server.job import Job
from forerun.server.logprobs import LogprobsJson, TokenTexts, as_json
from forerun.server.metrics import AnswerCounts
from forerun.server.requests import Prepared
from forerun.server.schemas import ChatBody, SamplingBody, StreamOptions
from forerun.text.stop_strings import TextStream
from forerun.text.tool_calls import ToolCall, ToolForm
from forerun.text.tools import Tools

KEEP_ALIVE = 15.0  # seconds without a chunk


class _Choice:
    """One of an answer's texts, with its log probabilities if the request asks for them."""

    def __init__(
        self,
        request: Request,
        stop: tuple[str, ...],
        texts: TokenTexts,
        is_chat: bool,
        tools: Tools,
    ) -> None:
        self.request, self.stream = (
            request,
            TextStream(texts.tokenizer, request.tokens, stop, tools.shown),
        )
        self.logprobs = None if request.logprobs is None else LogprobsJson(texts, is_chat)
        self.tools = tools.stream()
        self.calls: list[ToolCall] = []  # that no chunk has had
        self.text = ""  # likewise
        self.begun = False
        self.finish_reason: str | None = None


class Answer:
    """Takes the steps of a body's job and writes JSON.

    Attributes:
        counts: of all choices.
        ended_by: the finish reason of choices without their own: "abort" if the reader has gone.
    """

    def __init__(
        self, body: SamplingBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        requests, self._echo = prepared.requests, prepared.echo
        self.body, self.job, self._texts = body, job, texts
        prompt_tokens = sum(len(each.tokens) for each in requests[:: body.n or 1])
        self._is_chat = isinstance(self.body, ChatBody)
        self.counts = AnswerCounts(begun=job.begun, queued=job.queued, prompt_tokens=prompt_tokens)
        self.ended_by = "abort"
        self.choices = [
            _Choice(each, self.body.stop, texts, self._is_chat, prepared.tools) for each in requests
        ]
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}"
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        self._head = as_json(
            {"object": kind, "id": self.id, "created": int(time()), "model": model}
        )[:-1]
        options = body.stream_options or StreamOptions()
        self._usage_at_end, self._usage_always = (
            options.include_usage,
            options.continuous_usage_stats,
        )

    async def whole(self, until: float) -> bytes:
        """Return all of it. Raises the ApiError that ends the job, or that of `until` (perf_counter)."""
        try:
            async for steps in _steps(self.job, until):
                for index, step, at in steps:
                    await self._take(index, step, at)
        except Exception as error:
            self._failed(error)
            raise
        return self._whole()

    def _whole(self) -> bytes:
        choices = []
        for index, choice in enumerate(self.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.tools is not None and choice.calls:
                message |= {
                    "content": choice.text or None,
                    "tool_calls": _tool_calls(choice.calls, choice.tools.form),
                }
            choices.append(
                self._choice(
                    index, {"message": message} if self._is_chat else {"text": choice.text}
                )
            )
        return self._json(choices, {"usage": self.counts.usage(), **self.counts.statistics()})

    async def chunks(self, until: float) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error is one of them."""
        try:
            for event in self._begin():
                yield event
            async for steps in _steps(self.job, until):
                if not steps:
                    yield b": keep-alive\n\n"
                for index, step, at in steps:
                    for event in await self._chunks(index, step, at):
                        yield event
            ending = self._end()
        except Exception as error:
            self._failed(error)
            if not isinstance(error, ApiError):
                raise
            ending = self._end(error)
        for event in ending:
            yield event

    def _begin(self) -> list[bytes]:
        return []

    def _end(self, error: ApiError | None = None) -> list[bytes]:
        """Return the events after the last step's, or after an error. [DONE] is the last one."""
        found = [] if error is None else [as_json(error.body())]
        if error is None and self._usage_at_end:
            found.append(self._json([], {"usage": self.counts.usage(), **self.counts.statistics()}))
        return [_event(each) for each in (*found, b"[DONE]")]

    def _failed(self, error: Exception) -> None:
        self.ended_by = (
            "timeout" if isinstance(error, ApiError) and error.status == 504 else "error"
        )

    async def _take(self, index: int, step: Step, at: float) -> list[tuple[str, str]]:
        """Add a step to its choice; return the new pieces of text."""
        choice = self.choices[index]
        self.counts.add(index, step, at)
        choice.finish_reason = step.finish_reason
        if not choice.begun:
            choice.begun = True
            if self._echo is not None:
                choice.text = self._echo[index // (self.body.n or 1)]
                if choice.logprobs is not None and step.prompt_logprobs is not None:
                    await choice.logprobs.add([choice.request.tokens[0], *step.prompt_logprobs])
        if choice.logprobs is not None:
            await choice.logprobs.add(step.logprobs)
        pieces = choice.stream.push(step.tokens, step.origins, step.finish_reason is not None)
        if pieces and step.tokens and (end := step.tokens[-1]) in choice.request.eos:
            # An end token that is not marked as special has a text, which is no part of the answer.
            pieces[-1] = pieces[-1][0].removesuffix(self._texts.text(end)), pieces[-1][1]
        text = "".join(text for text, _ in pieces)
        if choice.tools is None:
            choice.text += text
            return pieces
        for each in choice.tools.push(text, step.finish_reason is not None):
            if isinstance(each, ToolCall):
                choice.calls.append(each)
            else:
                choice.text += each
        if step.finish_reason is not None:
            self.counts.calls.update(
                tool_calls=len(choice.tools.calls), unparsed_tool_calls=choice.tools.broken
            )
            if choice.tools.calls and step.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
        return pieces

    async def _chunks(self, index: int, step: Step, at: float) -> list[bytes]:
        """Return the events of a step: none if its text is held back, unless the request asks for steps."""
        choice, found = self.choices[index], []
        if self._is_chat and not choice.begun:
            role = {"delta": {"role": "assistant", "content": ""}}
            found.append(_event(self._json([self._choice(index, role, False)], {})))
        pieces = await self._take(index, step, at)
        text, calls, choice.text, choice.calls = choice.text, choice.calls, "", []
        if not (text or calls or self.body.forerun or choice.logprobs or choice.finish_reason):
            return found
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            content = {
                "delta": {"content": text} if text or not (calls or choice.finish_reason) else {}
            }
            if calls and choice.tools is not None:
                first = len(choice.tools.calls) - len(calls)
                told = _tool_calls(calls, choice.tools.form)
                content["delta"]["tool_calls"] = [
                    {"index": at} | each for at, each in enumerate(told, first)
                ]
        more: dict[str, Any] = {}
        if self.body.forerun:
            more["forerun"] = {
                "pieces": pieces,
                "drafted": step.drafted,
                "tested": step.tested,
                "accepted": step.accepted,
                "rests": step.rests,
                "rejected": [self._texts.text(token) for token in step.rejected],
            }
        if not self._usage_at_end and all(each.finish_reason for each in self.choices):
            more |= self.counts.statistics()
        return [*found, _event(self._json([self._choice(index, content)], more))]

    def _choice(self, index: int, content: dict[str, Any], has_logprobs: bool = True) -> bytes:
        """Return a choice, with the log probabilities that no chunk has had."""
        choice = self.choices[index]
        logprobs = (
            choice.logprobs.take() if choice.logprobs is not None and has_logprobs else b"null"
        )
        found = as_json({"index": index, **content, "finish_reason": choice.finish_reason})
        return found[:-1] + b',"logprobs":' + logprobs + b"}"

    def _json(self, choices: list[bytes], more: dict[str, Any]) -> bytes:
        """Return an answer or a chunk. Choices may be large, so they are not encoded again."""
        if self._usage_always or self._usage_at_end:
            more = {"usage": self.counts.usage() if self._usage_always else None} | more
        rest = b"," + as_json(more)[1:] if more else b"}"
        return b"".join((self._head, b',"choices":[', b",".join(choices), b"]", rest))


def call_id(form: ToolForm) -> str:
    """Return a new id for a call."""
    prefix, length = form.id
    return (prefix + uuid4().hex)[:length]


def _tool_calls(calls: list[ToolCall], form: ToolForm) -> list[dict[str, Any]]:
    return [{"id": call_id(form), "type": "function", "function": vars(call)} for call in calls]


async def _steps(job: Job, until: float) -> AsyncIterator[list[tuple[int, Step, float]]]:
    """Yield a job's steps as they come, and an empty list after `KEEP_ALIVE` seconds without any."""
    while not job.ended:
        yield await job.wait(max(0.0, min(KEEP_ALIVE, until - perf_counter())))
        if (
            job.open and perf_counter() >= until
        ):  # what came in time is given out, however late it is read
            raise timed_out()


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"
