"""SamplingParams refuse what cannot be meant, and name it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", 1.5, "seed must be an integer, not 1.5"),
        ("seed", True, "seed must be an integer, not True"),
        ("seed", "7", "seed must be an integer, not '7'"),
        ("seed", -1, "seed must be 0 or more and below 2**62, not -1"),
        ("seed", 2**62, "seed must be 0 or more and below 2**62"),
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, not 0"),
        ("max_new_tokens", None, "max_new_tokens must be an integer, not None"),
        ("max_new_tokens", 8.0, "max_new_tokens must be an integer, not 8.0"),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("temperature", True, "temperature must be a number, not True"),
        ("temperature", float("nan"), "temperature must be 0 (greedy) or at least 0.001, not nan"),
        ("temperature", float("inf"), "temperature must be 0 (greedy) or at least 0.001, not inf"),
        ("temperature", 1e-9, "temperature must be 0 (greedy) or at least 0.001, not 1e-09"),
        ("top_k", 2.5, "top_k must be an integer, not 2.5"),
        ("top_k", -1, "top_k must be 0 (all) or more, not -1"),
        ("top_p", 0, "top_p must be above 0 and at most 1, not 0"),
        ("top_p", [0.9], "top_p must be a number, not [0.9]"),
        ("min_p", 1.5, "min_p must be between 0 and 1, not 1.5"),
        ("repetition_penalty", float("nan"), "repetition_penalty must be above 0, not nan"),
        ("ignore_eos", "no", "ignore_eos must be True or False, not 'no'"),
        ("stop", ["a", ""], "stop must be strings that are not empty, not ['a', '']"),
        ("stop", 5, "stop must be strings that are not empty, not 5"),
        ("stop", b"a", "stop must be strings that are not empty, not b'a'"),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert message in str(error.value)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        seed=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(4), max_new_tokens=np.int64(2)
    )
    assert (params.seed, params.top_k, params.max_new_tokens) == (3, 4, 2)


@pytest.mark.parametrize("stop", ["a", ["a"], ("a",)])
def test_one_stop_string_or_several(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("a",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()  # type: ignore[arg-type]
