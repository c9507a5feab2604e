"""Whom a conversation is with: a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forerun.chat import chat_prompt
from forerun.cli.common import parse_method
from forerun.cli.form import check_extra, check_form
from forerun.cli.writing import Answer, Figures, Reading
from forerun.params import SamplingParams


class Local:
    """A decoder. `make` gives another one for a method that the one at hand cannot run."""

    def __init__(self, decoder: Any, make: Callable[[Any], Any]) -> None:
        self.decoder, self.make = decoder, make
        self._prompt = 0  # tokens of the last one

    @property
    def context(self) -> int | None:
        """The most tokens of a conversation."""
        found = self.decoder.target.context
        return None if found is None else int(found)

    def method(self, params: SamplingParams) -> str:
        return str(self.decoder.method_for(greedy=not params.temperature).name)

    def name(self, params: SamplingParams) -> str:
        return f"method {self.method(params)}"

    def ask(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, system: str | None, reading: Reading
    ) -> Iterator[Any]:
        """An answer's chunks. Raises ValueError where the conversation leaves no room for one."""
        self._prompt = len(chat_prompt(self.decoder.tokenizer, messages, system))
        if self.context is not None and self._prompt >= self.context:
            raise ValueError(
                f"the conversation has {self._prompt} tokens and fills the context of {self.context}: "
                "/undo takes back a turn, /clear all"
            )
        self.decoder.progress = reading
        chunks: Iterator[Any] = self.decoder.stream_chat(messages, params, system=system)
        return chunks

    def figures(self, answer: Answer) -> Figures:
        """Of the last answer."""
        tokens = sum(len(step.tokens) for step in answer.steps)
        return Figures(tokens, len(answer.steps), answer.seconds, self._prompt + tokens)

    def check_system(self, text: str | None) -> None:
        """Raises ValueError for a system prompt that the template refuses."""
        chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": "Hello"}], text)

    def check_form(self, form: dict[str, Any] | None) -> None:
        """Raises ValueError for a form of the output that cannot be kept."""
        check_extra(form)
        check_form(form, self.decoder.tokenizer)

    def switch(self, name: str) -> None:
        """Another method on the models at hand; where they lack something, they are loaded anew."""
        method, decoder = parse_method(name), self.decoder
        if method.needs_draft and decoder.draft is None:
            self.decoder = self.make(method)  # or it says what is missing
            return
        decoder.check_draft(method)
        try:
            layer = decoder.layer_for(method, decoder.pre_verifier)
            head = decoder.head_for(method, decoder.head)
        except ValueError:
            self.decoder = self.make(method)
            return
        decoder.method, decoder.sampling_method = method, None
        decoder.pre_verifier, decoder.head = layer or decoder.pre_verifier, head or decoder.head
