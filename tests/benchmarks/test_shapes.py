"""Files of random weights in known shapes, and the figures of `benchmarks.speed.shapes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.speed.random_files import SHAPES, write_file
from benchmarks.speed.shapes import limits_of, summary
from forerun.backends import prepare
from forerun.backends.gguf.model import load_gguf


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_a_shape_opens_and_decodes(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    few = {"layers": 2, "heads": 4, "groups": 2, "vocabulary": 300, "experts": shape.experts // 16}
    few |= {"chosen": min(shape.chosen, 2), "width": 512, "inner": 256}
    path = tmp_path / "tiny.gguf"
    write_file(path, replace(shape, **few))
    model = prepare(load_gguf(path)[0])
    model.add(0, 16)
    logits = model.extend([0], [[5, 6, 7]])[0]
    assert logits.shape == (3, 300)
    assert 0.1 < float(logits.std()) < 10  # weights are neither lost nor far too large


def test_limits_are_of_the_median_of_ratios_of_rounds() -> None:
    rounds = [
        {"forerun": 10.0, "llama.cpp": 13.0, "1, avx512vnni": 10.0, "4, avx512vnni": four}
        for four in (13.0, 13.0, 50.0)
    ]
    for times in rounds:
        times["8, avx512vnni"] = 60.0
    figures = summary(rounds)
    assert figures["ratios"]["4 over 1, avx512vnni"] == {
        "median": 1.3,
        "lowest": 1.3,
        "highest": 5.0,
    }
    dense = limits_of(SHAPES["Qwen3-4B"], figures["ratios"])
    assert [limit["holds"] for limit in dense] == [True, True]  # no figure of AVX2, so no limit
    experts = limits_of(SHAPES["gpt-oss-20b"], figures["ratios"])
    assert [limit["measured"] for limit in experts] == [1.3, 3.077, 1.333]
    assert [limit["holds"] for limit in experts] == [True, True, False]
