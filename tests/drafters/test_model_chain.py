"""A draft model that nobody asked for long catches up in parts."""

from __future__ import annotations

import pytest

from forerun import Decoder
from forerun.drafters import model_chain
from forerun.engine.sequence import Request, Sequence
from forerun.methods import SD, Parts
from forerun.model.causal_lm import CausalLM
from tests.support.toys import tiny

PROMPT = [5, 6, 7, 8]
PART = 16


def test_a_draft_far_behind_reads_parts_and_then_drafts_as_if_it_had_read_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_chain, "FARTHEST_BEHIND", PART)
    model = tiny("llama")
    plain = Decoder(model, None, method="ar").generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    # The draft is the target, so all that it drafts is what plain decoding says.
    draft = CausalLM(model)
    drafter = SD(4).build(Parts(CausalLM(model), draft))
    seq = Sequence(Request(PROMPT, 100), 0)
    list(drafter.admit(seq, None, 16))
    seq.tokens += plain.tokens[:50]
    lengths = [draft.length(0)]
    while not (tokens := drafter.propose([seq]).drafts[0].tokens[1:]):
        lengths.append(draft.length(0))
    assert lengths == [3, 3 + PART, 3 + 2 * PART, 3 + 3 * PART]
    assert tokens == plain.tokens[50:54]
