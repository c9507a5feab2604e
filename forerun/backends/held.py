"""How much memory the weights of loaded parts take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_Span = tuple[int, int]  # addresses of the first byte and of the one after the last

_CONTAINERS = (list, tuple, set, frozenset, deque)
_EMPTY = CellType()  # a name that a function encloses and that has no value yet


def held_bytes(*owners: Any) -> int:
    """Return the bytes of all tensors and arrays that objects hold, each byte once.

    Attributes, containers and what functions enclose are followed, because parts of a model keep
    their weights in all of these, and may share them.
    """
    spans: dict[torch.device, list[_Span]] = defaultdict(list)
    seen: set[int] = set()
    waiting: list[Any] = [*owners]
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, Tensor) and not owner.is_meta:
            storage = owner.untyped_storage()
            spans[owner.device].append(_span(storage.data_ptr(), storage.nbytes()))
        elif isinstance(owner, np.ndarray):
            spans[torch.device("cpu")].append(_span(owner.ctypes.data, owner.nbytes))
        else:
            waiting += _parts(owner)
    return sum(map(_covered, spans.values()))


def _span(start: int, size: int) -> _Span:
    return start, start + size


def _parts(owner: Any) -> Iterable[Any]:
    """Return what an object holds. Types and modules of Python belong to nobody."""
    if isinstance(owner, dict):
        return owner.values()
    if isinstance(owner, _CONTAINERS):
        return owner
    if isinstance(owner, FunctionType):
        return [cell.cell_contents for cell in owner.__closure__ or () if cell != _EMPTY]
    if isinstance(owner, MethodType):
        return [owner.__self__]
    if isinstance(owner, partial):
        return [owner.func, owner.args, owner.keywords]
    if isinstance(owner, type | ModuleType) or not hasattr(owner, "__dict__"):
        return ()
    return vars(owner).values()


def _covered(spans: list[_Span]) -> int:
    """Return how many bytes lie in at least one of the spans."""
    total = 0
    reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
