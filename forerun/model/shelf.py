"""The texts of one model in the prompt folder: what is there of a text, and what it lacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from forerun.engine.recent_states import first_kept
from forerun.engine.target import Capture
from forerun.files import private_folder
from forerun.model.kv_cache import Stored
from forerun.model.prefix_store import common
from forerun.model.segments import (
    LEAST,
    LENGTH,
    NAME,
    STATES,
    DamagedError,
    Expected,
    Layout,
    Segment,
    copied,
    expected_states,
    file_name,
    hidden_part,
    read,
    read_tokens,
    root_of,
    split,
    stored_of,
    tensors_of,
)

if TYPE_CHECKING:
    from forerun.model.prompt_folder import PromptFolder

REMEMBERED = 10_000  # segments whose tokens are kept in memory

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, eq=False)
class NewFile:
    """A file to write: a part of a segment."""

    segment: Segment
    part: str
    tensors: dict[str, Tensor]

    @property
    def name(self) -> str:
        return self.segment.file(self.part)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Job:
    """The files of a text that are not there yet, and the names of all its files, those of its
    first segment first."""

    shelf: Shelf
    files: list[NewFile]
    names: list[str]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, eq=False)
class Piece:
    """What files hold of a segment of a text: its first `count` tokens.

    Attributes:
        segment: of the text.
        key: of the segment in the files, which may go on differently.
        tokens: of that segment, all of them.
    """

    segment: Segment
    key: str
    tokens: np.ndarray
    count: int

    @property
    def start(self) -> int:
        return self.segment.start

    @property
    def end(self) -> int:
        return self.segment.start + self.count

    def file(self, part: str) -> str:
        return file_name(self.segment.place, self.key, part)


@dataclass(frozen=True)
class Listing:
    """The names of a shelf's files, and the keys of its segments by place."""

    names: set[str]
    keys: dict[str, set[str]] = field(default_factory=dict)


class Shelf:
    """The texts of one model. One thread at a time may use it, besides the folder's own.

    Attributes:
        hit_tokens: number of tokens that were read from files and not run again.
        queued: names of files that wait to be written.
        damaged: names of files that could not be read.
    """

    def __init__(
        self,
        folder: PromptFolder,
        model: str,
        layout: Layout,
        no_states: Callable[[Capture], Tensor],
    ) -> None:
        self.folder, self.path = folder, private_folder(folder.path / model)
        self._model, self._layout, self._no_states = model, layout, no_states
        self._tokens: dict[str, np.ndarray] = {}  # of segments, by key
        self.hit_tokens = 0
        self.queued: set[str] = set()
        self.damaged: set[str] = set()

    def known(self, tokens: Sequence[int], salt: str) -> int:
        """Return the length of the longest beginning of a text that files hold with this salt."""
        pieces = self._pieces(tokens, [STATES], salt)
        return pieces[-1].end if pieces else 0

    def read(
        self,
        tokens: Sequence[int],
        held: int,
        capture: Capture,
        salt: str,
        reads: int | None = None,
    ) -> Iterator[tuple[Stored, Tensor | None]]:
        """Yield what files hold of a text after its first `held` tokens, piece by piece: keys and
        values [G, n, D] by layer, and the hidden states [n, d] of `capture` or None.

        Without a number of states in `reads` a piece without hidden states ends it. With a number
        only the states that a head needs behind the whole text are looked for, and may lack. A file
        that is damaged ends it with a line in the log, and one that has gone without.
        """
        needs_all = bool(capture) and reads is None
        parts = [STATES, *([hidden_part(capture)] if needs_all else [])]
        pieces = self._pieces(tokens, parts, salt)
        if not pieces or pieces[-1].end < held + LEAST:
            return
        listing, names = self._list(), list[str]()
        for piece in pieces:
            names.append(piece.file(STATES))
            source = None
            if capture and piece.end > first_kept(len(tokens), reads):
                source = self._longest(listing, piece.segment, [hidden_part(capture)])
            if source is not None and source.count >= piece.count:
                names.append(source.file(hidden_part(capture)))
            else:
                source = None
            if piece.end <= held:
                continue
            first, end = max(0, held - piece.start), piece.count
            states = self._part(piece, STATES, expected_states(self._layout, len(piece.tokens)))
            hidden = self._hidden(source, capture) if source is not None else None
            if states is None or (needs_all and hidden is None):
                return
            self.hit_tokens += end - first
            stored: Stored = [
                None if pair is None else (pair[0][:, first:end], pair[1][:, first:end])
                for pair in stored_of(states, self._layout)
            ]
            yield stored, None if hidden is None else hidden[first:end]
        self.touch(names)

    def put(
        self,
        tokens: Sequence[int],
        stored: Stored,
        hidden: Tensor | None,
        salt: str,
        capture: Capture,
        has_ended: bool,
    ) -> None:
        """Keep a text, of at least LENGTH tokens, with its keys and values [G, n, D] by layer and
        the hidden states [m, d] at its last m positions. Files are written later, of copies. A
        segment has a file with hidden states only if those of all of its tokens are given. What
        comes after the last whole segment is kept only if the text `has_ended`, because more tokens
        would replace it."""
        if len(tokens) < LENGTH:
            return
        known_from = len(tokens)  # the first position whose hidden state is given
        if hidden is not None and capture and _are_alike(hidden, self._no_states(capture)):
            known_from -= len(hidden)
        listing, names, files = self._list(), list[str](), list[NewFile]()
        room = self.folder.room()
        for segment in split(self._root(salt), tokens):
            if len(segment.tokens) < LENGTH and not has_ended:
                break
            if room <= 0:  # the text's beginning is kept
                break
            parts = [STATES]
            if segment.start >= known_from:
                parts.append(hidden_part(capture))
            for part in parts:
                there = self._longest(listing, segment, [part])
                if there is not None and there.count == len(segment.tokens):
                    names.append(there.file(part))
                    continue
                names.append(segment.file(part))
                if names[-1] not in self.queued:
                    file = NewFile(
                        segment, part, _copies(segment, part, stored, hidden, known_from)
                    )
                    files.append(file)
                    room -= file.bytes
        if files:
            self.folder.submit(Job(self, files, names))
        else:
            self.touch(names)

    def touch(self, names: Sequence[str]) -> None:
        """Note that files are used now: the first most recently, because those after it are of
        no use without it."""
        now = time_ns()
        for place, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path / name, ns=(now, now - 1000 * place))

    def replaced_by(self, new: NewFile, files: dict[Path, tuple[int, int]]) -> list[Path]:
        """Return the files with a beginning of a new one, which nobody needs any more."""
        segment, found = new.segment, list[Path]()
        for path in files:
            known = NAME.fullmatch(path.name)
            if path.parent != self.path or known is None:
                continue
            if (known[1], known[3]) != (segment.place, new.part):
                continue
            tokens = self._tokens_of(segment.parent, known[1], known[2], path.name)
            if tokens is None or len(tokens) == len(segment.tokens):
                continue
            if common(tokens, segment.tokens) == len(tokens):
                found.append(path)
        return found

    # Finding.

    def _root(self, salt: str) -> str:
        return root_of(self._model, salt)

    def _list(self) -> Listing:
        listing = Listing(set())
        with suppress(OSError):
            for name in os.listdir(self.path):
                known = NAME.fullmatch(name)
                if known is not None and name not in self.damaged:
                    listing.names.add(name)
                    listing.keys.setdefault(known[1], set()).add(known[2])
        return listing

    def _pieces(self, tokens: Sequence[int], parts: list[str], salt: str) -> list[Piece]:
        """Return the longest beginning of a text that files hold, with all these parts."""
        if len(tokens) < LEAST:
            return []
        pieces: list[Piece] = []
        listing = self._list()
        for segment in split(self._root(salt), tokens):
            piece = self._longest(listing, segment, parts)
            if piece is None:
                break
            pieces.append(piece)
            if piece.count < LENGTH:
                break
        return pieces

    def _longest(self, listing: Listing, segment: Segment, parts: list[str]) -> Piece | None:
        """Return the piece with all these parts that has the most of a segment's first tokens."""
        if all(segment.file(part) in listing.names for part in parts):
            tokens = segment.tokens
            return Piece(segment, segment.key, tokens, len(tokens))
        best: Piece | None = None
        for key in listing.keys.get(segment.place, ()):
            files = [file_name(segment.place, key, part) for part in parts]
            if not listing.names.issuperset(files):
                continue
            known = self._tokens_of(segment.parent, segment.place, key, files[0])
            if known is None:
                continue
            count = common(known, segment.tokens)
            if count > (LEAST - 1 if best is None else best.count):
                best = Piece(segment, key, known, count)
        return best

    # Files.

    def _tokens_of(self, parent: str, place: str, key: str, name: str) -> np.ndarray | None:
        """Return the tokens of a segment, or None if its file cannot be read."""
        known = self._tokens.get(key)
        if known is None:
            known = self._try(name, lambda path: read_tokens(path, parent, key))
            if len(self._tokens) >= REMEMBERED:
                self._tokens.clear()
            if known is not None:
                self._tokens[key] = known
        return known

    def _part(self, piece: Piece, part: str, expected: Expected) -> dict[str, Tensor] | None:
        """Return the tensors of a file, mapped, or None if it cannot be read."""
        return self._try(piece.file(part), lambda path: read(path, piece.tokens, expected))

    def _try(self, name: str, load: Callable[[Path], Loaded]) -> Loaded | None:
        try:
            return load(self.path / name)
        except FileNotFoundError:  # another process has removed it
            return None
        except DamagedError as error:
            self.damaged.add(name)
            self.folder.say(f"{self.path / name} is damaged and is ignored: {error}")
            return None

    def _hidden(self, piece: Piece, capture: Capture) -> Tensor | None:
        """Return a copy of a segment's hidden states [n, d], or None if they cannot be read."""
        like, count = self._no_states(capture), len(piece.tokens)
        expected: Expected = {"hidden": ((count, like.shape[1]), like.dtype)}
        found = self._part(piece, hidden_part(capture), expected)
        return None if found is None else found["hidden"].to(like.device, copy=True)


def _are_alike(states: Tensor, others: Tensor) -> bool:
    return states.dtype == others.dtype and states.shape[1] == others.shape[1]


def _copies(
    segment: Segment, part: str, stored: Stored, hidden: Tensor | None, known_from: int
) -> dict[str, Tensor]:
    """Return copies of the tensors of a part, by name. `hidden` are the states from `known_from` on."""
    if part == STATES:
        return tensors_of(stored, segment.start, segment.end)
    assert hidden is not None
    return {"hidden": copied(hidden[segment.start - known_from : segment.end - known_from])}
