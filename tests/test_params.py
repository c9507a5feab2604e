"""SamplingParams refuse what cannot be meant, and name it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from forerun.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("seed", [1.5, True, "7"], "must be an integer, not"),
        ("seed", [-1, 2**62], "must be 0 or more and below 2**62, not"),
        ("max_new_tokens", [0], "must be at least 1, not"),
        ("max_new_tokens", [None, 8.0], "must be an integer, not"),
        ("temperature", ["hot", True], "must be a number, not"),
        ("temperature", [nan, inf, 1e-9], "must be 0 (greedy) or at least 0.001, not"),
        ("top_k", [2.5], "must be an integer, not"),
        ("top_k", [-1], "must be 0 (all) or more, not"),
        ("top_p", [0], "must be above 0 and at most 1, not"),
        ("top_p", [[0.9]], "must be a number, not"),
        ("min_p", [1.5], "must be between 0 and 1, not"),
        ("repetition_penalty", [nan], "must be above 0, not"),
        ("ignore_eos", ["no"], "must be True or False, not"),
        ("stop", [["a", ""], 5, b"a"], "must be strings that are not empty, not"),
    ],
)
def test_a_bad_value_is_named(name: str, values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            SamplingParams(**{name: value})
        assert f"{name} {message} {value!r}" in str(error.value)


def test_numbers_of_numpy_are_numbers_and_a_stop_string_may_stand_alone() -> None:
    numbers = {"seed": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(4), "max_new_tokens": np.int64(2)}
    params = SamplingParams(**numbers)
    assert (params.seed, params.top_k, params.max_new_tokens) == (3, 4, 2)
    wanted = [("a",)] * 3 + [()] * 2
    assert [SamplingParams(stop=stop).stop for stop in ("a", ["a"], ("a",), None, [])] == wanted  # type: ignore[arg-type]
