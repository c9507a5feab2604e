"""What a user types in a conversation: with arrow keys and the inputs of earlier ones, where readline is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from forerun.files import home

INPUTS = 1000  # that are remembered


@contextmanager
def history() -> Iterator[Any]:
    """The readline module, with the inputs of earlier conversations; None where there is none."""
    try:
        import readline
    except ImportError:
        yield None
        return
    path = home() / "chat-history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(INPUTS)
    try:
        yield readline
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def ask(lines: Any) -> str | None:
    """What the user types, of several lines behind backslashes. None where he leaves: Ctrl-D, or Ctrl-C with nothing
    typed. Ctrl-C behind a beginning takes that back."""
    parts: list[str] = []
    while True:
        interrupted = False
        try:
            part = _line("... " if parts else "> ")
        except EOFError:
            print(file=sys.stderr)
            return "\n".join(parts) if parts else None
        except UnicodeDecodeError:
            print("forerun: that is not UTF-8 text", file=sys.stderr)
            return ""
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            print(file=sys.stderr)
            typed = parts or (lines is not None and lines.get_line_buffer())
            return "" if typed else None
        if not part.endswith("\\"):
            return "\n".join([*parts, part])
        parts.append(part[:-1])


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # answers alone go into a pipe or a file
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
