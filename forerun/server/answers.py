"""Answers, whole or as chunks, from the steps of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from forerun.engine.engine import Step
from forerun.server.errors import ApiError, timed_out
from forerun.server.logprobs import LogprobsJson, TokenTexts, as_json
from forerun.server.metrics import AnswerCounts
from forerun.server.requests import Prepared
from forerun.server.schemas import ChatBody, Message
from forerun.server.worker import Job
from forerun.text.stop_strings import TextStream

KEEP_ALIVE = 15.0  # seconds without a chunk


class Choice:
    """One of an answer's texts, with its log probabilities where they are wanted."""

    def __init__(self, text: TextStream, logprobs: LogprobsJson | None) -> None:
        self.stream, self.logprobs = text, logprobs
        self.parts: list[str] = []
        self.begun = False
        self.finish_reason: str | None = None


class Answer:
    """Takes the steps of a body's job, gives JSON.

    Attributes:
        counts: of all choices.
        ended_by: why choices ended that have no reason of their own: "abort" where the reader has gone.
    """

    def __init__(self, prepared: Prepared, job: Job, texts: TokenTexts, model: str) -> None:
        self.prepared, self.job, self._texts = prepared, job, texts
        self.body = prepared.body
        self.is_chat = isinstance(self.body, ChatBody)
        self.counts = AnswerCounts(job.begun, job.queued, sum(map(len, prepared.prompts)))
        self.ended_by = "abort"
        self.choices = [
            Choice(
                TextStream(texts.tokenizer, each.tokens, self.body.stop),
                None if each.logprobs is None else LogprobsJson(texts, self.is_chat),
            )
            for each in prepared.requests
        ]
        self._scored: dict[int, LogprobsJson] = {}  # of each prompt, from its first choice for the other ones
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        self._head = as_json({"object": kind, "id": self.id, "created": int(time()), "model": model})[:-1]
        options = self.body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    async def whole(self, until: float) -> bytes:
        """Return all of it. Raises ApiError where decoding ends with one, or `until` (perf_counter) has come."""
        try:
            async for steps in _steps(self.job, until):
                for index, step, at in steps:
                    await self._take(index, step, at)
        except Exception as error:
            self._failed(error)
            raise
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.parts)
            content = {"message": Message(content=text)} if self.is_chat else {"text": text}
            choices.append(self._choice(index, content, choice.logprobs))
        return self._json(choices, dict(self.counts.statistics()))

    async def chunks(self, until: float) -> AsyncIterator[bytes]:
        """Yield server-sent events; an error is one of them. The last one is [DONE]."""
        try:
            async for steps in _steps(self.job, until):
                if not steps:
                    yield b": keep-alive\n\n"
                for index, step, at in steps:
                    for chunk in await self._chunks(index, step, at):
                        yield _event(chunk)
            if self._usage_at_end:
                yield _event(self._json([], dict(self.counts.statistics())))
        except Exception as error:
            self._failed(error)
            if not isinstance(error, ApiError):
                raise
            yield _event(as_json(error.body()))
        yield _event(b"[DONE]")

    def _failed(self, error: Exception) -> None:
        self.ended_by = "timeout" if isinstance(error, ApiError) and error.status == 504 else "error"

    async def _take(self, index: int, step: Step, at: float) -> list[tuple[str, str]]:
        """Add a step to its choice; return the new pieces of text."""
        choice = self.choices[index]
        self.counts.add(step, at)
        choice.finish_reason = step.finish_reason
        if not choice.begun:
            choice.begun = True
            if self.prepared.echo is not None:
                await self._echo(index, step, self.prepared.echo)
        if choice.logprobs is not None:
            await choice.logprobs.add(step.logprobs)
        pieces = choice.stream.push(step.tokens, step.origins, step.finish_reason is not None)
        choice.parts += [text for text, _ in pieces]
        return pieces

    async def _echo(self, index: int, step: Step, texts: list[str]) -> None:
        """Begin a choice with its prompt. Of choices with one prompt only the first one's step has its log
        probabilities, and comes first, as the engine takes requests in their order."""
        choice, prompt = self.choices[index], index // (self.body.n or 1)
        choice.parts.append(texts[prompt])
        if choice.logprobs is None:
            return
        if step.prompt_logprobs is not None:
            await choice.logprobs.add([self.prepared.requests[index].tokens[0], *step.prompt_logprobs])
            self._scored[prompt] = choice.logprobs.copy()
        else:
            choice.logprobs = self._scored[prompt].copy()

    async def _chunks(self, index: int, step: Step, at: float) -> list[bytes]:
        """Return what a step brings: nothing where its text is held back, and nobody asked for steps."""
        choice, found = self.choices[index], []
        if self.is_chat and not choice.begun:
            found.append(self._json([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)], {}))
        pieces = await self._take(index, step, at)
        text, choice.parts = "".join(choice.parts), []
        if not (text or self.body.forerun or choice.logprobs or choice.finish_reason):
            return found
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": {"content": text} if text or not choice.finish_reason else {}}
        more: dict[str, Any] = {}
        if self.body.forerun:
            more["forerun"] = {
                "pieces": pieces,
                "drafted": step.drafted,
                "tested": step.tested,
                "accepted": step.accepted,
                "rejected": [self._texts.text(token) for token in step.rejected],
            }
        if not self._usage_at_end and all(each.finish_reason for each in self.choices):
            statistics = self.counts.statistics()
            more |= {"metrics": statistics.metrics, "timings": statistics.timings}
        return [*found, self._json([self._choice(index, content, choice.logprobs)], more)]

    def _choice(self, index: int, content: dict[str, Any], logprobs: LogprobsJson | None) -> bytes:
        """A choice with the log probabilities that were not given out yet."""
        found = {"index": index, **content, "finish_reason": self.choices[index].finish_reason}
        return as_json(found)[:-1] + b',"logprobs":' + (b"null" if logprobs is None else logprobs.take()) + b"}"

    def _json(self, choices: list[bytes], more: dict[str, Any]) -> bytes:
        """A whole answer or a chunk. Choices may be large, so they are put in as they are."""
        if self._usage_always:
            more = {"usage": self.counts.usage()} | more
        elif self._usage_at_end:
            more = {"usage": None} | more
        rest = b"," + as_json(more)[1:] if more else b"}"
        return b"".join((self._head, b',"choices":[', b",".join(choices), b"]", rest))


async def _steps(job: Job, until: float) -> AsyncIterator[list[tuple[int, Step, float]]]:
    """Yield a job's steps as they come, those that are there together; an empty list where none came for long."""
    while not job.ended:
        yield await job.take(max(0.0, min(KEEP_ALIVE, until - perf_counter())))
        if job.open and perf_counter() >= until:  # what came in time is given out, however late it is read
            raise timed_out()


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"
