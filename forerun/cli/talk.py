"""A conversation in the terminal: lines that are typed, commands, and answers that stream."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.cli import is_interrupt
from forerun.cli.common import say
from forerun.cli.writing import Answer, Reading
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt

COMMANDS = "/help, /system, /temperature, /max, /clear, /undo, /quit"
HELP = """\
/help          this list
/system TEXT   set the system prompt; "none": the chat template's own; without TEXT it is shown
/temperature   show the temperature, or set it to a number; so /max the most tokens of an answer
/clear         forget the conversation
/undo          take back the last question and its answer
/quit          leave, as Ctrl-D does
A backslash at the end of a line goes on in the next. A space in front of a "/" makes it a message.
Ctrl-C ends the answer that is being written, or takes back what is typed."""


class Talk:
    """One conversation."""

    def __init__(self, decoder: Any, params: SamplingParams, system: str | None = None) -> None:
        self.decoder, self.params, self.system = decoder, params, system
        self.messages: list[dict[str, str]] = []
        self.asked = 0  # answers asked for, so that each has a seed of its own
        self.console = Console(highlight=False, soft_wrap=True)
        self.aside = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Talk until the user leaves. Errors of a turn are a line each."""
        with suppress(ImportError):
            import readline  # noqa: F401  for arrow keys
        self.say(f"method {self._method()}; /help lists commands, Ctrl-D leaves")
        while (text := ask()) is not None and text.rstrip() != "/quit":
            trouble: BaseException | None = None
            try:
                self.take(text)
            except (Exception, KeyboardInterrupt) as error:
                trouble = error
            # After the handler: while an interrupt is handled, the next one is ignored.
            if trouble is not None:
                self.say(
                    "interrupted"
                    if is_interrupt(trouble)
                    else f"forerun: {' '.join(str(trouble).split())}"
                )

    def take(self, text: str) -> None:
        """Take a message or a command. Raises ValueError, and the conversation is then as it was."""
        name, _, rest = text.strip().partition(" ")
        if text.strip() and not text.startswith("/"):
            self.answer([*self.messages, {"role": "user", "content": text.strip()}])
        elif name == "/help":
            self.say(HELP)
        elif name == "/system":
            system = {"": self.system, "none": None}.get(rest.strip(), rest.strip())
            chat_prompt(
                self.decoder.tokenizer, [{"role": "user", "content": "Hello"}], system
            )  # may refuse it
            self.system = system
            self.say("system prompt: " + (system or "the chat template's own"))
        elif name in ("/temperature", "/max"):
            field, kind = (
                ("temperature", float) if name == "/temperature" else ("max_new_tokens", int)
            )
            try:
                changed: dict[str, Any] = {field: kind(rest)} if rest else {}
            except ValueError:
                raise ValueError(f"{name} takes a number, not {rest!r}") from None
            self.params = replace(self.params, **changed)
            self.say(f"{field}: {vars(self.params)[field]}")
        elif name in ("/clear", "/undo"):
            self.messages = [] if name == "/clear" else self.messages[:-2]
            self.say(f"{len(self.messages) // 2} questions are left")
        elif name:
            raise ValueError(f"unknown command {name}; there are {COMMANDS}")

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of these messages; the conversation is then these and the answer."""
        context = self.decoder.target.context
        used = len(chat_prompt(self.decoder.tokenizer, messages, self.system))
        if context is not None and used >= context:
            raise ValueError(
                f"the conversation has {used} tokens and fills the context of {context}: "
                "/undo takes back a turn, /clear all"
            )
        params = self.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + self.asked)
        self.asked += 1
        answer, reading = Answer(), Reading()
        chunks = self.decoder.stream_chat(messages, params, system=self.system, progress=reading)
        try:
            answer.write(chunks, self.console, reading)
        except (Exception, KeyboardInterrupt) as error:
            if not is_interrupt(error):
                raise
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        if not answer.text and answer.finish_reason is None:
            self.say("interrupted before the first word; the conversation is as it was")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        used += sum(len(step.tokens) for step in answer.steps)
        line = f"{answer.figures(self._method())}, context {used}" + (
            "" if context is None else f" of {context}"
        )
        if answer.finish_reason is None:
            line += ", cut by Ctrl-C"
        elif answer.finish_reason == "length":
            is_full = context is not None and used >= context
            line += (
                ", cut: the context is full"
                if is_full
                else f", cut at {params.max_new_tokens} tokens"
            )
        self.say(line)

    def _method(self) -> str:
        return str(self.decoder.method_for(greedy=not self.params.temperature).name)

    def say(self, line: str) -> None:
        """Print a line beside the conversation: on stderr."""
        sys.stdout.flush()
        self.aside.print(Text(line, style="dim"))


def ask() -> str | None:
    """Return what the user types; lines that end in a backslash go on in the next.

    None if he leaves by Ctrl-D; "" if Ctrl-C takes back what was typed.
    """
    parts: list[str] = []
    with suppress(KeyboardInterrupt):
        while True:
            try:
                # Only answers go into a pipe or a file.
                with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
                    part = input("... " if parts else "> ")
            except EOFError:
                print(file=sys.stderr)
                return "\n".join(parts) if parts else None
            except UnicodeDecodeError:
                say("that is not UTF-8 text")
                return ""
            parts.append(part.removesuffix("\\"))
            if not part.endswith("\\"):
                return "\n".join(parts)
    print(file=sys.stderr)
    return ""
