"""Chains that are sampled from a head's logits."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from forerun.engine.sequence import Request, Sequence
from forerun.methods.beams import sample_chains
from forerun.sampling.sampler import Sampler
from forerun.sampling.seeded import SeededStream

V, HOT = 7, torch.tensor([5, 1, 3])
LOGITS = torch.tensor([[1.0, 0.0, -1.0], [0.5, -0.5, 1.0]])  # of two places


class Only(LogitsProcessor):
    """Allows one token; like a grammar it looks at the tokens before."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.token] = scores[:, self.token]
        return masked


def chains(samplers: list[Sampler], limits: list[int], block: bool = True) -> list:
    generator = torch.Generator().manual_seed(0)
    seqs = [Sequence(Request([2], 9, sampler, generator=generator), row) for row, sampler in enumerate(samplers)]
    rows = len(seqs)
    return sample_chains(
        seqs, lambda k, tokens, at: LOGITS[k].expand(rows, 1, -1), HOT, V, limits, ["draft"] * rows, block
    )


@pytest.mark.parametrize("processors", ["none", "temperature", "repetition"])
def test_tokens_follow_the_distributions_that_come_with_them(processors: str) -> None:
    own = {
        "none": None,
        "temperature": LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)]),
        "repetition": LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(3.0)]),
    }[processors]
    drafts = chains([Sampler(False, own)] * 3000, [2] * 3000)
    first = drafts[0].q[0]
    heat = 0.5 if processors == "temperature" else 1.0
    assert torch.allclose(first[HOT], (LOGITS[0] / heat).softmax(-1)) and first.sum() == pytest.approx(1.0)
    expected = first[HOT].double()
    counts = torch.bincount(torch.tensor([draft.tokens[1] for draft in drafts]), minlength=V)
    assert chisquare(counts[HOT].numpy(), (expected / expected.sum() * 3000).numpy()).pvalue > 1e-4
    # The second token's distribution is the one after the first.
    seconds = {draft.tokens[1]: draft.q[1] for draft in drafts}
    same = all(each.equal(seconds[5]) for each in seconds.values())
    assert same == (processors != "repetition")
    for draft in drafts[:50]:
        assert draft.is_block and torch.equal(draft.q[1], seconds[draft.tokens[1]])


def test_rows_end_where_they_must_and_greedy_ones_take_the_argmax() -> None:
    cold, allowed = Sampler(False, LogitsProcessorList([Only(0)])), Sampler(False, LogitsProcessorList([Only(3)]))
    drafts = chains([Sampler(), cold, Sampler(False), allowed], [2, 2, 1, 2], block=False)
    assert drafts[0].tokens == [2, 5, 3] and drafts[0].q is None
    assert drafts[1].tokens == [2]  # no hot token is allowed: nothing is drafted, and nothing fails
    assert drafts[2].drafted == 1 and len(drafts[2].q) == 1
    assert drafts[3].tokens == [2, 3, 3] and drafts[3].q[:, 3].tolist() == [1.0, 1.0]
    assert not any(draft.block for draft in drafts)


def test_rows_with_a_seed_use_the_targets_numbers() -> None:
    """Hot tokens stand in an order of their own, but a token keeps its own number."""
    expected = torch.zeros(V).index_copy_(0, HOT, LOGITS[0].softmax(-1))
    for row in range(200):
        seq = Sequence(Request([2], 9, Sampler(False), seed=3, stream=row))
        (draft,) = sample_chains([seq], lambda k, tokens, at: LOGITS[k].expand(1, 1, -1), HOT, V, [1], ["draft"], True)
        assert draft.tokens[1] == SeededStream(3, row).at(1).sample(expected) and draft.q is None
