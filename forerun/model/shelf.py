"""The texts of one model in the prompt folder: finding them, and adding what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from forerun.engine.recent_states import first_kept
from forerun.engine.target import Capture
from forerun.files import private_folder
from forerun.model.kv_cache import Stored
from forerun.model.prefix_store import Text, Tokens, common
from forerun.model.segments import (
    MIN_SEGMENT,
    NAME,
    SEGMENT_LENGTH,
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
    """A part of a segment, to be written to a file."""

    segment: Segment
    part: str
    tensors: dict[str, Tensor]

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return self.segment.file(self.part)

    @property
    def bytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Job:
    """A text of which some files are to be written.

    Attributes:
        files: those that are missing.
        names: of all of its files, beginning with those of its first segment.
    """

    shelf: Shelf
    files: list[NewFile]
    names: list[str]

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors to be written."""
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
    tokens: Tokens
    count: int

    @property
    def start(self) -> int:
        """Return the position of the segment's first token in the text."""
        return self.segment.start

    @property
    def end(self) -> int:
        """Return the position in the text after the last token that the file holds."""
        return self.segment.start + self.count

    def file(self, part: str) -> str:
        """Return the name of the file with a part of the segment."""
        return file_name(self.segment.place, self.key, part)


@dataclass(frozen=True)
class Listing:
    """The names of a shelf's files, and the keys of its segments by place."""

    names: set[str]
    keys: dict[str, set[str]] = field(default_factory=dict)


class Shelf:
    """The texts of one model.

    Only one thread at a time may use it, except for the thread of the folder, which writes.

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
        """Open the part of a folder with a model's texts (see `PromptFolder.shelf`)."""
        self.folder = folder
        self.path = private_folder(folder.path / model)
        self.hit_tokens = 0
        self.queued: set[str] = set()
        self.damaged: set[str] = set()
        self._model = model
        self._layout = layout
        self._no_states = no_states
        self._tokens: dict[str, Tokens] = {}  # of segments, by key

    def known(self, tokens: Sequence[int], cache_salt: str) -> int:
        """Return the length of the longest prefix of a text that files hold under this salt."""
        pieces = self._pieces(tokens, [STATES], cache_salt)
        return pieces[-1].end if pieces else 0

    def read(
        self,
        tokens: Sequence[int],
        held: int,
        capture: Capture,
        cache_salt: str,
        reads: int | None = None,
    ) -> Iterator[tuple[Stored, Tensor | None]]:
        """Yield what files hold of a text after its first `held` tokens, piece by piece.

        A piece is keys and values [G, n, D] by layer, and the hidden states [n, d] of `capture` or
        None. It ends before a file that is damaged, which is logged, or that another process
        removed.

        Without a number in `reads` it also ends before a piece without hidden states. With a number
        only the states that a head needs at the end of the text are looked for, and may be missing.
        """
        needs_all = bool(capture) and reads is None
        parts = [STATES]
        if needs_all:
            parts.append(hidden_part(capture))
        pieces = self._pieces(tokens, parts, cache_salt)
        if not pieces or pieces[-1].end < held + MIN_SEGMENT:
            return
        listing = self._list()
        names: list[str] = []
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
            first = max(0, held - piece.start)
            end = piece.count
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

    def put(self, text: Text, stored: Stored, has_ended: bool) -> None:
        """Keep a text of at least SEGMENT_LENGTH tokens; ignore a shorter one.

        Copies are made now, and written to files later. A segment has a file with hidden states
        only if those of all of its tokens are given.

        Args:
            text: the text.
            stored: its keys and values [G, n, D] by layer.
            has_ended: whether no token follows. If one may, the tokens after the last whole
                segment are not kept, because a longer segment would replace theirs.
        """
        tokens = text.tokens
        hidden = text.hidden
        capture = text.states
        if len(tokens) < SEGMENT_LENGTH:
            return
        known_from = len(tokens)  # the first position whose hidden state is given
        if hidden is not None and capture and _are_alike(hidden, self._no_states(capture)):
            known_from -= len(hidden)
        listing = self._list()
        names: list[str] = []
        files: list[NewFile] = []
        room = self.folder.room()
        for segment in split(root_of(self._model, text.cache_salt), tokens):
            if len(segment.tokens) < SEGMENT_LENGTH and not has_ended:
                break
            if room <= 0:  # the text's beginning is kept
                break
            parts = [STATES]
            if segment.start >= known_from:
                parts.append(hidden_part(capture))
            for part in parts:
                piece = self._longest(listing, segment, [part])
                if piece is not None and piece.count == len(segment.tokens):
                    names.append(piece.file(part))
                    continue
                name = segment.file(part)
                names.append(name)
                if name not in self.queued:
                    tensors = _copies(segment, part, stored, hidden, known_from)
                    file = NewFile(segment, part, tensors)
                    files.append(file)
                    room -= file.bytes
        if files:
            self.folder.submit(Job(self, files, names))
        else:
            self.touch(names)

    def touch(self, names: Sequence[str]) -> None:
        """Note that the files of a text are used now.

        The first one counts as the most recently used, because later segments are useless without
        it, and so must be removed before it.
        """
        now = time_ns()
        for place, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path / name, ns=(now, now - 1000 * place))

    def replaced_by(self, new: NewFile, files: Iterable[Path]) -> list[Path]:
        """Return those of `files` that hold only a prefix of a new file's segment."""
        segment = new.segment
        replaced: list[Path] = []
        for path in files:
            name = NAME.fullmatch(path.name)
            if path.parent != self.path or name is None:
                continue
            place, key, part = name.groups()
            if (place, part) != (segment.place, new.part):
                continue
            tokens = self._tokens_of(segment.parent, place, key, path.name)
            if tokens is None or len(tokens) == len(segment.tokens):
                continue
            if common(tokens, segment.tokens) == len(tokens):
                replaced.append(path)
        return replaced

    # Finding.

    def _list(self) -> Listing:
        """Return what the folder has now, without damaged files."""
        listing = Listing(set())
        with suppress(OSError):
            for path in self.path.iterdir():
                name = NAME.fullmatch(path.name)
                if name is not None and path.name not in self.damaged:
                    place, key, _ = name.groups()
                    listing.names.add(path.name)
                    listing.keys.setdefault(place, set()).add(key)
        return listing

    def _pieces(self, tokens: Sequence[int], parts: list[str], cache_salt: str) -> list[Piece]:
        """Return the longest prefix of a text of which files hold all these parts."""
        if len(tokens) < MIN_SEGMENT:
            return []
        pieces: list[Piece] = []
        listing = self._list()
        for segment in split(root_of(self._model, cache_salt), tokens):
            piece = self._longest(listing, segment, parts)
            if piece is None:
                break
            pieces.append(piece)
            if piece.count < SEGMENT_LENGTH:
                break
        return pieces

    def _longest(self, listing: Listing, segment: Segment, parts: list[str]) -> Piece | None:
        """Return the piece with all these parts that has the most of a segment's first tokens."""
        if all(segment.file(part) in listing.names for part in parts):
            return Piece(segment, segment.key, segment.tokens, len(segment.tokens))
        best: Piece | None = None
        best_count = MIN_SEGMENT - 1
        for key in listing.keys.get(segment.place, ()):
            names = [file_name(segment.place, key, part) for part in parts]
            if not listing.names.issuperset(names):
                continue
            tokens = self._tokens_of(segment.parent, segment.place, key, names[0])
            if tokens is None:
                continue
            count = common(tokens, segment.tokens)
            if count > best_count:
                best = Piece(segment, key, tokens, count)
                best_count = count
        return best

    # Files.

    def _tokens_of(self, parent: str, place: str, key: str, name: str) -> Tokens | None:
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
        """Return the tensors of a file, mapped into memory, or None if it cannot be read."""
        return self._try(piece.file(part), lambda path: read(path, piece.tokens, expected))

    def _try(self, name: str, load: Callable[[Path], Loaded]) -> Loaded | None:
        """Return what `load` makes of a file; None if it is damaged, which is logged, or gone."""
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
        like = self._no_states(capture)
        shape = len(piece.tokens), like.shape[1]
        tensors = self._part(piece, hidden_part(capture), {"hidden": (shape, like.dtype)})
        return None if tensors is None else tensors["hidden"].to(like.device, copy=True)


def _are_alike(states: Tensor, others: Tensor) -> bool:
    return states.dtype == others.dtype and states.shape[1] == others.shape[1]


def _copies(
    segment: Segment, part: str, stored: Stored, hidden: Tensor | None, known_from: int
) -> dict[str, Tensor]:
    """Return copies of the tensors of a part, by name.

    `hidden` are the states from the position `known_from` on.
    """
    if part == STATES:
        return tensors_of(stored, segment.start, segment.end)
    assert hidden is not None
    return {"hidden": copied(hidden[segment.start - known_from : segment.end - known_from])}
