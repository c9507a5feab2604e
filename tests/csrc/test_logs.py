"""The C library's own exp and logs, which have the same bits on every system."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from forerun.csrc.library import library

RNG = np.random.default_rng(1)
AROUND_ZERO = RNG.uniform(-1, 1, 300) * 2.0 ** -RNG.integers(0, 60, 300)
CASES = {
    "exp": (math.exp, [*RNG.uniform(-744, 709, 300), *AROUND_ZERO, 0.0]),
    "log": (math.log, [*np.exp(RNG.uniform(-700, 700, 300)), *(1 + AROUND_ZERO), 5e-324, 1.0]),
    "log1p": (math.log1p, [*AROUND_ZERO, *RNG.uniform(0, 1e6, 300), 0.0]),
}
BITS = ["0x1.5bf0a8b14576ap+1", "0x1.193ea7aad030ap+0", "-0x1.6d3c324e13f4fp-2"]
LIMITS = {
    "exp": {-math.inf: 0, -800: 0, 710: math.inf, math.inf: math.inf},
    "log": {0: -math.inf, -1: math.nan, math.inf: math.inf},
    "log1p": {-1: -math.inf, -2: math.nan, math.inf: math.inf},
}


def function(name: str) -> Callable[[float], float]:
    return getattr(library(), f"fr_{name}")


@pytest.mark.parametrize("name", CASES)
def test_they_are_near_the_systems(name: str) -> None:
    """The system's own differ by one unit in the last place at most."""
    of_system, numbers = CASES[name]
    for number in numbers:
        wanted = of_system(number)
        error = abs(function(name)(number) - wanted)
        assert error <= 4 * math.ulp(wanted), (number, wanted)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_exact_and_nan_stays(name: str) -> None:
    for number, wanted in {**LIMITS[name], math.nan: math.nan}.items():
        assert np.array_equal(function(name)(number), wanted, equal_nan=True), number


def test_bits_are_these_on_every_system() -> None:
    found = [function(name)(number) for name, number in (("exp", 1), ("log", 3), ("log1p", -0.3))]
    assert [value.hex() for value in found] == BITS
