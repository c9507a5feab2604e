"""The corpus of the embedded pair: the standard library's own source, split by file.

A file's split follows from a hash of its path relative to the library's root, so that a file that
is held out in one Python version is held out in every other.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation", "test"]
STRETCH = 80  # characters that texts of two splits must not share

# Tables and generated text, which would teach digits and escapes, not code.
EXCLUDED = (
    "site-packages/",
    "encodings/",
    "pydoc_data/",
    "test/cjkencodings/",
    "lib2to3/tests/data/",
)


def split_of(relative: str) -> Split:
    """Return the split of a file: train, validation or test, for 90, 5 and 5 % of the files.

    `relative` is the file's posix path relative to the library's root.
    """
    bucket = _hash_of(relative) % 100
    if bucket < 90:
        return "train"
    return "validation" if bucket < 95 else "test"


def _hash_of(text: str) -> int:
    """Return the first 32 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def source_files(split: Split, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the split's files in path order, without unreadable files.

    `root` is any source tree; by default it is this interpreter's standard library, which includes
    its tests where these are installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    for path in sorted(_python_files(root)):
        relative = path.relative_to(root).as_posix()
        if split_of(relative) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # the tests ship files that are broken on purpose
            continue
        if text.strip():
            yield relative, text


def _python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files outside the EXCLUDED folders.

    Excluded folders are not entered, because site-packages may hold far more than the library.
    """
    for folder, folders, names in os.walk(root):
        if any(part in f"{Path(folder).relative_to(root).as_posix()}/" for part in EXCLUDED):
            folders.clear()
        else:
            yield from (Path(folder, name) for name in names if name.endswith(".py"))


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    split: Split = "test",
    count: int = 40,
    tokens: int = 128,
    root: Path | None = None,
) -> list[list[int]]:
    """Return prompts of `tokens` token ids, each from another file of a split.

    Each begins at a function or class that the hash of the file's path picks, so that one Python
    version always gives the same prompts. Prompts that share a stretch of STRETCH characters with a
    file of the training split are left out.
    """
    return [ids for _, _, ids in file_prompts(tokenizer, split, tokens, root)[:count]]


def file_prompts(
    tokenizer: PreTrainedTokenizerBase, split: Split, tokens: int, root: Path | None = None
) -> list[tuple[int, str, list[int]]]:
    """Return (hash, file, token ids) of every prompt.

    They are sorted by hash, so that the first few are not all of one package.
    """
    prompts = []
    shown = []
    for relative, text in source_files(split, root):
        digest = _hash_of(f"prompt {relative}")
        starts = [match.start() for match in re.finditer(r"^ *(?:def|class) ", text, re.MULTILINE)]
        if not starts:
            continue
        text = text[starts[digest % len(starts)] :]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            prompts.append((digest, relative, ids[:tokens]))
            length = len(tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False))
            shown.append(text[:length])
    known = sharing(shown, (text for _, text in source_files("train", root)))
    return sorted(prompt for number, prompt in enumerate(prompts) if number not in known)


def sharing(texts: Sequence[str], others: Iterable[str], length: int = STRETCH) -> set[int]:
    """Return the numbers of the texts that share a stretch of `length` characters with another one.

    If another text is cut into pieces of half that length, then every common stretch covers a whole
    piece. So only these pieces are looked up, and only stretches around a hit are compared.
    """
    piece = (length + 1) // 2
    places: dict[str, set[int]] = {}
    for number, text in enumerate(texts):
        for start in range(len(text) - piece + 1):
            places.setdefault(text[start : start + piece], set()).add(number)
    shared: set[int] = set()
    for other in others:
        for begin in range(0, len(other) - piece + 1, piece):
            candidates = places.get(other[begin : begin + piece], set()) - shared
            if not candidates:
                continue
            first = max(0, begin + piece - length)
            last = min(begin, len(other) - length)
            stretches = [other[start : start + length] for start in range(first, last + 1)]
            for number in candidates:
                if any(stretch in texts[number] for stretch in stretches):
                    shared.add(number)
    return shared
