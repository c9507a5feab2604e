"""A conversation in the terminal: what is typed, commands, and answers that stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.chat import checked, with_system
from forerun.cli import is_interrupt
from forerun.cli.asking import ask, history
from forerun.cli.form import KINDS, form_of_kind
from forerun.cli.wire import BrokenError
from forerun.cli.writing import Answer, Figures, Reading, total
from forerun.files import read_text, write_text
from forerun.params import SamplingParams

if TYPE_CHECKING:
    from forerun.cli.local import Local
    from forerun.cli.remote import Remote

HELP = """\
/help          this list
/system TEXT   set the system prompt; without TEXT the chat template's own
/clear         forget the conversation
/undo          take back the last question and its answer
/retry         ask the last question again
/method NAME   decode by another method, with its default settings; at a server "ar" or "server"
/form KIND ... answers follow a form: json-schema FILE|JSON, regex R or grammar FILE; without KIND any
/stats         what the answers so far add up to
/save FILE     write the conversation as JSON
/load FILE     go on with a conversation that was saved
/quit          leave, as Ctrl-D does
A backslash at the end of a line goes on in the next. A space in front of a "/" makes it a message.
Ctrl-C ends the answer that is being written."""


class Talk:
    """One conversation, with a model here or at a server."""

    def __init__(self, partner: Local | Remote, params: SamplingParams, system: str | None) -> None:
        from rich.console import Console

        self.partner, self.params, self.system = partner, params, system
        self.messages: list[dict[str, str]] = []
        self.figures: list[Figures] = []
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
            "/form": self._form,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Until the user leaves. Errors of a turn are a line each."""
        self.say(f"{self.partner.name(self.params)}; /help lists commands, Ctrl-D leaves")
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
        params, reading = self.params, Reading()
        if params.seed is not None:
            params = replace(params, seed=params.seed + self.asked)
        chunks = self.partner.ask(messages, params, self.system, reading)
        self.asked += 1
        answer, cut, trouble = Answer(), False, ""
        try:
            answer.write(chunks, self.console, reading)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, BrokenError) and answer.text:
                trouble = str(error)
            elif not is_interrupt(error):
                raise
            cut = True
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        if cut and not answer.text:
            self.say("interrupted before the first word; the conversation is as it was")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        figures = self.partner.figures(answer)
        self.figures.append(figures)
        self.say(self._line(figures, answer, "" if not cut else "broken off" if trouble else "cut by Ctrl-C"))
        if trouble:
            self.say(f"forerun: {trouble}; what came is kept, /retry asks again")

    def _line(self, figures: Figures, answer: Answer, end: str) -> str:
        context = self.partner.context
        parts = [*figures.parts(), f"first after {answer.first:.2f} s", self.partner.method(self.params)]
        if figures.context is not None:
            parts.append(f"context {figures.context}" + (f" of {context}" if context is not None else ""))
        if answer.finish_reason == "length":
            is_full = None not in (context, figures.context) and figures.context >= context  # type: ignore[operator]
            end = "cut: the context is full" if is_full else f"cut at {self.params.max_new_tokens} tokens"
        return ", ".join([*parts, end] if end else parts)

    def say(self, line: str) -> None:
        """Beside the conversation: on stderr."""
        from rich.text import Text

        sys.stdout.flush()
        self.aside.print(Text(line, style="dim"))

    # Commands.

    def _help(self, _: str) -> None:
        self.say(HELP)

    def _system(self, text: str) -> None:
        self.partner.check_system(text or None)
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
            self.partner.switch(name)
        self.say(self.partner.name(self.params))

    def _form(self, text: str) -> None:
        kind, _, rest = text.partition(" ")
        if kind and kind not in KINDS:
            raise ValueError(f"/form takes one of {', '.join(KINDS)}, not {kind!r}")
        form = form_of_kind(kind, rest.strip()) if kind else None
        self.partner.check_form(form)
        self.params = replace(self.params, response_format=form)
        self.say("answers follow this form" if form is not None else "answers have any form")

    def _stats(self, _: str) -> None:
        self.say(", ".join([f"{len(self.figures)} answers", *total(self.figures).parts()]))

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
