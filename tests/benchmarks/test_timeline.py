"""A step as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kernels.timeline import PROFILED, SKIPPED, Activity, kind_of, plot_timeline, step_of
from forerun import Decoder, SamplingParams
from forerun.methods import method
from tests.support.toys import noisy_copy, tiny


def test_what_ran_at_once_counts_once_and_has_a_kind() -> None:
    assert Activity(10.0, []).busy == 0
    assert Activity(10.0, [(1, 2, "a"), (5, 1, "b")]).busy == pytest.approx(3)
    assert Activity(10.0, [(5, 1, "b"), (1, 4.5, "a"), (2, 1, "c")]).busy == pytest.approx(5)
    names = ["aten::bmm", "ampere_bf16_s16816gemm", "nvjet_tst", "flash_fwd_kernel", "add"]
    assert [*map(kind_of, names)] == ["product"] * 3 + ["attention", "other"]


def test_a_step_is_found_and_drawn(tmp_path: Path) -> None:
    target = tiny("llama")
    decoder = Decoder(target, None, noisy_copy(target, 0.02), method("sd", gamma=2), guard=False)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for rows in ([[5, 6, 7], [8], [1, 2]], [[5, 6, 7]]):
        found = step_of(decoder, rows, params)
        assert found is not None
        step, work = found
        before = [chunk.step.tokens for chunk in decoder.stream(rows, params)]
        assert step.tokens == before[len(rows) * (SKIPPED + PROFILED - 1)]
    assert {"product", "attention", "other"} == {kind_of(name) for _, _, name in work.parts}
    assert 0 < work.busy < work.ms
    plot_timeline("sd", step, work, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
    assert step_of(decoder, [[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True)) is None
