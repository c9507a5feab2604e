"""What several commands share besides options: lines on stderr, colours, help, quiet libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import getdoc
from typing import Any

# The colour of a token by its origin. Tokens that the target itself sampled ("bonus") stay plain.
STYLES = {
    "draft": "green",
    "lookup": "cyan",
    "phrase": "magenta",
    "window": "magenta",
    "reused": "yellow",
    "correction": "bold red",
    "bonus": "",
    "prompt": "dim",
}


def say(line: str) -> None:
    """Print a line on stderr, after the program's name."""
    print(f"forerun: {line}", file=sys.stderr, flush=True)


def shown_size(count: int) -> str:
    """Return a number of bytes in the unit that suits it: 1.1 GB, 98 MB, 12 kB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            size = count / unit
            return f"{size:.1f} {name}" if size < 10 else f"{size:.0f} {name}"
    return f"{count} bytes"


def quiet(threads: int | None = None) -> None:
    """Keep transformers' progress bars and warnings out of the output, and set torch's threads."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Without a network the hub's client warns at every attempt to reach it.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    transformers_logging: Any = logging  # its functions have no types
    transformers_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def help_text(command: Callable[..., None]) -> str:
    """Return a command's docstring with each paragraph in one line.

    typer keeps the ends of lines after the first paragraph, and a terminal may be narrower.
    """
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
