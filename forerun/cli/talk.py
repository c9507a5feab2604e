"""A conversation in the terminal: lines that are typed, commands, and answers that stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.cli import is_interrupt
from forerun.cli.common import parse_method, say
from forerun.cli.form import KINDS, check_extra, check_form, form_of_kind
from forerun.cli.writing import Answer, Reading
from forerun.engine.stats import Stats, summarise, total
from forerun.files import home, read_text, write_text
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, checked, with_system

HISTORY = 1000  # inputs that are remembered
HELP = """\
/help          this list
/system TEXT   set the system prompt; without TEXT the chat template's own
/clear         forget the conversation
/undo          take back the last question and its answer
/retry         ask the last question again
/method NAME   decode by another method, with its default settings
/form KIND ... answers follow a form: json-schema FILE|JSON, regex R or grammar FILE; without KIND any
/stats         what the answers so far add up to
/save FILE     write the conversation as JSON
/load FILE     go on with a conversation that was saved
/quit          leave, as Ctrl-D does
A backslash at the end of a line goes on in the next. A space in front of a "/" makes it a message.
Ctrl-C ends the answer that is being written."""


class Talk:
    """One conversation. `make` loads another decoder for a method that the present one cannot run."""

    def __init__(
        self, decoder: Any, make: Callable[[Any], Any], params: SamplingParams, system: str | None = None
    ) -> None:
        self.decoder, self.make, self.params, self.system = decoder, make, params, system
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
            "/form": self._form,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }

    @property
    def method(self) -> str:
        return str(self.decoder.method_for(greedy=not self.params.temperature).name)

    def run(self) -> None:
        """Talk until the user leaves. Errors of a turn are a line each."""
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
                # After the handler: while an interrupt is handled, the next one is ignored.
                if trouble is not None:
                    self.say("interrupted" if is_interrupt(trouble) else f"forerun: {' '.join(str(trouble).split())}")

    def take(self, text: str) -> None:
        """Take a message or a command. Raises ValueError, and the conversation is then as it was."""
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
        answer, reading, cut = Answer(), Reading(), False
        chunks = self.decoder.stream_chat(messages, params, system=self.system, progress=reading)
        self.asked += 1
        try:
            answer.write(chunks, self.console, reading)
        except (Exception, KeyboardInterrupt) as error:
            if not is_interrupt(error):
                raise
            cut = True
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        if cut and not answer.text:
            self.say("interrupted before the first word; the conversation is as it was")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        stats = summarise(answer.steps, answer.seconds)
        self.stats.append(stats)
        used += stats.tokens
        shown = f"context {used}" if context is None else f"context {used} of {context}"
        parts = [_line(stats), f"first after {answer.first:.2f} s", self.method, shown]
        if cut:
            parts.append("cut by Ctrl-C")
        elif answer.finish_reason == "length":
            is_full = context is not None and used >= context
            parts.append("cut: the context is full" if is_full else f"cut at {params.max_new_tokens} tokens")
        self.say(", ".join(parts))

    def say(self, line: str) -> None:
        """Print a line beside the conversation: on stderr."""
        sys.stdout.flush()
        self.aside.print(Text(line, style="dim"))

    # Commands.

    def _help(self, _: str) -> None:
        self.say(HELP)

    def _system(self, text: str) -> None:
        chat_prompt(self.decoder.tokenizer, [{"role": "user", "content": "Hello"}], text or None)  # may refuse it
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
        """Find the last question."""
        found = [i for i, each in enumerate(self.messages) if each["role"] == "user"]
        if not found:
            raise ValueError("there is no question yet")
        return found[-1]

    def _method(self, name: str) -> None:
        if name:
            self._switch(name)
        self.say(f"method {self.method}")

    def _switch(self, name: str) -> None:
        """Decode by another method; models are loaded anew if it lacks something."""
        method = parse_method(name)
        try:
            self.decoder = self.decoder.replace(method=method)
        except ValueError:
            self.decoder = self.make(method)  # or it says what is missing

    def _form(self, text: str) -> None:
        kind, _, rest = text.partition(" ")
        if kind and kind not in KINDS:
            raise ValueError(f"/form takes one of {', '.join(KINDS)}, not {kind!r}")
        form = form_of_kind(kind, rest.strip()) if kind else None
        check_extra(form)
        check_form(form, self.decoder.tokenizer)
        self.params = replace(self.params, response_format=form)
        self.say("answers follow this form" if form is not None else "answers have any form")

    def _stats(self, _: str) -> None:
        self.say(f"{len(self.stats)} answers, {_line(total(self.stats))}")

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


def _line(stats: Stats) -> str:
    """Format an answer's statistics; the reading of the prompt counts in tokens/s."""
    return f"{stats.tokens} tokens, tau {stats.tau:.2f}, {stats.tokens_per_s:.1f} tokens/s"


def _path(name: str) -> Path:
    if not name:
        raise ValueError("which file?")
    return Path(name).expanduser()


def _read(path: Path) -> list[dict[str, str]]:
    """Read the messages of a file. Raises ValueError if it holds no conversation."""
    text = read_text(path)
    try:
        found = json.loads(text)
        return checked(found.get("messages") if isinstance(found, dict) else found)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} holds no conversation: it is not JSON") from None
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error}") from None


@contextmanager
def history() -> Iterator[Any]:
    """Give the readline module with the inputs of earlier conversations; None on systems without it."""
    try:
        import readline
    except ImportError:
        yield None
        return
    path = home() / "chat-history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY)
    try:
        yield readline
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def ask(lines: Any) -> str | None:
    """Return what the user types; lines that end in a backslash go on in the next. None if he leaves.

    He leaves by Ctrl-D, or by Ctrl-C with nothing typed. Ctrl-C after a beginning takes that back.
    """
    parts: list[str] = []
    while True:
        interrupted = False
        try:
            part = _input("... " if parts else "> ")
        except EOFError:
            print(file=sys.stderr)
            return "\n".join(parts) if parts else None
        except UnicodeDecodeError:
            say("that is not UTF-8 text")
            return ""
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:  # after the handler, as in `Talk.run`
            print(file=sys.stderr)
            typed = parts or (lines is not None and lines.get_line_buffer())
            return "" if typed else None
        if not part.endswith("\\"):
            return "\n".join([*parts, part])
        parts.append(part[:-1])


def _input(prompt: str) -> str:
    # Only answers go into a pipe or a file.
    with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
        return input(prompt)
