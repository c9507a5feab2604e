"""The memory that models need, from their files alone. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.zoo import MB, locate, own_draft, weight_files
from forerun.zoo.gguf_file import find, open_gguf

TOKENS = 1000  # that the memory for keys and values is shown for


def loading_line(target: str, draft: str | None = None, method: Any = None) -> str:
    """Return what is loaded, and the memory that it takes as far as files say that. `method`: None for any.

    Raises ValueError for models that do not exist, and for damaged GGUF files.
    """
    own, drafts = own_draft(target), method is None or method.needs_draft
    draft = draft or (own if own != target else None)
    models = [(target, "target"), *([(draft, "draft")] if draft and drafts else [])]
    return f"loading {' and '.join(_described(*model) for model in models)} ..."


def _described(name: str, part: str) -> str:
    source = locate(name, part)
    if not isinstance(source, Path) or not (files := weight_files(source)):
        return name
    if (path := find(source)) is None:
        return f"{name} ({sum(file.stat().st_size for file in files) / MB:,.0f} MB of files)"
    file = open_gguf(path)
    return f"{name} ({file.memory / MB:,.0f} MB, and {TOKENS * file.kv_bytes / MB:,.0f} MB for each {TOKENS} tokens)"
