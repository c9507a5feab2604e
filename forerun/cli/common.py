"""What several commands share beside options: lines on stderr, colours, and quiet libraries."""

from __future__ import annotations

import os
import sys

# Colour of a token by its origin. Tokens that the target chose stay plain.
STYLES = {
    "draft": "green",
    "lookup": "cyan",
    "phrase": "magenta",
    "window": "magenta",
    "reused": "yellow",
}
STYLES |= {"correction": "bold red", "bonus": "", "prompt": "dim"}


def say(line: str) -> None:
    """Print a line on stderr, under the program's name."""
    print(f"forerun: {line}", file=sys.stderr, flush=True)


def quiet(threads: int | None = None) -> None:
    """Keep transformers' progress bars and warnings out of the output; set torch's threads."""
    for library in (
        "TRANSFORMERS",
        "HF_HUB",
    ):  # the hub's has a line for each of its attempts without a network
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
