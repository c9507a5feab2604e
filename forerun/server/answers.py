"""Answers, whole or as chunks, from the steps of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.server.errors import ApiError, timed_out
from forerun.server.job import Job, TimedStep
from forerun.server.logprobs import LogprobsJson, TokenTexts, as_json
from forerun.server.metrics import AnswerCounts
from forerun.server.requests import Prepared
from forerun.server.schemas import ChatBody, CompletionBody, SamplingBody, StreamOptions
from forerun.text.stop_strings import TextStream
from forerun.text.thinking import ThoughtStream
from forerun.text.tool_calls import ToolCall, ToolForm, ToolStream

KEEP_ALIVE = 15.0  # seconds without a chunk, after which a comment keeps the connection open
COMMENT = b": keep-alive\n\n"


class _Choice:
    """One of an answer's texts, with its log probabilities if the request asks for them.

    Attributes:
        stream: turns tokens into text.
        thoughts: separates thoughts from the text after them; None if there are none to expect.
        tools: separates the text into text and calls; None if the request has no tools to call.
        logprobs: writes the log probabilities; None if the body asks for none.
        total_logprob, tokens: the sum over its tokens, if the request has log probabilities, and
            their number.
        reasoning, text, calls: of a stream, what no chunk has carried yet; otherwise all.
            `reasoning` are the thoughts.
        has_started: whether a step of it was taken.
    """

    def __init__(
        self,
        request: Request,
        texts: TokenTexts,
        body: SamplingBody,
        prepared: Prepared,
    ) -> None:
        self.request = request
        shown = dict(prepared.tools.shown)
        self.thoughts: ThoughtStream | None = None
        if prepared.thoughts is not None:
            shown |= prepared.thoughts.special
            self.thoughts = ThoughtStream(prepared.thoughts)
        self.stream = TextStream(
            texts.tokenizer, request.tokens, body.stop, shown, body.min_tokens or 0
        )
        self.logprobs: LogprobsJson | None = None
        if isinstance(body, ChatBody) and body.logprobs:
            self.logprobs = LogprobsJson(texts, is_chat=True)
        elif isinstance(body, CompletionBody) and body.logprobs is not None:
            self.logprobs = LogprobsJson(texts, is_chat=False)
        self.total_logprob = 0.0
        self.tokens = 0
        self.tools = prepared.tools.stream()
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.text = ""
        self.has_started = False
        self.finish_reason: str | None = None

    def clear(self) -> None:
        """Forget what a chunk has carried."""
        self.reasoning = ""
        self.calls = []
        self.text = ""


class Answer:
    """The JSON that answers a body, written from the steps of its job.

    Attributes:
        counts: the sums over the steps of all choices.
        ended_by: the finish reason of choices that have none: "abort" if the client has
            disconnected, otherwise "timeout" or "error".
    """

    def __init__(
        self, body: SamplingBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        self.body = body
        self.job = job
        self._texts = texts
        self._echo = prepared.echo
        self._copies = prepared.copies
        self._is_scoring = prepared.is_scoring
        self._is_chat = isinstance(body, ChatBody)
        requests = prepared.requests
        self.counts = AnswerCounts(
            started_at=job.started_at,
            queued_at=job.queued_at,
            has_prediction=isinstance(body, ChatBody) and body.prediction is not None,
            prompt_tokens=sum(len(request.tokens) for request in requests[:: self._copies]),
        )
        self.ended_by = "abort"
        self.choices = [_Choice(request, texts, body, prepared) for request in requests]
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}"
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = {"object": kind, "id": self.id, "created": int(time()), "model": model}
        self._head = as_json(head)[:-1]  # without the closing brace: `_object` adds the choices
        options = body.stream_options or StreamOptions()
        self._usage_at_end = options.include_usage
        self._usage_always = options.continuous_usage_stats

    async def whole(self, until: float) -> bytes:
        """Return the whole answer when its last step has come.

        Raises the ApiError that ends the job, or ApiError (504) at `until`, a time of perf_counter.
        """
        try:
            async for steps in _steps(self.job, until):
                for index, step, at in steps:
                    await self._take(index, step, at)
        except Exception as error:
            self._note_failure(error)
            raise
        return self._whole_json()

    def _whole_json(self) -> bytes:
        choices: list[bytes] = []
        for choice in self._best():
            content: dict[str, Any] = {"text": choice.text}
            if self._is_chat:
                content = {"message": _message(choice)}
            choices.append(self._choice_json(choice, len(choices), content))
        return self._object(choices, {"usage": self.counts.usage(), **self.counts.statistics()})

    def _best(self) -> list[_Choice]:
        """Return the choices that are answered: of each prompt the `n` best of `best_of`.

        These are the ones with the highest log probability per token, as in OpenAI's API.
        """
        count = self.body.n or 1
        if count == self._copies:
            return self.choices
        best: list[_Choice] = []
        for start in range(0, len(self.choices), self._copies):
            choices = self.choices[start : start + self._copies]
            best += sorted(choices, key=_mean_logprob, reverse=True)[:count]
        return best

    async def chunks(self, until: float) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An ApiError is one of the events."""
        try:
            for event in self._first_events():
                yield event
            async for steps in _steps(self.job, until):
                if not steps:
                    yield self.idle_event()
                for index, step, at in steps:
                    for event in await self._step_events(index, step, at):
                        yield event
            ending = self._last_events()
        except Exception as error:
            self._note_failure(error)
            if not isinstance(error, ApiError):
                raise
            ending = self._last_events(error)
        for event in ending:
            yield event

    def idle_event(self) -> bytes:
        """Return what keeps the connection open while no step comes: a comment."""
        return COMMENT

    def _first_events(self) -> list[bytes]:
        """Return the events before the first step."""
        return []

    def _last_events(self, error: ApiError | None = None) -> list[bytes]:
        """Return the events after the last step, or after an error. The last one is [DONE]."""
        events = []
        if error is not None:
            events.append(_event(as_json(error.body())))
        elif self._usage_at_end:
            ending = {"usage": self.counts.usage(), **self.counts.statistics()}
            events.append(_event(self._object([], ending)))
        return [*events, _event(b"[DONE]")]

    def _note_failure(self, error: Exception) -> None:
        is_timeout = isinstance(error, ApiError) and error.status == 504
        self.ended_by = "timeout" if is_timeout else "error"

    async def _take(self, index: int, step: Step, at: float) -> list[tuple[str, str]]:
        """Add a step to its choice. Return the new pieces of text, each with its origin."""
        choice = self.choices[index]
        if self._is_scoring:
            step = replace(step, tokens=(), origins=(), logprobs=(), finish_reason="length")
        self.counts.add(index, step, at)
        choice.total_logprob += sum(logprob.logprob for logprob in step.logprobs)
        choice.tokens += len(step.tokens)
        choice.finish_reason = step.finish_reason
        if not choice.has_started:
            choice.has_started = True
            await self._start_with_prompt(index, step)
        if choice.logprobs is not None:
            await choice.logprobs.add(step.logprobs)
        pieces = choice.stream.push(step.tokens, step.origins, step.finish_reason is not None)
        if pieces and step.tokens and step.tokens[-1] in choice.request.eos:
            # An end token that is not marked as special has a text, which is no part of the answer.
            text, origin = pieces[-1]
            pieces[-1] = (text.removesuffix(self._texts.text(step.tokens[-1])), origin)
        text = "".join(text for text, _ in pieces)
        if choice.thoughts is not None:
            text = self._separate_thoughts(choice, choice.thoughts, text, step)
        if choice.tools is None:
            choice.text += text
        else:
            self._separate_calls(choice, choice.tools, text)
        return pieces

    async def _start_with_prompt(self, index: int, step: Step) -> None:
        """Let a choice begin with its prompt, if the request asks for that (`echo`)."""
        if self._echo is None:
            return
        choice = self.choices[index]
        choice.text = self._echo[index // self._copies]
        if choice.logprobs is not None and step.prompt_logprobs is not None:
            await choice.logprobs.add([choice.request.tokens[0], *step.prompt_logprobs])

    def _separate_thoughts(
        self, choice: _Choice, thoughts: ThoughtStream, text: str, step: Step
    ) -> str:
        """Add new thoughts to a choice, and return the text that follows them."""
        was_thinking = thoughts.is_thinking
        reasoning, text = thoughts.push(text, step.finish_reason is not None)
        choice.reasoning += reasoning
        if was_thinking and thoughts.has_begun:
            self.counts.reasoning_tokens += thoughts.marks.count(step.tokens)
        return text

    def _separate_calls(self, choice: _Choice, tools: ToolStream, text: str) -> None:
        """Add new text to a choice that may call tools."""
        has_ended = choice.finish_reason is not None
        for part in tools.push(text, has_ended):
            if isinstance(part, ToolCall):
                choice.calls.append(part)
            else:
                choice.text += part
        if has_ended:
            self.counts.calls.update(tool_calls=len(tools.calls), unparsed_tool_calls=tools.broken)
            if tools.calls and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"

    async def _step_events(self, index: int, step: Step, at: float) -> list[bytes]:
        """Return the events of a step.

        There are none if all of its text is held back, for example because it may begin a stop
        string, unless the request asks for every step (`forerun`) or for log probabilities.
        """
        choice = self.choices[index]
        events = []
        if self._is_chat and not choice.has_started:
            role = {"delta": {"role": "assistant", "content": ""}}
            start = self._choice_json(choice, index, role, has_logprobs=False)
            events.append(_event(self._object([start], {})))
        pieces = await self._take(index, step, at)
        has_text = bool(choice.reasoning or choice.text or choice.calls)
        has_news = has_text or choice.logprobs is not None or choice.finish_reason is not None
        if not (has_news or self.body.forerun):
            return events
        content: dict[str, Any] = {"text": choice.text}
        if self._is_chat:
            content = {"delta": _delta(choice)}
        choice.clear()
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
        if not self._usage_at_end and all(choice.finish_reason for choice in self.choices):
            more |= self.counts.statistics()
        events.append(_event(self._object([self._choice_json(choice, index, content)], more)))
        return events

    def _choice_json(
        self, choice: _Choice, index: int, content: dict[str, Any], has_logprobs: bool = True
    ) -> bytes:
        """Return a choice with its content and the log probabilities that no chunk has had."""
        logprobs = b"null"
        if choice.logprobs is not None and has_logprobs:
            logprobs = choice.logprobs.take()
        members = as_json({"index": index, **content, "finish_reason": choice.finish_reason})
        return members[:-1] + b',"logprobs":' + logprobs + b"}"

    def _object(self, choices: list[bytes], more: dict[str, Any]) -> bytes:
        """Return an answer or a chunk with choices and further members.

        The choices are JSON already, because they may be too large to be encoded at once.
        """
        if self._usage_always:
            more = {"usage": self.counts.usage()} | more
        elif self._usage_at_end:
            more = {"usage": None} | more
        rest = b"," + as_json(more)[1:] if more else b"}"
        return b"".join((self._head, b',"choices":[', b",".join(choices), b"]", rest))


def _mean_logprob(choice: _Choice) -> float:
    return choice.total_logprob / max(1, choice.tokens)


def call_id(form: ToolForm) -> str:
    """Return a new id for a call, in the shape that the form of calls expects."""
    prefix, length = form.id
    return (prefix + uuid4().hex)[:length]


def _tool_calls(calls: list[ToolCall], form: ToolForm) -> list[dict[str, Any]]:
    return [{"id": call_id(form), "type": "function", "function": vars(call)} for call in calls]


def _message(choice: _Choice) -> dict[str, Any]:
    """Return a choice of a chat as OpenAI's message."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tools is not None and choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = _tool_calls(choice.calls, choice.tools.form)
    return message


def _delta(choice: _Choice) -> dict[str, Any]:
    """Return OpenAI's delta with the thoughts, the text and the calls of a choice."""
    delta: dict[str, Any] = {}
    if choice.reasoning:
        delta["reasoning_content"] = choice.reasoning
    if choice.text or not (delta or choice.calls or choice.finish_reason):
        delta["content"] = choice.text
    if choice.calls and choice.tools is not None:
        first = len(choice.tools.calls) - len(choice.calls)
        calls = _tool_calls(choice.calls, choice.tools.form)
        delta["tool_calls"] = [{"index": at} | call for at, call in enumerate(calls, first)]
    return delta


async def _steps(job: Job, until: float) -> AsyncIterator[list[TimedStep]]:
    """Yield a job's steps as they come, and an empty list after `KEEP_ALIVE` seconds without any.

    Raises ApiError (504) if the job goes on at `until`, a time of perf_counter. Steps that came in
    time are yielded however late they are read.
    """
    while not job.ended:
        yield await job.wait(max(0.0, min(KEEP_ALIVE, until - perf_counter())))
        if job.open and perf_counter() >= until:
            raise timed_out()


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"
