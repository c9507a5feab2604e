"""The memory of loaded parts: every byte once, wherever it is held."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forerun.backends import prepare
from forerun.backends.heads import HiddenLM
from forerun.backends.held import held_bytes
from forerun.backends.panels import product
from tests.support.toys import random_head, tiny


class Owner:
    """A class's attributes belong to no object."""

    shared = torch.zeros(1000)

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def method(self) -> Any:
        return self


def test_what_is_held_twice_counts_once_and_what_is_no_memory_does_not_count() -> None:
    weight = torch.zeros(8, 4)  # 128 bytes
    array = np.zeros(10, np.float32)
    owner = Owner(
        whole=weight, view=weight[2:], same=torch.from_numpy(array), array=array[1:], name="a" * 99
    )
    owner.itself = owner  # type: ignore[attr-defined]
    assert held_bytes(owner) == held_bytes(owner, weight, [owner]) == 128 + 40
    assert held_bytes(Owner(), None, torch, Owner, 5) == 0
    assert held_bytes(torch.zeros(4, device="meta"), torch.zeros(3)) == 12


def test_everything_that_can_hold_weights_is_followed() -> None:
    def fresh() -> torch.Tensor:
        return torch.zeros(25)

    x, y = fresh(), fresh()
    late: torch.Tensor
    owners = [
        {"a": fresh()},
        [(fresh(),)],
        lambda: x,
        partial(torch.add, y, other=fresh()),
        Owner(a=fresh()).method,
        nn.Linear(5, 5, bias=False),
        lambda: late,
    ]
    sizes = [held_bytes(owner) for owner in owners]
    assert sizes == [100, 100, 100, 200, 100, 100, 0]
    late = fresh()
    assert held_bytes(*owners) == 800
    rounded = held_bytes(product(torch.randn(64, 32), torch.ones(64), in_8_bits=True))
    assert 64 * 32 < rounded < 4 * 64 * 32


def test_a_map_of_a_file_counts_as_far_as_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    rows = np.memmap(path, np.uint8, "r")
    assert held_bytes([rows[:100], rows[50:200]]) == 200


def test_a_head_counts_beside_its_target() -> None:
    target = prepare(tiny("llama"))
    head = HiddenLM(random_head(target), target)
    alone = held_bytes(target)
    weights = sum(weight.nbytes for weight in target.model.parameters())
    assert weights <= alone < 3 * weights
    assert held_bytes(target, head) > alone + 1000
    assert held_bytes(target, head.fresh(), head) == held_bytes(target, head)
