"""A conversation in the terminal: what is typed, commands, and answers that stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.chat import chat_prompt, checked, with_system
from forerun.cli import is_interrupt
from forerun.cli.asking import ask, history
from forerun.cli.common import parse_method
from forerun.cli.writing import Answer, Reading
from forerun.files import read_text, write_text
from forerun.metrics import Stats, summarise, total
from forerun.params import SamplingParams

HELP = """\
/help          this list
/system TEXT   set the system prompt; without TEXT the chat template's own
/clear         forget the conversation
/undo          take back the last question and its answer
/retry         ask the last question again
/method NAME   decode by another method, with its default settings
/stats         what the answers so far add up to
/save FILE     write the conversation as JSON
/load FILE     go on with a conversation that was saved
/quit          leave, as Ctrl-D does
A backslash at the end of a line goes on in the next. A space in front of a "/" makes it a message.
Ctrl-C ends the answer that is being written."""


class Talk:
    """One conversation. `make` gives a decoder for a method that the one at hand cannot run."""

    def __init__(self, decoder: Any, params: SamplingParams, system: str | None, make: Callable[[Any], Any]) -> None:
        from rich.console import Console

        self.decoder, self.params, self.system, self.make = decoder, params, system, make
        self.messages: list[dict[str, str]] = []
        self.stats: list[Stats] = []
        self.asked = 0  # answers asked for, so that each has a seed of its own
        self.console = Console(highlight=False, soft_wrap=True)
        self.aside = Console(stderr=True, highlight=False, soft_wrap=True)
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/clear": self._clear,
            "/undo": self._undo,
            "/retry": self._retry,
            "/method": self._method,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Until the user leaves. Errors of a turn are a line each."""
        self.say(f"method {self.method}; /help lists commands, Ctrl-D leaves")
        with history() as lines:
            while (text := ask(lines)) is not None:
                if text.split()[:1] == ["/quit"] and text.startswith("/"):
                    return
                trouble: BaseException | None = None
                try:
                    self.take(text)
                except (Exception, KeyboardInterrupt) as error:
                    trouble = error
                # Behind the handler: while an interrupt is handled, the next one is ignored.
                if trouble is not None:
                    self.say("interrupted" if is_interrupt(trouble) else f"forerun: {' '.join(str(trouble).split())}")

    def take(self, text: str) -> None:
        """A message or a command. Raises ValueError, and the conversation is then as it was."""
        if not text.strip():
            return
        if not text.startswith("/"):
            self.answer([*self.messages, {"role": "user", "content": text.strip()}])
            return
        name, _, rest = text.strip().partition(" ")
        if name not in self.commands:
            raise ValueError(f"unknown command {name}; there are {', '.join(self.commands)}, /quit")
        self.commands[name](rest.strip())

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Answers the last of these messages; the conversation is then these and the answer."""
        used, context = len(chat_prompt(self.decoder.tokenizer, messages, self.system)), self.decoder.target.context
        if context is not None and used >= context:
            raise ValueError(
                f"the conversation has {used} tokens and fills the context of {context}: /undo takes back a turn, "
                "/clear all"
            )
        params = self.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + self.asked)
        self.asked += 1
        reading = self.decoder.progress = Reading()
        answer, cut = Answer(), False
        try:
            answer.write(self.decoder.stream_chat(messages, params, system=self.system), self.console, reading)
        except (Exception, KeyboardInterrupt) as error:
            if not is_interrupt(error):
                raise
            cut = True
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        if cut and not answer.text:
            self.say("interrupted before the first word; the message is taken back")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        stats = summarise(answer.steps, answer.seconds)
        self.stats.append(stats)
        self.say(self._line(stats, answer, cut, used))

    def _line(self, stats: Stats, answer: Answer, cut: bool, used: int) -> str:
        context = self.decoder.target.context
        used += stats.tokens
        ends = ["cut by Ctrl-C"] if cut else []
        if answer.finish_reason == "length":
            full = context is not None and used >= context
            ends = ["cut: the context is full" if full else f"cut at {self.params.max_new_tokens} tokens"]
        parts = [
            f"{stats.tokens} tokens",
            f"tau {stats.tau:.2f}",
            f"{stats.tokens_per_s:.1f} tokens/s",
            f"first after {answer.first:.2f} s",
            self.method,
            f"context {used}" + (f" of {context}" if context is not None else ""),
        ]
        return ", ".join(parts + ends)

    @property
    def method(self) -> str:
        return str(self.decoder.method_for(greedy=not self.params.temperature).name)

    def say(self, line: str) -> None:
        """Beside the conversation: on stderr."""
        from rich.text import Text

        sys.stdout.flush()
        self.aside.print(Text(line, style="dim"))

    # Commands.

    def _help(self, _: str) -> None:
        self.say(HELP)

    def _system(self, text: str) -> None:
        chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": "Hello"}], text or None)
        self.system = text or None
        self.say("system prompt set" if text else "the system prompt is the chat template's own")

    def _clear(self, _: str) -> None:
        self.messages = []
        self.say("the conversation is empty")

    def _undo(self, _: str) -> None:
        self.messages = self.messages[: self._last()]
        self.say(f"{sum(each['role'] == 'user' for each in self.messages)} questions are left")

    def _retry(self, _: str) -> None:
        self.answer(self.messages[: self._last() + 1])

    def _last(self) -> int:
        """Where the last question is."""
        found = [i for i, each in enumerate(self.messages) if each["role"] == "user"]
        if not found:
            raise ValueError("there is no question yet")
        return found[-1]

    def _method(self, name: str) -> None:
        if name:
            self._switch(parse_method(name))
        self.say(f"method {self.method}")

    def _switch(self, method: Any) -> None:
        """Another method on the models at hand; where they lack something, they are loaded anew."""
        decoder = self.decoder
        try:
            if method.needs_draft and decoder.draft is None:
                raise ValueError("no draft")
            layer = decoder.layer_for(method, decoder.pre_verifier)
            head = decoder.head_for(method, decoder.head)
        except ValueError:
            self.decoder = self.make(method)  # or it says what is missing
            return
        decoder.method, decoder.sampling_method = method, None
        decoder.pre_verifier, decoder.head = layer or decoder.pre_verifier, head or decoder.head

    def _stats(self, _: str) -> None:
        found = total(self.stats)
        self.say(
            f"{len(self.stats)} answers, {found.tokens} tokens, tau {found.tau:.2f}, {found.tokens_per_s:.1f} tokens/s"
        )

    def _save(self, name: str) -> None:
        path = _path(name)
        if not self.messages:
            raise ValueError("there is nothing to save yet")
        if path.exists():
            _read(path)  # only a conversation is written over
        text = json.dumps({"messages": with_system(self.messages, self.system)}, ensure_ascii=False)
        try:
            write_text(path, text + "\n")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        self.say(f"{len(self.messages)} messages are in {path}")

    def _load(self, name: str) -> None:
        path = _path(name)
        messages = _read(path)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        self.messages, self.system = messages, system
        self.say(f"{len(messages)} messages from {path}")


def _path(name: str) -> Path:
    if not name:
        raise ValueError("which file?")
    return Path(name).expanduser()


def _read(path: Path) -> list[dict[str, str]]:
    """The messages of a file. Raises ValueError where it holds no conversation."""
    try:
        found = json.loads(read_text(path))
        return checked(found.get("messages") if isinstance(found, dict) else found)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} holds no conversation: it is not JSON") from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path} holds no conversation: {error}") from None
