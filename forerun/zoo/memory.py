"""The memory that models need, from their files alone. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from forerun.zoo import MB, MODELS, locate, own_draft, weight_files
from forerun.zoo import find as found
from forerun.zoo.gguf_file import find, open_gguf

TOKENS = 1000  # that the memory for keys and values is shown for


def loading_line(target: str, draft: str | None = None) -> str:
    """Return what is loaded, and the memory that it takes as far as files say that.

    Raises ValueError for models that do not exist, and for damaged GGUF files.
    """
    own = own_draft(target)
    if draft is None and own != target and own in MODELS and found(own) is not None:
        draft = own
    models = [(target, "target"), *([(draft, "draft")] if draft else [])]
    return f"loading {' and '.join(_described(*model) for model in models)} ..."


def _described(name: str, part: str) -> str:
    source = locate(name, part)
    if not isinstance(source, Path) or not (files := weight_files(source)):
        return name
    size = f"{sum(path.stat().st_size for path in files) / MB:,.0f} MB"
    if (file := find(source)) is not None:
        size += f", and {TOKENS * open_gguf(file).kv_bytes / MB:,.0f} MB for each {TOKENS} tokens"
    return f"{name} ({size})"
