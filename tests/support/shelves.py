"""Shelves of the prompt folder without a model: keys and values tell which tokens they are of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.model.kv_cache import Stored
from forerun.model.prefix_store import Text
from forerun.model.prompt_folder import PromptFolder
from forerun.model.segments import MIN_SEGMENT, SEGMENT_LENGTH, Layout, Shape
from forerun.model.shelf import Shelf

MODEL = "0" * 32
LARGE = 2**30  # bytes of a folder that never fills
LAYOUT: Layout = ((Shape(1, 2, torch.float32, torch.device("cpu")),) * 2, None)


def keys_of(tokens: Sequence[int]) -> Stored:
    """Keys and values that depend on all tokens up to each position."""
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)
    return [(sums[None, :, None].repeat(1, 1, 2), -sums[None, :, None].repeat(1, 1, 2)), None]


def shelf_in(path: Path, limit: int = LARGE, model: str = MODEL) -> Shelf:
    return PromptFolder(path, limit).shelf(model, LAYOUT, lambda capture: torch.empty(0, 3))


def put(shelf: Shelf, text: Sequence[int], salt: str = "") -> None:
    shelf.put(Text(text, None, salt), keys_of(text), has_ended=True)
    assert shelf.folder.wait(60)


def read(shelf: Shelf, text: Sequence[int], held: int = 0, salt: str = "") -> int:
    """Read what there is of a text; return how long it is, after a look at all of its keys."""
    wanted = keys_of(text)[0]
    end = held
    assert wanted is not None
    for stored, hidden in shelf.read(text, held, "", salt):
        assert stored[0] is not None and stored[1] is None and hidden is None
        count = stored[0][0].shape[1]
        for part, expected in zip(stored[0], wanted, strict=True):
            assert torch.equal(part, expected[:, end : end + count])
        end += count
    return end


def whole(text: Sequence[int]) -> list[int]:
    """A text without a rest that is too short for a file."""
    rest = len(text) % SEGMENT_LENGTH
    return list(text[: len(text) - rest if rest < MIN_SEGMENT else len(text)])


def random_text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (length,), generator=generator).tolist()
