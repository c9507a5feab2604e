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
        text: the output alone, cut before a stop string and without tool calls; empty without a tokenizer.
        tokens: output token ids, the end token included.
        origins: where each token came from: draft, lookup, correction or bonus.
        finish_reason: "stop" (end token, stop string or criterion) or "length".
        stats: tau, alpha, tokens/s and their counts. Its seconds are those of the whole call.
        steps: the record of every target forward.
        tool_calls: the calls of an answer to a chat with tools.
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
        index: which prompt it belongs to.
        text: new text; empty while a stop string may be in the making.
        pieces: the same text as (text, origin of its token).
        step: the target forward that gave it, with the tokens committed.
        finish_reason: set on the last chunk of a prompt.
        tool_calls: those of the whole answer, on its last chunk. The text has them as well.
    """

    index: int
    text: str
    pieces: list[tuple[str, str]]
    step: Step
    finish_reason: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """The requests of one call, and what turns their tokens into text, and that into tool calls if there are tools."""

    requests: list[Request]
    texts: list[TextStream | None]
    is_single: bool
    begun: float
    readers: list[ToolStream] = field(default_factory=list)

    def complete(self, session: Session) -> Any:
        """Return a completion, or a list of them for several requests, when all have ended."""
        steps, found = session.add(self.requests).collect(), []
        seconds = perf_counter() - self.begun
        for at, (text, taken) in enumerate(zip(self.texts, steps, strict=True)):
            tokens = [token for step in taken for token in step.tokens]
            origins = [origin for step in taken for origin in step.origins]
            if text is not None:
                text.push(tokens, origins, finished=True)
            reason = taken[-1].finish_reason
            assert reason is not None
            said = text.text if text is not None else ""
            calls: list[ToolCall] = []
            if self.readers:
                self.readers[at].push(said, finished=True)
                said, calls = self.readers[at].text, self.readers[at].calls
            found.append(
                Completion(said, tokens, origins, reason, summarise(taken, seconds), taken, calls)
            )
        return found[0] if self.is_single else found

    def stream(self, session: Session) -> Iterator[Chunk]:
        """Queue the requests, and return an iterator over a chunk for each step. Letting go of it aborts them."""
        return self._chunks(session.add(self.requests))

    def _chunks(self, run: Run) -> Iterator[Chunk]:
        try:
            for batch in run:
                for index, step in batch:
                    text, reason = self.texts[index], step.finish_reason
                    pieces = (
                        text.push(step.tokens, step.origins, reason is not None)
                        if text is not None
                        else []
                    )
                    said, calls = "".join(piece for piece, _ in pieces), []
                    if self.readers:
                        self.readers[index].push(said, reason is not None)
                        calls = self.readers[index].calls if reason is not None else []
                    yield Chunk(index, said, pieces, step, reason, calls)
        finally:
            run.close()
