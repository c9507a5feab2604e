"""What forwards cost: measured once, kept, or shipped; and methods for greedy decoding and for sampling."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import noisy_copy, refuses, tiny, tiny_tokenizer

from forerun.api.load import Decoder
from forerun.api.resolve import shipped
from forerun.backends.costs import measure_costs
from forerun.engine.costs import Costs, convex, costs_of
from forerun.methods import AR, SD, Suffix

COSTS = Costs(target={1: 10.0, 2: 10.0, 4: 12.0, 8: 20.0}, draft={1: 1.0, 2: 1.5})


def test_costs_are_measured_for_what_is_there() -> None:
    target, draft = (Decoder(tiny("llama", seed, context=64)).target for seed in (0, 1))
    before = torch.get_rng_state()
    both, alone = measure_costs(target, draft), measure_costs(target)
    # How often it samples depends on the clock: what a user samples next, on every rank of a split target, may not.
    assert torch.equal(torch.get_rng_state(), before)
    assert set(both.target) == set(both.draft) == {1, 2, 4, 8, 16, 32}  # 64 tokens have room for 32 behind 32
    assert all(ms > 0 for ms in [*both.target.values(), *both.draft.values()])
    assert alone.draft == {} and set(alone.target) == set(both.target)
    refuses("context of 64 is full after 64 tokens", measure_costs, target, context=64)


def test_costs_are_measured_once_and_for_methods_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    measure = Mock(return_value=COSTS)
    monkeypatch.setattr("forerun.api.build.measure_costs", measure)
    model = tiny("llama")
    seen: list[Any] = []

    class Asking(AR):
        needs_costs = True

        def build(self, parts: Any) -> Any:
            seen.append(parts.costs)
            return super().build(parts)

    for method, expected in ((AR(), 0), (Asking(), 1)):
        decoder = Decoder(model, method=method)
        for _ in range(2):
            decoder.generate([1, 2, 3], max_new_tokens=2)
        assert measure.call_count == expected
    assert seen == [COSTS]  # one drafter for both calls
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 1 and seen == [COSTS, COSTS]  # kept in a file
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(file.read_text()[:-9])
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 2 and costs_of(json.loads(file.read_text())) == COSTS
    Decoder(tiny("llama", 1), method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 3  # of another model


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"target": {}}, "with entries for the target"),
        ({"target": {"1": 0}}, "target must be above 0"),
        ({"draft": {"1": "x"}}, "could not convert"),
        ({"draft": {"1": float("inf")}}, "numbers of tokens to milliseconds"),
    ],
)
def test_costs_that_are_none_are_refused(found: dict[str, Any], why: str) -> None:
    refuses(why, costs_of, {"target": {"1": 2.0}, "draft": {}, "head": {}} | found)


@given(st.dictionaries(st.integers(1, 40), st.floats(0.1, 99.0), min_size=1, max_size=7))
def test_a_table_is_made_convex_from_below(table: dict[int, float]) -> None:
    """And is as large as may be: where its slope changes, it has an entry of a longer forward, or its own."""
    found, at = convex(table), sorted(table)
    assert list(found) == list(table) and all(found[n] <= table[n] + 1e-9 for n in at)
    slopes = [(found[n] - found[m]) / (n - m) for m, n in pairwise(at)]
    assert all(-1e-9 <= before <= after + 1e-6 for before, after in pairwise([0.0, *slopes]))
    corners = [n for n, before, after in zip(at[1:-1], slopes, slopes[1:], strict=False) if after > before + 1e-3]
    for n in [at[0], *corners, at[-1]]:
        assert found[n] == pytest.approx(min(table[m] for m in at if m >= n))
    assert convex({1: 50.0, 2: 55.0, 4: 77.0, 8: 82.0, 16: 127.0})[4] == pytest.approx(50 + 3 * 32 / 7)


def test_greedy_decoding_and_sampling_have_methods_of_their_own() -> None:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()))
    decoder = Decoder(target, None, noisy_copy(target, 0.02), Suffix(2.0), False, SD(2))
    assert decoder.method_for(greedy=True) == Suffix(2.0) and decoder.method_for(greedy=False) == SD(2)
    greedy = decoder.generate([5, 6, 7], max_new_tokens=12)
    drawn = decoder.generate([5, 6, 7], max_new_tokens=12, temperature=1.0, seed=1)
    assert greedy.stats.draft_forwards == 0 and drawn.stats.draft_forwards > 0
    assert max(each.drafted for each in drawn.steps) == 2
    refuses("method 'sd' needs a draft model", Decoder, decoder.target, method=AR(), sampling_method=SD(2))


def test_the_embedded_pair_has_costs_of_its_own() -> None:
    costs = costs_of(shipped("embedded", None)["costs"])
    assert 0 < costs.draft[1] < costs.target[1]
    assert costs.verify(1) <= costs.verify(8) <= costs.verify(32)
