"""What a decoder returns: whole completions, or chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.engine.session import Run, Session
from forerun.engine.stats import Stats, summarise
from forerun.text.stop_strings import TextStream
from forerun.text.tool_calls import ToolCall, ToolStream


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    Attributes:
        text: the output without the prompt, cut before a stop string and without tool calls; empty
            without a tokenizer.
        tokens: the token ids of the output, including the end token.
        origins: where each token came from: draft, lookup, correction or bonus.
        finish_reason: "stop" (end token, stop string or criterion) or "length".
        stats: tau, alpha, tokens/s and their counts. Its seconds are those of the whole call.
        steps: the record of every target forward.
        tool_calls: the calls in an answer to a chat with tools.
    """

    text: str
    tokens: list[int]
    origins: list[str]
    finish_reason: str
    stats: Stats
    steps: list[Step]
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        index: the number of the prompt that it belongs to.
        text: the new text; empty while a stop string may have begun.
        pieces: the same text as pairs (text, origin of its token).
        step: the target forward that gave it, with the tokens committed.
        finish_reason: None except on the last chunk of a prompt.
        tool_calls: those of the whole answer, on its last chunk. The text contains them as well.
    """

    index: int
    text: str
    pieces: list[tuple[str, str]]
    step: Step
    finish_reason: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """The requests of one call, and what turns their tokens into text and tool calls.

    Attributes:
        requests: the requests.
        texts: what turns the tokens of each request into text; None without a tokenizer.
        is_single: whether the caller gave one prompt and not a list.
        started_at: the time when the call began, by `perf_counter`.
        readers: what finds tool calls in the text of each request; empty without tools.
    """

    requests: list[Request]
    texts: list[TextStream | None]
    is_single: bool
    started_at: float
    readers: list[ToolStream] = field(default_factory=list)

    def complete(self, session: Session) -> Any:
        """Return a completion, or a list of them for several requests, when all have ended."""
        steps = session.add(self.requests).collect()
        seconds = perf_counter() - self.started_at
        completions = [self._completion(index, taken, seconds) for index, taken in enumerate(steps)]
        return completions[0] if self.is_single else completions

    def _completion(self, index: int, steps: list[Step], seconds: float) -> Completion:
        """Return the completion of a request from all its steps."""
        tokens = [token for step in steps for token in step.tokens]
        origins = [origin for step in steps for origin in step.origins]
        reason = steps[-1].finish_reason
        assert reason is not None
        said = ""
        text = self.texts[index]
        if text is not None:
            text.push(tokens, origins, finished=True)
            said = text.text
        calls: list[ToolCall] = []
        if self.readers:
            reader = self.readers[index]
            reader.push(said, finished=True)
            said = reader.text
            calls = reader.calls
        return Completion(said, tokens, origins, reason, summarise(steps, seconds), steps, calls)

    def stream(self, session: Session) -> Iterator[Chunk]:
        """Queue the requests, and return an iterator over their chunks, one for each step.

        Dropping the iterator aborts them.
        """
        return self._chunks(session.add(self.requests))

    def _chunks(self, run: Run) -> Iterator[Chunk]:
        try:
            for batch in run:
                for index, step in batch:
                    yield self._chunk(index, step)
        finally:
            run.close()

    def _chunk(self, index: int, step: Step) -> Chunk:
        """Return the chunk of a request's step."""
        is_last = step.finish_reason is not None
        text = self.texts[index]
        pieces: list[tuple[str, str]] = []
        if text is not None:
            pieces = text.push(step.tokens, step.origins, is_last)
        said = "".join(piece for piece, _ in pieces)
        calls: list[ToolCall] = []
        if self.readers:
            reader = self.readers[index]
            reader.push(said, is_last)
            calls = reader.calls if is_last else []
        return Chunk(index, said, pieces, step, step.finish_reason, calls)
