"""The replay of recorded steps, and what the planner makes of the recording in the repository."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.speed.replay import RECORDING, Recording, Text, recorded, replayed, results, table
from forerun import Decoder
from forerun.drafters.plain import PlainDrafter
from forerun.methods import AR
from forerun.planning.cost_model import Costs
from tests.support.toys import noisy_copy, tiny

COSTS = Costs({1: 10.0, 16: 12.0}, {1: 1.0})


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.read(RECORDING)


@pytest.mark.parametrize("slower_draft", [1.0, 20.0])
def test_the_planner_is_never_slower_than_plain_decoding_and_takes_most_of_a_gain(
    recording: Recording, slower_draft: float
) -> None:
    """No clock is read, so this does not depend on the machine."""
    by_plan = results(recording.with_slower_draft(slower_draft))
    for times in zip(by_plan["never"], by_plan["planner"], by_plan["oracle"], strict=True):
        never, planner, oracle = times
        assert oracle <= planner < never / 0.97
    fixed = min(sum(by_plan[plan]) for plan in by_plan if plan not in ("planner", "oracle"))
    assert sum(by_plan["planner"]) < 1.05 * fixed
    for plan, times in by_plan.items():
        assert sum(by_plan["oracle"]) <= sum(times), plan


def test_a_plan_without_drafts_takes_the_recorded_time(recording: Recording) -> None:
    by_plan = replayed(recording, lambda model, _: PlainDrafter())
    assert by_plan == pytest.approx([sum(text.plain_ms) for text in recording.texts])


def test_drafts_that_are_never_accepted_cost_next_to_nothing() -> None:
    output = [10 + place % 97 + place // 97 for place in range(300)]
    text = Text([1, 2, 3], output, [0] * 300, [10.0] * 300, [1.0] * 300)
    by_plan = results(Recording(COSTS, [text] * 4))
    never = sum(by_plan["never"])
    assert never < sum(by_plan["planner"]) < never / 0.97 or sum(by_plan["planner"]) < never
    assert sum(by_plan["always the draft model"]) > 1.3 * never


def test_a_recording_has_what_the_models_do() -> None:
    target = tiny("llama")
    decoder = Decoder(target, None, noisy_copy(target, 0.02), AR(), costs=COSTS)
    made = recorded(decoder, [[5, 6, 7], [9]], 12)
    assert [text.prompt for text in made.texts] == [[5, 6, 7], [9]]
    for text in made.texts:
        counts = {len(text.output), len(text.accepted), len(text.plain_ms), len(text.draft_ms)}
        assert counts == {12}
        # A draft of which n tokens are accepted is followed by one of which n - 1 are, at least.
        for before, after in zip(text.accepted, text.accepted[1:], strict=False):
            assert after >= before - 1
    same = Decoder(target, None, noisy_copy(target, 0.0), AR(), costs=COSTS)
    (text,) = recorded(same, [[5, 6, 7]], 20).texts
    assert text.accepted == [min(16, 20 - place) for place in range(20)]
    exact = replace(text, plain_ms=[10.0] * 20, draft_ms=[1.0] * 20)
    assert "| oracle |" in table(Recording(COSTS, [exact]))
