"""GGUF files in pieces, as llama.cpp's `gguf-split` names them."""

from __future__ import annotations

import re
from pathlib import Path

_PIECE = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def pieces_of(path: Path) -> tuple[Path, ...]:
    """Return the pieces that a file's name announces, in order; the file itself for other names."""
    match = _PIECE.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    return tuple(path.with_name(name) for name in names)
