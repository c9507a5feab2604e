"""The picture of `forerun demo`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from forerun.cli.race import Lane, run

HIDES, SHOWS = "\x1b[?25l", "\x1b[?25h"


def test_an_interrupt_leaves_the_terminal_with_its_cursor() -> None:
    def interrupted() -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=40)
    with pytest.raises(KeyboardInterrupt):
        run(interrupted(), Lane(console, "plain decoding"))
    written = screen.getvalue()
    assert written.rindex(SHOWS) > written.rindex(HIDES)
