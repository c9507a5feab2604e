"""Drafters of all methods on table models, and processors whose distributions are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from benchmarks.baselines.entropy import SVIP, AdaEDL
from benchmarks.baselines.heuristic import Heuristic
from benchmarks.baselines.lookahead import Lookahead
from benchmarks.baselines.lookup import Lookup
from forerun.drafters.model_chain import ChainDrafter
from forerun.engine.engine import Drafter, Proposal
from forerun.engine.sequence import Sequence
from forerun.methods import AR, SD, Confidence, Cumulative, Hybrid, Method, Ouroboros, Parts, Suffix
from forerun.planning.stop_rules import FixedLength
from tests.support import toys
from tests.support.toys import TARGET, TableLM

# Thresholds at which rows stop after different tokens.
METHODS: dict[str, Method] = {
    "ar": AR(),
    "sd": SD(3),
    "lookup": Lookup(3, 2),
    "suffix": Suffix(most=6),
    "hybrid": Hybrid(most=6, threshold=1.5, other="sd"),
    "heuristic": Heuristic(2),
    "confidence": Confidence(0.4, 4),
    "cumulative": Cumulative(0.2, 4),
    "svip": SVIP(0.6, most=4),
    "adaedl": AdaEDL(0.55, step=1.0, most=4),
    "ouroboros": Ouroboros(guesses=3, ngram=3, suffixes=2, gamma=4),
    "lookahead": Lookahead(2, 2, 3),
}


class ChainsAndTrees(ChainDrafter):
    """A sampled chain with random point masses around it."""

    def __init__(self, model: TableLM) -> None:
        super().__init__(model, FixedLength(2))
        self.trees = toys.RandomTrees(len(TARGET))

    def propose(self, seqs: list[Sequence]) -> Proposal:
        chains = super().propose(seqs).drafts
        trees = self.trees.propose(seqs).drafts
        return Proposal([chain.merge(tree) for chain, tree in zip(chains, trees, strict=True)])


DRAFTERS: dict[str, Callable[[TableLM], Drafter]] = {
    **{
        name: lambda draft, method=method: method.build(Parts(TableLM(TARGET), draft))
        for name, method in METHODS.items()
    },
    "random trees": lambda draft: toys.RandomTrees(len(TARGET)),
    "chains and trees": ChainsAndTrees,
}


class Remembered(LogitsProcessor):
    """Remembers what some processors make of a text and its scores.

    The tests have few texts and scores, and spent much of their time on processing the same ones
    again.
    """

    def __init__(self, *processors: LogitsProcessor) -> None:
        self.processors = LogitsProcessorList(processors)
        self.made = dict[tuple[bytes, bytes], Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        rows = []
        for text, row_scores in zip(input_ids, scores, strict=True):
            key = (text.numpy().tobytes(), row_scores.numpy().tobytes())
            if key not in self.made:
                self.made[key] = self.processors(text[None], row_scores[None].clone())[0]  # type: ignore[arg-type]
            rows.append(self.made[key])
        return torch.stack(rows)


PENALTY = hf.RepetitionPenaltyLogitsProcessor(1.8)


PROCESSORS: dict[str, LogitsProcessorList | None] = {
    "none": None,
    "temperature": LogitsProcessorList([hf.TemperatureLogitsWarper(0.6)]),
    "top-k and top-p": LogitsProcessorList([hf.TopKLogitsWarper(3), hf.TopPLogitsWarper(0.85)]),
    "repetition": LogitsProcessorList([Remembered(PENALTY, hf.NoRepeatNGramLogitsProcessor(3))]),
}
