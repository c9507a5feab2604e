"""Answers, whole or as chunks, from the steps of a job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from forerun.decoder import Decoder
from forerun.engine import Step
from forerun.logprobs import Logprob
from forerun.server.asking import Asked
from forerun.server.errors import ApiError
from forerun.server.logprobs import Spelling
from forerun.server.protocol import ChatBody
from forerun.server.statistics import Tally
from forerun.server.worker import Job
from forerun.text import TextStream

KEEP_ALIVE = 15.0  # seconds without a chunk


class Choice:
    """One of an answer's texts."""

    def __init__(self, text: TextStream) -> None:
        self.stream = text
        self.parts: list[str] = []
        self.logprobs: list[Logprob | int] = []
        self.offset = 0  # characters of the text's tokens whose log probabilities were given out
        self.begun = False
        self.finish_reason: str | None = None


class Answer:
    """What becomes of a body: takes its job's steps, gives dictionaries for JSON.

    Attributes:
        tally: statistics of all choices.
    """

    def __init__(self, asked: Asked, job: Job, decoder: Decoder, model: str) -> None:
        assert decoder.tokenizer is not None
        self.asked, self.job, self.tokenizer = asked, job, decoder.tokenizer
        self.is_chat = isinstance(asked.body, ChatBody)
        self.tally = Tally(job.begun, sum(map(len, asked.prompts)))
        self.choices = [Choice(TextStream(self.tokenizer, each.tokens, asked.stop)) for each in asked.requests]
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        self._head = {"id": self.id, "created": int(time()), "model": model}
        self._spelling = Spelling(self.tokenizer)
        options = asked.body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    async def whole(self, until: float) -> dict[str, Any]:
        """All of it. Raises ApiError where decoding ends with one, or `until` (perf_counter) has come."""
        async for found in _steps(self.job, until):
            for index, step, at in found:
                self._take(index, step, at)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {"object": kind, **self._head, "choices": self._whole_choices(), **self._statistics()}

    async def chunks(self, until: float) -> AsyncIterator[bytes]:
        """Server-sent events; an error is one of them. The last one is [DONE]."""
        try:
            async for found in _steps(self.job, until):
                if not found:
                    yield b": keep-alive\n\n"
                for index, step, at in found:
                    for chunk in self._chunks(index, step, at):
                        yield _event(chunk)
            if self._usage_at_end:
                yield _event(self._chunk([]) | self._statistics())
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"

    def _take(self, index: int, step: Step, at: float) -> list[tuple[str, str]]:
        """Adds a step to its choice; the new pieces of text."""
        choice = self.choices[index]
        self.tally.add(step, at)
        choice.finish_reason = step.finish_reason
        if not choice.begun:
            choice.begun = True
            if self.asked.echo is not None:
                choice.parts.append(self.asked.echo[index // (self.asked.body.n or 1)])
        if step.prompt_logprobs is not None:
            choice.logprobs += [self.asked.requests[index].tokens[0], *step.prompt_logprobs]
        choice.logprobs += step.logprobs
        pieces = choice.stream.push(step.tokens, step.origins, step.finish_reason is not None)
        choice.parts += [text for text, _ in pieces]
        return pieces

    def _whole_choices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index, choice in enumerate(self.choices):
            text, logprobs = "".join(choice.parts), self._logprobs(index)
            content = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
            )
            found.append({"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        return found

    def _chunks(self, index: int, step: Step, at: float) -> list[dict[str, Any]]:
        """What a step brings: nothing where its text is held back, and nobody wants to hear of the step itself."""
        choice, found = self.choices[index], []
        if self.is_chat and not choice.begun:
            found.append(self._chunk([self._delta(index, {"role": "assistant", "content": ""})]))
        pieces = self._take(index, step, at)
        text, choice.parts = "".join(choice.parts), []
        told = bool(self.asked.body.forerun)
        if not (text or told or choice.logprobs or choice.finish_reason):
            return found
        delta = self._delta(index, {"content": text} if text or not choice.finish_reason else {}, text)
        delta["logprobs"], delta["finish_reason"] = self._logprobs(index), choice.finish_reason
        chunk = self._chunk([delta])
        if told:
            chunk["forerun"] = {
                "pieces": pieces,
                "drafted": step.drafted,
                "tested": step.tested,
                "accepted": step.accepted,
                "rejected": [self._spelling.text(token) for token in step.rejected],
            }
        if not self._usage_at_end and all(each.finish_reason for each in self.choices):
            chunk |= {"metrics": self.tally.metrics(), "timings": self.tally.timings()}
        return [*found, chunk]

    def _delta(self, index: int, delta: dict[str, Any], text: str = "") -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk: dict[str, Any] = {"object": kind, **self._head, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self.tally.usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Those of a choice that were not given out yet; None where none are wanted."""
        choice = self.choices[index]
        if self.asked.requests[index].logprobs is None:
            return None
        new, choice.logprobs = choice.logprobs, []
        if self.is_chat:
            return self._spelling.chat([each for each in new if isinstance(each, Logprob)])
        found = self._spelling.completion(new, choice.offset)
        choice.offset += sum(map(len, found["tokens"]))
        return found

    def _statistics(self) -> dict[str, Any]:
        return {"usage": self.tally.usage(), "metrics": self.tally.metrics(), "timings": self.tally.timings()}


async def _steps(job: Job, until: float) -> AsyncIterator[list[tuple[int, Step, float]]]:
    """A job's steps as they come, those that are there together; an empty list where none came for long."""
    while job.open or not job.queue.empty():
        found = []
        if job.queue.empty():
            left = until - perf_counter()
            if left <= 0:
                raise ApiError(504, "the answer took too long", code="timeout")
            try:
                found.append(await asyncio.wait_for(job.queue.get(), min(KEEP_ALIVE, left)))
            except TimeoutError:
                yield []
                continue
        while not job.queue.empty():
            found.append(job.queue.get_nowait())
        for each in found:
            if isinstance(each, ApiError):
                raise each
        yield [each for each in found if not isinstance(each, ApiError)]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


def as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
