"""Files of what drafters gather and keep between runs: tensors, and what they belong to."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_tables(path: str | Path, what: str, form: str, tensors: dict[str, Tensor], about: dict[str, int]) -> None:
    """Writes a safetensors file, whole or not at all. `what` names the contents in errors, `form` is their format.

    Raises ValueError where it cannot be written.
    """
    path = Path(path).expanduser()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"format": form, "about": json.dumps(about)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write the {what} to {path}: {error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_tables(path: str | Path, what: str, form: str, vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the `about` that `write_tables` wrote.

    Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of another size.
    """
    path = Path(path).expanduser()
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ValueError(f"cannot read the {what} in {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of {what}, or a part of one: {error}") from None
    if metadata.get("format") != form:
        raise ValueError(f"{path} is no file of {what}: its format is {metadata.get('format')!r}, not {form!r}")
    try:
        about = json.loads(metadata["about"])
        size = about["vocab_size"]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"the {what} in {path} are damaged: their metadata cannot be read") from None
    if size != vocab_size:
        raise ValueError(f"the {what} in {path} are for {size} tokens, not {vocab_size}")
    return tensors, about
