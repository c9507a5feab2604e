"""A conversation in the terminal: the lines that the user types, commands, and streamed answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.cli import conversation, is_interrupt, line_editor
from forerun.cli.markdown_stream import MarkdownStream
from forerun.cli.writing import Answer, Reading
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder

TALK_COMMANDS = (
    "/help, /system, /temperature, /max, /view, /load, /save, /retry, /undo, /clear, /quit"
)
HELP = """\
/help          show this list
/system TEXT   set the system prompt; "none" means the chat template's own; without TEXT show it
/temperature N set the temperature to the number N; without N show it
/max N         set the most tokens of an answer; without N show it
/view NAME     show answers as "text" (Markdown) or as "tokens", coloured by where they came from
/load FILE     let a text file go along with the next message, or continue a saved conversation
/save FILE     write the conversation: to FILE.json, which /load reads, or else as Markdown
/retry         answer the last question again
/undo          take back the last question and its answer
/clear         forget the conversation
/quit          leave, as Ctrl-D does
Alt-Enter, or a backslash at the end of a line, continues in the next. The up arrow brings back what
you typed, also in earlier sessions. Put a space before a "/" to send it as text.
Ctrl-C ends the answer that is being written, or takes back what you are typing."""


class Talk:
    """One conversation.

    Attributes:
        decoder: answers the questions.
        params: how answers are sampled.
        system: the system prompt; None for the chat template's own.
        messages: the conversation so far, a question and its answer in turns.
        left: the number of messages that have left the context; they stay in `messages`.
        files: names and texts of files that go along with the next message.
        shows_tokens: whether answers are shown as coloured tokens instead of Markdown.
        asked: the number of answers asked for, from which each one gets another seed.
        console: where answers go, stdout.
        aside: where everything else goes, stderr.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, system: str | None = None) -> None:
        self.decoder = decoder
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.left = 0
        self.files: dict[str, str] = {}
        self.shows_tokens = False
        self.asked = 0
        self.console = Console(highlight=False, soft_wrap=True)
        self.aside = Console(stderr=True, highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda argument: self.say(HELP),
            "/system": self._set_system,
            "/temperature": self._set_temperature,
            "/max": self._set_max_new_tokens,
            "/view": self._set_view,
            "/load": self._load,
            "/save": self._save,
            "/retry": lambda argument: self._retry(),
            "/clear": lambda argument: self._keep(0),
            "/undo": lambda argument: self._keep(len(self.messages) - 2),
        }

    def run(self) -> None:
        """Talk until the user leaves. An error of a turn is one line."""
        ask = self._editor()
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

    def _editor(self) -> Callable[[], str | None]:
        """Return what asks the user for a message."""
        if line_editor.is_full_terminal():
            editor = line_editor.make_editor(TALK_COMMANDS.split(", "))
            return partial(line_editor.typed_by, editor)
        with suppress(ImportError):
            import_module("readline")  # makes arrow keys work
        return line_editor.ask

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
            blocks = [conversation.as_block(name, text) for name, text in self.files.items()]
            question = {"role": "user", "content": "\n\n".join([*blocks, message])}
            if self.answer([*self.messages, question]):
                self.files = {}
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

    def _set_view(self, text: str) -> None:
        """Set how answers are shown, and show it."""
        if text not in ("", "text", "tokens"):
            raise ValueError(f"/view takes text or tokens, not {text!r}")
        if text:
            self.shows_tokens = text == "tokens"
        self.say("answers are shown as " + ("tokens" if self.shows_tokens else "text"))

    def _load(self, text: str) -> None:
        """Continue a saved conversation, or let a file's text go along with the next message."""
        path = _path("/load", text)
        loaded = conversation.load(path)
        if isinstance(loaded, str):
            self.files[path.name] = loaded
            count = len(self.decoder.tokenizer(loaded)["input_ids"])  # type: ignore[misc]
            self.say(f"{path.name}, {count} tokens, goes along with your next message")
            return
        # The template may refuse it.
        question = {"role": "user", "content": "Hello"}
        chat_prompt(self.decoder.tokenizer, [*loaded.messages, question], loaded.system)
        self.messages = loaded.messages
        self.system = loaded.system
        self.left = 0
        self.say(f"loaded {_turns(self.messages)}")

    def _save(self, text: str) -> None:
        """Write the conversation to a file."""
        path = _path("/save", text)
        try:
            conversation.save(conversation.Conversation(self.messages, self.system), path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        self.say(f"wrote {_turns(self.messages)} to {path}")

    def _retry(self) -> None:
        """Answer the last question again. The answer before stays if this one fails."""
        if not self.messages:
            raise ValueError("/retry needs a question")
        if not self.params.temperature:
            self.say("temperature 0 gives the same answer again; /temperature changes that")
        self.answer(self.messages[:-1])

    def _keep(self, count: int) -> None:
        """Keep this many messages, a negative number being 0, and say how many questions remain."""
        self.messages = self.messages[: max(0, count)]
        self.left = 0
        self.say(f"{len(self.messages) // 2} questions are left")

    def answer(self, messages: list[dict[str, str]]) -> bool:
        """Answer the last of these messages; the conversation is then these and the answer.

        Returns False if it was interrupted before the first word.
        """
        context = self.decoder.target.context
        left = self._leaving(messages, context)
        sent = messages[left:]
        used = self._count(sent)
        if context is not None and used >= context:
            raise ValueError(
                f"the message has {used} tokens and fills the context of {context}: send less"
            )
        if left > self.left:
            self.say(
                f"the context of {context} tokens is full: the model no longer sees "
                f"{_turns(messages[:left])} at the beginning of the conversation"
            )
        self.left = left
        answer = self._stream(sent)
        if not answer.text and answer.finish_reason is None:
            self.say("interrupted before the first word; the conversation is as it was")
            return False
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        used += sum(len(step.tokens) for step in answer.steps)
        self.say(self._figures(answer, used, context))
        return True

    def _count(self, messages: list[dict[str, str]]) -> int:
        """Return the number of tokens of messages behind the system prompt."""
        return len(chat_prompt(self.decoder.tokenizer, messages, self.system))

    def _leaving(self, messages: list[dict[str, str]], context: int | None) -> int:
        """Return how many messages must have left the context for an answer to the last one."""
        left = min(self.left, len(messages) - 1)
        if context is None:
            return left
        room = self.params.max_new_tokens
        return left + conversation.first_that_fits(messages[left:], self._count, context, room)

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
            self._write(answer, chunks, reading)
        except (Exception, KeyboardInterrupt) as error:
            if not is_interrupt(error):
                raise
        return answer

    def _write(self, answer: Answer, chunks: Any, reading: Reading) -> None:
        """Write an answer as Markdown if the terminal can, else its tokens or plain text."""
        if self.shows_tokens or not self.console.is_terminal or self.console.is_dumb_terminal:
            try:
                answer.write(chunks, self.console, reading)
            finally:
                if answer.text and not answer.text.endswith("\n"):
                    print(flush=True)
            return
        with MarkdownStream(self.console) as stream:
            answer.write(chunks, self.console, reading, lambda chunk: stream.push(chunk.text))

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


def _path(command: str, text: str) -> Path:
    """Return the argument of a command as a path."""
    if not text:
        raise ValueError(f"{command} takes a file's name")
    return Path(text).expanduser()


def _turns(messages: list[dict[str, str]]) -> str:
    """Return how many questions and answers these messages are, in words."""
    count = len(messages) // 2
    return "1 question and its answer" if count == 1 else f"{count} questions and their answers"
