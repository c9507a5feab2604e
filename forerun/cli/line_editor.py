"""What the user types in a conversation.

On a terminal an editor takes several lines, pasted text as it is, and what was typed in earlier
sessions. Elsewhere, and where a terminal can move no cursor, lines are read as they come.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.cli.common import say


def history_file() -> Path:
    """Return the file that keeps what was typed, by the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "forerun" / "chat_history"


def is_full_terminal() -> bool:
    """Return whether stdin and stdout are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not Console().is_dumb_terminal


def make_editor(commands: list[str], **terminal: Any) -> Any:
    """Return a PromptSession: Enter sends, and Alt-Enter or a backslash before it breaks the line.

    Args:
        commands: completed at the beginning of a message.
        terminal: `input` and `output` of prompt_toolkit in place of the process's own.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    file = history_file()
    history: History = InMemoryHistory()
    with suppress(OSError):  # for example a home that cannot be written
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # because what is asked may be private
        history = FileHistory(str(file))
    return PromptSession(
        history=history,
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        prompt_continuation="... ",
        enable_open_in_editor=False,
        **terminal,
    )


def typed_by(editor: Any) -> str | None:
    """Return what the user types in the editor.

    None if the user leaves by Ctrl-D, and "" if Ctrl-C takes back what was typed.
    """
    try:
        return str(editor.prompt("> "))
    except EOFError:
        return None
    except KeyboardInterrupt:
        return ""


def ask() -> str | None:
    """Return what the user types without an editor, like `typed_by`.

    A line that ends in a backslash continues in the next.
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
