"""A conversation in the terminal: the lines that the user types, commands, and streamed answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.cli import is_interrupt
from forerun.cli.common import say
from forerun.cli.writing import Answer, Reading
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder

TALK_COMMANDS = "/help, /system, /temperature, /max, /clear, /undo, /quit"
HELP = """\
/help          show this list
/system TEXT   set the system prompt; "none" means the chat template's own; without TEXT show it
/temperature N set the temperature to the number N; without N show it
/max N         set the most tokens of an answer; without N show it
/clear         forget the conversation
/undo          take back the last question and its answer
/quit          leave, as Ctrl-D does
End a line with a backslash to continue it in the next. Put a space before a "/" to send it as text.
Ctrl-C ends the answer that is being written, or takes back what you are typing."""


class Talk:
    """One conversation.

    Attributes:
        decoder: answers the questions.
        params: how answers are sampled.
        system: the system prompt; None for the chat template's own.
        messages: the conversation so far, a question and its answer in turns.
        asked: the number of answers asked for, from which each one gets another seed.
        console: where answers go, stdout.
        aside: where everything else goes, stderr.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, system: str | None = None) -> None:
        self.decoder = decoder
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.asked = 0
        self.console = Console(highlight=False, soft_wrap=True)
        self.aside = Console(stderr=True, highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda argument: self.say(HELP),
            "/system": self._set_system,
            "/temperature": self._set_temperature,
            "/max": self._set_max_new_tokens,
            "/clear": lambda argument: self._keep(0),
            "/undo": lambda argument: self._keep(len(self.messages) - 2),
        }

    def run(self) -> None:
        """Talk until the user leaves. An error of a turn is one line."""
        with suppress(ImportError):
            import_module("readline")  # makes arrow keys work
        self.say(f"method {self._method()}; /help lists commands, Ctrl-D leaves")
        while True:
            text = ask()
            if text is None or text.rstrip() == "/quit":
                return
            error = self._attempt(text)
            if error is None:
                continue
            if is_interrupt(error):
                self.say("interrupted")
            else:
                self.say(f"forerun: {' '.join(str(error).split())}")

    def _attempt(self, text: str) -> BaseException | None:
        """Take a message or a command, and return the error or interrupt that ended it.

        It is returned because the next interrupt would be ignored while this one is handled.
        """
        try:
            self.take(text)
        except (Exception, KeyboardInterrupt) as error:
            return error
        return None

    def take(self, text: str) -> None:
        """Take a message or a command. Raises ValueError, and the conversation stays as it was."""
        message = text.strip()
        if not message:
            return
        if not text.startswith("/"):
            self.answer([*self.messages, {"role": "user", "content": message}])
            return
        name, _, argument = message.partition(" ")
        if name not in self._commands:
            raise ValueError(f"unknown command {name}; there are {TALK_COMMANDS}")
        self._commands[name](argument.strip())

    def _set_system(self, text: str) -> None:
        """Set the system prompt, and show it."""
        system = self.system
        if text:
            system = None if text == "none" else text
        # The template may refuse it.
        chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": "Hello"}], system)
        self.system = system
        self.say("system prompt: " + (system or "the chat template's own"))

    def _set_temperature(self, text: str) -> None:
        """Set the temperature, and show it."""
        if text:
            self.params = replace(self.params, temperature=_number("/temperature", text, float))
        self.say(f"temperature: {self.params.temperature}")

    def _set_max_new_tokens(self, text: str) -> None:
        """Set the most tokens of an answer, and show it."""
        if text:
            self.params = replace(self.params, max_new_tokens=_number("/max", text, int))
        self.say(f"max_new_tokens: {self.params.max_new_tokens}")

    def _keep(self, count: int) -> None:
        """Keep this many messages, a negative number being 0, and say how many questions remain."""
        self.messages = self.messages[: max(0, count)]
        self.say(f"{len(self.messages) // 2} questions are left")

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of these messages; the conversation is then these and the answer."""
        context = self.decoder.target.context
        used = len(chat_prompt(self.decoder.tokenizer, messages, self.system))
        if context is not None and used >= context:
            raise ValueError(
                f"the conversation has {used} tokens and fills the context of {context}: "
                "/undo takes back a turn, /clear all"
            )
        answer = self._stream(messages)
        if not answer.text and answer.finish_reason is None:
            self.say("interrupted before the first word; the conversation is as it was")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        used += sum(len(step.tokens) for step in answer.steps)
        self.say(self._figures(answer, used, context))

    def _stream(self, messages: list[dict[str, str]]) -> Answer:
        """Write an answer to the console, and return it. An interrupt cuts it off."""
        params = self.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + self.asked)
        self.asked += 1
        answer = Answer()
        reading = Reading()
        chunks = self.decoder.stream_chat(messages, params, system=self.system, progress=reading)
        try:
            answer.write(chunks, self.console, reading)
        except (Exception, KeyboardInterrupt) as error:
            if not is_interrupt(error):
                raise
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        return answer

    def _figures(self, answer: Answer, used: int, context: int | None) -> str:
        """Return the line below an answer; `used` are the tokens of the whole conversation."""
        line = f"{answer.figures(self._method())}, context {used}"
        if context is not None:
            line += f" of {context}"
        if answer.finish_reason is None:
            line += ", cut by Ctrl-C"
        elif answer.finish_reason == "length":
            if context is not None and used >= context:
                line += ", cut: the context is full"
            else:
                line += f", cut at {self.params.max_new_tokens} tokens"
        return line

    def _method(self) -> str:
        """Return the name of the method that decodes with the current parameters."""
        return str(self.decoder.method_for(greedy=not self.params.temperature).name)

    def say(self, line: str) -> None:
        """Print a line that is not part of the conversation, on stderr."""
        sys.stdout.flush()
        self.aside.print(Text(line, style="dim"))


def _number(command: str, text: str, kind: Callable[[str], Any]) -> Any:
    """Return the argument of a command as a number."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{command} takes a number, not {text!r}") from None


def ask() -> str | None:
    """Return what the user types; a line that ends in a backslash continues in the next.

    None if the user leaves by Ctrl-D, and "" if Ctrl-C takes back what was typed.
    """
    parts: list[str] = []
    with suppress(KeyboardInterrupt):
        while True:
            try:
                part = _typed_line("... " if parts else "> ")
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


def _typed_line(prompt: str) -> str:
    """Return a line that the user types.

    The prompt goes to stderr if stdout is a pipe or a file, because only answers belong there.
    """
    with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
        return input(prompt)
