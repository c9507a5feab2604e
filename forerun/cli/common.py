"""What several commands share beside options: names of models, lines on stderr, and checks."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.zoo import EMBEDDED, MODELS, SMOLLM2, find

# Colour of a token by its origin. Tokens that the target chose stay plain.
STYLES = {"draft": "green", "lookup": "cyan", "phrase": "magenta", "window": "magenta", "reused": "yellow"}
STYLES |= {"correction": "bold red", "bonus": ""}


def say(line: str) -> None:
    """Print a line on stderr, under the program's name."""
    print(f"forerun: {line}", file=sys.stderr, flush=True)


def best_target(target: str | None) -> str:
    """Return the target that is named, or the best one that needs no download."""
    return target or (SMOLLM2 if find(SMOLLM2) is not None else EMBEDDED)


def shown_name(target: str, model_name: str | None) -> str:
    """Return the model's name in answers."""
    return model_name or (Path(target).name if Path(target).exists() else target)


def needs(command: str, **extras: list[str]) -> None:
    """Raise ValueError for missing packages, by the extra that brings them."""
    for extra, names in extras.items():
        missing = [each for each in names if find_spec(each) is None]
        if missing:
            raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'forerun[{extra}]'")


def check_ray(address: str | None, **options: int | None) -> None:
    """Raise ValueError for options that need a cluster where none is given, and for an empty address."""
    for name, value in options.items():
        if address is None and value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --ray")
    if address == "":
        raise ValueError("--ray takes local, auto or HOST:PORT")


def absolute(model: str | Path) -> str:
    """Return a model's name, or the absolute path of its file or folder, for processes in other folders."""
    if model == EMBEDDED or model in MODELS:
        return str(model)
    path = Path(model).expanduser()
    return str(path.resolve() if path.exists() else model)


def absolute_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `load` with absolute paths."""
    return options | {key: absolute(options[key]) for key in ("draft", "pre_verifier", "head") if options.get(key)}


def quiet(threads: int | None = None) -> None:
    """Keep transformers' progress bars and warnings out of the output; set torch's threads."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
