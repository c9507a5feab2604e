"""An engine of random choices gives what decoding one by one gives.

Its drafters, lengths, pauses and requests are chosen at random.
"""

from __future__ import annotations

import pytest

from benchmarks.quality.forward_bits import DifferenceError
from benchmarks.quality.random_engines import run_by_chance
from forerun.backends import prepare
from forerun.backends.heads import HiddenLM
from forerun.backends.quantised import QuantisedForward
from forerun.engine.draft import Draft
from forerun.methods import SD, Hybrid, Lyanna, Method, Pacer, Parts, Suffix
from forerun.model.causal_lm import CausalLM
from tests.support.families import tiny
from tests.support.native import native_settings
from tests.support.toys import COSTS, noisy_copy, random_head, random_layer

restored = pytest.fixture(autouse=True)(native_settings)


def parts_of(family: str) -> Parts:
    model = tiny(family)
    draft = noisy_copy(model, 0.05)
    target = prepare(model)
    assert isinstance(target.backend, QuantisedForward)
    head = HiddenLM(random_head(target, kind="lyanna"), target)
    return Parts(target, prepare(draft), random_layer(model, draft), COSTS, head=head)


METHODS: list[Method] = [
    SD(4),
    Suffix(),
    Pacer(),
    Hybrid(threshold=2.0, other="sd"),
    Lyanna(depth=3, width=2, nodes=5),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "smollm3"])
def test_outputs_are_those_of_decoding_one_by_one(family: str) -> None:
    counts = run_by_chance(parts_of(family), METHODS, 80)
    assert counts.outputs >= 80 and counts.engines > 3 and counts.tokens > 600
    assert 0 < counts.accepted < counts.drafted and counts.aborted and counts.pauses


def test_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward of the engine after the 60th adds to one logit."""
    forward, calls = CausalLM.forward, []

    def wrong(self: CausalLM, ids: list[int], drafts: list[Draft], capture: object = "") -> object:
        output = forward(self, ids, drafts, capture)
        calls.append(1)
        if len(calls) > 60:
            output.logits[0][0, 7] += 100
        return output

    monkeypatch.setattr(CausalLM, "forward", wrong)
    with pytest.raises(DifferenceError, match="is not that of decoding one by one"):
        run_by_chance(parts_of("qwen2"), [], 200)
