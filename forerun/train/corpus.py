"""The corpus of the embedded pair: the standard library's own source, split by file.

A file's split follows from a hash of its path relative to the library's root. So the held-out files of one Python
version stay held out on every other.
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

# Tables and generated text: they teach digits and escapes, not code.
EXCLUDED = (
    "site-packages/",
    "encodings/",
    "pydoc_data/",
    "test/cjkencodings/",
    "lib2to3/tests/data/",
)


def split_of(relative: str) -> Split:
    """Return the split of a file by its posix path relative to the library root: 90 / 5 / 5 percent."""
    bucket = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big") % 100
    return "train" if bucket < 90 else "validation" if bucket < 95 else "test"


def source_files(split: Split, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the split's files in path order. Unreadable files are skipped.

    `root` is any source tree; by default this interpreter's standard library, with its tests where installed.
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
    """Yield all files outside EXCLUDED folders, which may hold far more than the library."""
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
    """Return prompts of `tokens` token ids from files of a split, one a file.

    Each begins at a function or class, picked by the hash of the file's path: the same for the same Python. Those that
    share a stretch of STRETCH characters with a file of the training split are left out.
    """
    return [ids for _, _, ids in file_prompts(tokenizer, split, tokens, root)[:count]]


def file_prompts(
    tokenizer: PreTrainedTokenizerBase, split: Split, tokens: int, root: Path | None = None
) -> list[tuple[int, str, list[int]]]:
    """Return (hash, file, token ids) of every prompt, by hash: the first few are then not all of one package."""
    prompts, shown = [], []
    for relative, text in source_files(split, root):
        digest = int.from_bytes(hashlib.sha256(f"prompt {relative}".encode()).digest()[:4], "big")
        starts = [match.start() for match in re.finditer(r"^ *(?:def|class) ", text, re.MULTILINE)]
        if starts:
            text = text[starts[digest % len(starts)] :]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= tokens:
                prompts.append((digest, relative, ids[:tokens]))
                length = len(tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False))
                shown.append(text[:length])
    known = sharing(shown, (text for _, text in source_files("train", root)))
    return sorted(prompt for number, prompt in enumerate(prompts) if number not in known)


def sharing(texts: Sequence[str], others: Iterable[str], length: int = STRETCH) -> set[int]:
    """Return the numbers of the texts that have a stretch of `length` characters in common with one of the others.

    Cut another text into pieces of half that length: a common stretch covers one of them. So only these are looked up.
    """
    piece = (length + 1) // 2
    places: dict[str, set[int]] = {}
    for number, text in enumerate(texts):
        for start in range(len(text) - piece + 1):
            places.setdefault(text[start : start + piece], set()).add(number)
    found: set[int] = set()
    for other in others:
        for begin in range(0, len(other) - piece + 1, piece):
            near = places.get(other[begin : begin + piece], set()) - found
            starts = (
                range(max(0, begin + piece - length), min(begin, len(other) - length) + 1)
                if near
                else ()
            )
            stretches = [
                other[start : start + length] for start in starts
            ]  # those that cover the piece
            found |= {number for number in near if any(each in texts[number] for each in stretches)}
    return found
