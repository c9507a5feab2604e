"""How much of the time nothing ran."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from forerun.bench.timeline import Activity, outside

CPU = torch.device("cpu")


def test_what_ran_at_once_counts_once() -> None:
    assert Activity(10.0, []).busy == 0
    assert Activity(10.0, [(1, 2, "a"), (5, 1, "b")]).busy == pytest.approx(3)
    assert Activity(10.0, [(5, 1, "b"), (1, 4.5, "a"), (2, 1, "c")]).busy == pytest.approx(5)


def test_waiting_is_outside_and_working_is_not() -> None:
    x = torch.ones(600, 600)
    assert outside(lambda: sleep(0.01), CPU, 3) > 0.9
    assert outside(lambda: [x @ x for _ in range(10)], CPU, 3) < outside(lambda: (sleep(0.05), x @ x), CPU, 3)
