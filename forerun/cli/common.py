"""What several commands share besides options: lines on stderr, colours, and quiet libraries."""

from __future__ import annotations

import os
import sys

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


def quiet(threads: int | None = None) -> None:
    """Keep transformers' progress bars and warnings out of the output, and set torch's threads."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Without a network the hub's client warns at every attempt to reach it.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
