"""Answers, whole or as chunks, from the steps of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from forerun.engine import Step
from forerun.server.asking import Asked
from forerun.server.errors import ApiError, too_late
from forerun.server.logprobs import Spelled, Spelling, as_json
from forerun.server.protocol import ChatBody
from forerun.server.statistics import Tally
from forerun.server.worker import Job
from forerun.text import TextStream

KEEP_ALIVE = 15.0  # seconds without a chunk


class Choice:
    """One of an answer's texts, with its log probabilities where they are wanted."""

    def __init__(self, text: TextStream, spelled: Spelled | None) -> None:
        self.stream, self.spelled = text, spelled
        self.parts: list[str] = []
        self.begun = False
        self.finish_reason: str | None = None


class Answer:
    """What becomes of a body: takes its job's steps, gives JSON.

    Attributes:
        tally: statistics of all choices.
        broken_by: why choices ended that have no reason of their own: "abort" where its reader has gone.
    """

    def __init__(self, asked: Asked, job: Job, spelling: Spelling, model: str) -> None:
        self.asked, self.job, self._spelling = asked, job, spelling
        self.is_chat = isinstance(asked.body, ChatBody)
        self.tally = Tally(job.begun, job.queued, sum(map(len, asked.prompts)))
        self.broken_by = "abort"
        self.choices = [
            Choice(
                TextStream(spelling.tokenizer, each.tokens, asked.stop),
                None if each.logprobs is None else Spelled(spelling, self.is_chat),
            )
            for each in asked.requests
        ]
        self._scored: dict[int, Spelled] = {}  # what its first choice has of a prompt, for the other ones
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if asked.body.stream else "chat.completion"
        self._head = as_json({"object": kind, "id": self.id, "created": int(time()), "model": model})[:-1]
        options = asked.body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    async def whole(self, until: float) -> bytes:
        """All of it. Raises ApiError where decoding ends with one, or `until` (perf_counter) has come."""
        try:
            async for found in _steps(self.job, until):
                for index, step, at in found:
                    await self._take(index, step, at)
        except Exception as error:
            self._broken(error)
            raise
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.parts)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(
                self._choice(index, {"message": message} if self.is_chat else {"text": text}, choice.spelled)
            )
        return self._json(choices, self._statistics())

    async def chunks(self, until: float) -> AsyncIterator[bytes]:
        """Server-sent events; an error is one of them. The last one is [DONE]."""
        try:
            async for found in _steps(self.job, until):
                if not found:
                    yield b": keep-alive\n\n"
                for index, step, at in found:
                    for chunk in await self._chunks(index, step, at):
                        yield _event(chunk)
            if self._usage_at_end:
                yield _event(self._json([], self._statistics()))
        except Exception as error:
            self._broken(error)
            if not isinstance(error, ApiError):
                raise
            yield _event(as_json(error.body()))
        yield b"data: [DONE]\n\n"

    def _broken(self, error: Exception) -> None:
        self.broken_by = "timeout" if isinstance(error, ApiError) and error.status == 504 else "error"

    async def _take(self, index: int, step: Step, at: float) -> list[tuple[str, str]]:
        """Adds a step to its choice; the new pieces of text."""
        choice = self.choices[index]
        self.tally.add(step, at)
        choice.finish_reason = step.finish_reason
        if not choice.begun:
            choice.begun = True
            if self.asked.echo is not None:
                await self._echo(index, step)
        if choice.spelled is not None:
            await choice.spelled.add(step.logprobs)
        pieces = choice.stream.push(step.tokens, step.origins, step.finish_reason is not None)
        choice.parts += [text for text, _ in pieces]
        return pieces

    async def _echo(self, index: int, step: Step) -> None:
        """Has a choice begin with its prompt. Of choices with one prompt only the first one's step has its log
        probabilities, and comes first, as the engine takes requests in their order."""
        assert self.asked.echo is not None
        choice, prompt = self.choices[index], index // (self.asked.body.n or 1)
        choice.parts.append(self.asked.echo[prompt])
        if choice.spelled is None:
            return
        if step.prompt_logprobs is not None:
            await choice.spelled.add([self.asked.requests[index].tokens[0], *step.prompt_logprobs])
            self._scored[prompt] = choice.spelled.copy()
        else:
            choice.spelled = self._scored[prompt].copy()

    async def _chunks(self, index: int, step: Step, at: float) -> list[bytes]:
        """What a step brings: nothing where its text is held back, and nobody wants to hear of the step itself."""
        choice, found = self.choices[index], []
        if self.is_chat and not choice.begun:
            found.append(self._json([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)], {}))
        pieces = await self._take(index, step, at)
        text, choice.parts = "".join(choice.parts), []
        told = bool(self.asked.body.forerun)
        if not (text or told or choice.spelled or choice.finish_reason):
            return found
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": {"content": text} if text or not choice.finish_reason else {}}
        more: dict[str, Any] = {}
        if told:
            more["forerun"] = {
                "pieces": pieces,
                "drafted": step.drafted,
                "tested": step.tested,
                "accepted": step.accepted,
                "rejected": [self._spelling.text(token) for token in step.rejected],
            }
        if not self._usage_at_end and all(each.finish_reason for each in self.choices):
            more |= {"metrics": self.tally.metrics(), "timings": self.tally.timings()}
        return [*found, self._json([self._choice(index, content, choice.spelled)], more)]

    def _choice(self, index: int, content: dict[str, Any], spelled: Spelled | None) -> bytes:
        """A choice with the log probabilities that were not given out yet."""
        found = {"index": index, **content, "finish_reason": self.choices[index].finish_reason}
        return as_json(found)[:-1] + b',"logprobs":' + (b"null" if spelled is None else spelled.take()) + b"}"

    def _json(self, choices: list[bytes], more: dict[str, Any]) -> bytes:
        """A whole answer or a chunk. Choices may be large, so they are put in as they are."""
        if self._usage_always:
            more = {"usage": self.tally.usage()} | more
        elif self._usage_at_end:
            more = {"usage": None} | more
        rest = b"," + as_json(more)[1:] if more else b"}"
        return b"".join((self._head, b',"choices":[', b",".join(choices), b"]", rest))

    def _statistics(self) -> dict[str, Any]:
        return {"usage": self.tally.usage(), "metrics": self.tally.metrics(), "timings": self.tally.timings()}


async def _steps(job: Job, until: float) -> AsyncIterator[list[tuple[int, Step, float]]]:
    """A job's steps as they come, those that are there together; an empty list where none came for long."""
    while not job.ended:
        yield await job.take(max(0.0, min(KEEP_ALIVE, until - perf_counter())))
        if job.open and perf_counter() >= until:  # what came in time is given out, however late it is read
            raise too_late()


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"
