"""The acceptance rule.

The output's distribution is the target's, and each way of breaking the rule is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from forerun.engine import acceptance
from forerun.engine.acceptance import Verdict, accept, accept_seeded
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM
from forerun.sampling import threads
from forerun.sampling.params import SamplingParams
from forerun.sampling.sampler import (
    LogitBias,
    Penalties,
    QuickTopP,
    Sampler,
    Source,
    next_tokens,
    sample,
)
from forerun.sampling.seeded import SeededStream
from tests.support.toys import p_value, random_tree, refuses, tiny

V = 4
LENGTH = 3
TRIALS = 3000
FITS = 1e-4
BROKEN = 1e-6

Distributions = list[
    np.ndarray
]  # [V], [V, V], [V, V, V]: the distribution of the next token after 0, 1, 2 tokens


def distributions(seed: int) -> Distributions:
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(V, 0.6), size=(V,) * depth) for depth in range(LENGTH)]


P = distributions(1)
Q = distributions(2)


def distribution(of: Distributions, path: tuple[int, ...]) -> np.ndarray:
    return of[len(path)][path] if len(path) < LENGTH else np.full(V, 1 / V)


def pick(rng: np.random.Generator, weights: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))


class Grown:
    """A draft under construction; nodes that are sampled must come before point masses."""

    def __init__(self) -> None:
        self.tokens = [0]
        self.parents = [-1]
        self.q = []
        self.paths = [()]

    def add(self, parent: int, token: int, q: np.ndarray | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.paths[parent], token))
        self.q += [] if q is None else [q]
        return len(self.tokens) - 1

    def sample_children(
        self, rng: np.random.Generator, parent: int, count: int, tell: str = "truth"
    ) -> list[int]:
        """Children sampled from Q without replacement.

        `tell` is the q of each: the "truth", given that its earlier siblings were rejected; that of
        the "first" one; or "nothing", which makes it a point mass.
        """
        first = distribution(Q, self.paths[parent])
        left, nodes = first, []
        for _ in range(count):
            left = left / left.sum()
            token = pick(rng, left)
            nodes.append(
                self.add(parent, token, {"truth": left, "first": first, "nothing": None}[tell])
            )
            left = np.where(np.arange(V) == token, 0.0, left)
        return nodes

    def draft(self) -> Draft:
        return Draft(
            self.tokens, self.parents, torch.tensor(np.array(self.q)).float() if self.q else None
        )


def block(rng: np.random.Generator, depth: int = 3, points: bool = False) -> Draft:
    """A chain that is verified as a whole.

    Whether it goes on after its first token depends on that token.
    """
    grown = Grown()
    for node in range(depth):
        grown.sample_children(rng, node, 1)
        if node == 0 and grown.tokens[-1] == 2:
            break
    for token in (1, 3) if points else ():
        grown.add(len(grown.q), token, None)
    return replace(grown.draft(), block=True)


def tree(rng: np.random.Generator, counts: tuple[int, ...] = (3, 2), tell: str = "truth") -> Draft:
    grown = Grown()
    nodes = [0]
    for count in counts:
        nodes = [child for node in nodes for child in grown.sample_children(rng, node, count, tell)]
    return grown.draft()


def mixed(rng: np.random.Generator) -> Draft:
    return tree(rng, (2, 1)).merge(tree(rng, tell="nothing"))


DRAFTS: dict[str, Callable[[np.random.Generator], Draft]] = {
    "sampled chain": partial(tree, counts=(1, 1)),
    "point chain": partial(tree, counts=(1, 1), tell="nothing"),
    "sampled tree": tree,
    "point tree": partial(tree, tell="nothing"),
    "mixed tree": mixed,
    "block": block,
    "block and points": partial(block, depth=2, points=True),
    "block among siblings": lambda rng: replace(mixed(rng), block=True),
    "block with a branch": lambda rng: block(rng, 2).merge(Draft.chain(0, [0, 0])),
}


def fit(make: Callable[[np.random.Generator], Draft], trials: int = TRIALS) -> float:
    """The p-value of the joint distribution of the first three tokens.

    Where a draft gives fewer, the target goes on.
    """
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    outcomes = []
    for _ in range(trials):
        draft = make(rng)
        paths = [tuple(draft.tokens[i] for i in draft.path(node)[1:]) for node in range(len(draft))]
        scores = torch.tensor(np.log([distribution(P, path) for path in paths])).float()
        verdict = accept(draft, scores, False, generator)
        tokens = (*paths[verdict.path[-1]], verdict.token)
        while len(tokens) < LENGTH:
            tokens = (*tokens, pick(rng, distribution(P, tokens)))
        outcomes.append(tokens[:LENGTH])
    return p_value(outcomes, torch.tensor(P[0][:, None, None] * P[1][:, :, None] * P[2]))


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_output_follows_the_targets_distribution(kind: str) -> None:
    assert fit(DRAFTS[kind]) > FITS


def mutant(name: str, old: str, new: str) -> Callable:
    """A function of forerun.engine.acceptance with `old` in its source made `new`."""
    source = inspect.getsource(getattr(acceptance, name))
    assert old in source, f"{name} no longer contains {old!r}: write this mutation anew"
    namespace = dict(vars(acceptance))
    exec(source.replace(old, new), namespace)
    return namespace[name]


MUTATIONS = {
    "q is ignored": ("_accept_sampled", "u[child] * q[child]", "u[child]", "sampled chain"),
    "q of another node": ("_read", "probs[i, draft", "probs[i - 1, draft", "sampled chain"),
    "one number for all nodes": ("_accept_sampled", "u[child] *", "u[0] *", "sampled chain"),
    "p of the wrong node": ("_read", "max(parent, 0)", "(parent + 1)", "sampled chain"),
    "correction from p": (
        "_accept_sampled",
        "_residual(draft, p[node], rejected), ",
        "p[node], ",
        "sampled chain",
    ),
    "no residual of siblings": (
        "_accept_sampled",
        "_residual(draft, p[node], rejected)[",
        "p[node][",
        "sampled tree",
    ),
    "residual of the last sibling only": (
        "_residual",
        "in rejected:",
        "in rejected[-1:]:",
        "sampled tree",
    ),
    "negative residual": ("_residual", ".clamp_(min=0.0)", ".abs_()", "sampled tree"),
    "points never leave": ("_residual", "rest[draft.tokens[child]] = 0.0", "pass", "point tree"),
    "points keep their mass": ("_accept_sampled", "mass -= p_at[child]", "pass", "point tree"),
    "points too welcome": ("_read", "[1.0] * len(draft)", "[0.5] * len(draft)", "point chain"),
    "a hold above 1": ("_accept_block", "min(hold[-1] * ratio, 1.0)", "hold[-1] * ratio", "block"),
    "a hold of one token": ("_accept_block", "hold[-1] * ratio", "ratio", "block"),
    "all as the last": (
        "_accept_block",
        "u[i] * (mass[i] + 1.0 - hold[i]) < mass[i]",
        "u[i] < hold[i]",
        "block",
    ),
    "a residual without the hold": (
        "_accept_block",
        "[:, None] * p[:last]",
        "[:, None] ** 0 * p[:last]",
        "block",
    ),
    "a block's correction from p": (
        "_accept_block",
        "rest[accepted] if",
        "p[accepted] if",
        "block",
    ),
    "a block's q of another node": (
        "_accept_block",
        "sub_(draft.q)",
        "sub_(draft.q.roll(1, 0))",
        "block",
    ),
    "sampled as points": ("_residual", "child <= draft.sampled", "child <= 0", "sampled tree"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new, kind = MUTATIONS[mutation]
    monkeypatch.setattr(acceptance, name, mutant(name, old, new))
    # Most are so far off that a few trials tell.
    assert any(fit(DRAFTS[kind], trials) < BROKEN for trials in (TRIALS // 3, TRIALS))


@pytest.mark.slow
def test_a_draft_that_lies_about_its_distributions_is_seen() -> None:
    assert fit(partial(tree, tell="first"), trials=3 * TRIALS) < BROKEN


def test_a_block_accepts_more() -> None:
    """Block verification accepts 11 / 9 of two tokens, not 10 / 9.

    This is the example of arXiv 2403.10444, section 2.
    """
    p = np.array([1.0, 2.0]) / 3
    q = np.array([2.0, 1.0]) / 3
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor(np.log(np.array([p] * 3)))
    sampled = torch.tensor(np.array([q] * 2))
    accepted = {True: 0, False: 0}
    for _ in range(4000):
        chain = Draft.chain(0, [pick(rng, q), pick(rng, q)], sampled)
        for whole in accepted:
            verdict = accept(replace(chain, block=whole), scores, False, generator)
            accepted[whole] += verdict.accepted
            assert (
                verdict.rejected == (verdict.accepted < 2)
                and verdict.tested == verdict.accepted + verdict.rejected
            )
    assert accepted[False] / 4000 == pytest.approx(10 / 9, abs=0.04)
    assert accepted[True] / 4000 == pytest.approx(11 / 9, abs=0.04)


def test_the_longest_prefix_of_a_block_counts() -> None:
    """To take a shorter one changes the distribution by too little for a chi-square test."""
    p = torch.tensor([[0.3, 0.6, 0.05, 0.05]] * 4)
    q = torch.tensor([[0.4, 0.2, 0.2, 0.2]] * 3)
    chain = Draft.chain(0, [0, 0, 0], q)
    for lucky in ([], [1], [2], [1, 2], [1, 2, 3]):
        u = [0.0 if node in lucky else 0.999 for node in range(4)]
        accepted, left = acceptance._accept_block(chain, p, u, [1.0, *[0.3 / 0.4] * 3])
        assert accepted == max(lucky, default=0) and (left is None) == (accepted == 3)


def test_a_block_of_the_targets_own_distributions_is_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(50):
        scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(seed)) * 3
        q = scores.softmax(-1)[:3]
        tokens = [sample(each, generator) for each in q]
        verdict = accept(Draft.chain(0, tokens, q), scores, False, generator)
        assert (verdict.accepted, verdict.rejected) == (3, False)


RULES: dict[str, Callable[[Draft, Tensor], Verdict]] = {
    "greedy": lambda draft, scores: accept(draft, scores, True, None),
    "sampled": lambda draft, scores: accept(draft, scores, False, torch.Generator().manual_seed(0)),
    "seeded": lambda draft, scores: accept_seeded(draft, scores, SeededStream(0).at),
}


@pytest.mark.parametrize("rule", RULES)
def test_counts_of_a_verdict(rule: str) -> None:
    """Probabilities of 1 leave no choice."""
    always = torch.full((3, V), -torch.inf)
    always[0, 1] = always[1, 2] = always[2, 3] = 0.0
    for draft, rows, expected in (
        (Draft.chain(0, [1, 2]), [0, 1, 2], ([0, 1, 2], 3, 2, False)),
        (
            Draft.chain(0, [2, 2]),
            [0, 1, 2],
            ([0], 1, 1, True),
        ),  # after the first rejection nothing was looked at
        (Draft([0, 3, 1, 0], [-1, 0, 0, 2]), [0, 1, 1, 1], ([0, 2], 2, 2, True)),
        (Draft.root(0), [0], ([0], 1, 0, False)),
    ):
        verdict = RULES[rule](draft, always[rows])
        assert (verdict.path, verdict.token, verdict.tested, verdict.rejected) == expected


def near_ties(size: int, generator: torch.Generator) -> Tensor:
    """Scores [size, V] in which the best tokens differ by one rounding step or not at all."""
    scores = torch.full((size, V), 3.0)
    step = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    best = torch.randint(V, (size,), generator=generator)
    scores[torch.arange(size), best] = torch.where(
        torch.rand(size, generator=generator) < 0.7, step, 3.0
    )
    return scores


def greedy_is_argmax(seed: int) -> bool:
    """Whether a random tree is walked along the argmax, as far as it goes.

    Its scores are nearly equal.
    """
    generator = torch.Generator().manual_seed(seed)
    draft = random_tree(12, V, generator)
    scores = near_ties(len(draft), generator)
    best = scores.argmax(-1).tolist()
    verdict = accept(draft, scores, True, generator)
    walked = all(
        draft.tokens[b] == best[a] for a, b in zip(verdict.path, verdict.path[1:], strict=False)
    )
    end = verdict.path[-1]
    goes_on = any(draft.tokens[child] == best[end] for child in draft.children[end])
    return walked and verdict.token == best[end] and not goes_on


def test_greedy_takes_the_argmax_at_near_ties() -> None:
    assert all(greedy_is_argmax(seed) for seed in range(200))


def test_greedy_through_ratios_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_ratio(draft: Draft, scores: Tensor, greedy: bool, generator: torch.Generator) -> Verdict:
        return acceptance._accept_sampled(draft, scores.softmax(-1), generator)

    monkeypatch.setitem(globals(), "accept", by_ratio)
    assert not all(greedy_is_argmax(seed) for seed in range(200))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.25,
            "logit_bias": {3: 2.0},
        },
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1, "repetition_penalty": 0.8},
        {
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.05,
            "presence_penalty": 1.0,
            "logit_bias": {0: -9.0},
        },
    ],
)
@pytest.mark.parametrize(
    "processors",
    [[], [hf.NoRepeatNGramLogitsProcessor(2)], [hf.RepetitionPenaltyLogitsProcessor(2.0)]],
)
def test_a_sampler_of_parameters_is_transformers_own(
    options: dict[str, Any], processors: list[LogitsProcessor]
) -> None:
    """The same processors in the same order, and the same scores to the bit."""
    lm = CausalLM(tiny("llama"))
    text = [5, 6, 7, 5, 6, 9]
    params = SamplingParams(**options)
    sampler = Sampler.of(params, 3, lm.vocab_size, processors)
    kept = {
        name: options[name]
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        if name in options
    }
    config = GenerationConfig(
        do_sample=params.temperature > 0, top_k=params.top_k, pad_token_id=0, **kept
    )
    penalties = (
        [Penalties(params.presence_penalty, params.frequency_penalty, 3)]
        if params.presence_penalty
        else []
    )
    biases = [LogitBias(params.logit_bias)] if params.logit_bias else []
    extra = LogitsProcessorList([*penalties, *biases, *processors])
    lm.model._prepare_special_tokens(config, True, device=lm.device)
    theirs = lm.model._get_logits_processor(config, 3, logits_processor=extra)
    kinds = [
        hf.TopPLogitsWarper if type(processor) is QuickTopP else type(processor)
        for processor in sampler.processors or ()
    ]
    assert kinds == [type(processor) for processor in theirs]
    assert sampler.greedy == (not params.temperature)
    logits = 4 * torch.randn(2, lm.vocab_size, generator=torch.Generator().manual_seed(0))
    wanted = theirs(torch.tensor([text] * 2), logits.clone())
    assert torch.equal(sampler.scores(logits, lambda i: text), wanted)


def test_a_bias_on_a_token_that_is_not_there() -> None:
    params = SamplingParams(logit_bias={10: 1.0})
    refuses(r"logit_bias has token ids outside 0\.\.9", Sampler.of, params, 1, 10)


PREFIX_READERS: dict[str, LogitsProcessor] = {
    "repetition": hf.RepetitionPenaltyLogitsProcessor(1.7),
    "ngram": hf.NoRepeatNGramLogitsProcessor(2),
    "length": hf.MinLengthLogitsProcessor(8, eos_token_id=1, device="cpu"),
}


@pytest.mark.parametrize("names", [["repetition"], ["ngram"], ["length"], list(PREFIX_READERS)])
def test_scores_of_a_tree_equal_those_of_its_nodes_one_by_one(names: list[str]) -> None:
    readers = [hf.TopKLogitsWarper(5), *(PREFIX_READERS[name] for name in names)]
    processors = LogitsProcessorList([hf.TemperatureLogitsWarper(0.7), *readers])
    generator = torch.Generator().manual_seed(3)
    for size in (1, 6, 30):
        draft = random_tree(size, 6, generator)
        prompt = torch.randint(6, (6,), generator=generator).tolist()
        logits = torch.randn(len(draft), 6, generator=generator)
        prefixes = [
            prompt + [draft.tokens[i] for i in draft.path(node)] for node in range(len(draft))
        ]
        before = logits.clone()
        scores = Sampler(False, processors).scores(logits, prefixes.__getitem__)
        assert logits.equal(before)
        alone = [
            processors(torch.tensor([prefix]), logits[i : i + 1].clone())[0]
            for i, prefix in enumerate(prefixes)
        ]
        assert scores.equal(torch.stack(alone))
    # In the last tree the prefix must matter: reading the root's prefix for all nodes gives other
    # scores.
    assert not Sampler(False, processors).scores(logits, lambda _: prefixes[0]).equal(scores)


def test_next_tokens_are_the_most_probable_or_sampled() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [-torch.inf, 0.0, -torch.inf]])
    for last, probabilities in ((True, None), (False, [0.0, 1.0, 0.0])):
        samplers = [Sampler(True), Sampler(last)]
        tokens, scores, distributions = next_tokens(samplers, logits, lambda _: [0], [None, None])
        assert tokens == [1, 1] and scores.equal(logits)
        assert (None if distributions is None else distributions[1].tolist()) == probabilities


@pytest.mark.parametrize("names", [[], ["warm"], ["warm", "ngram"], ["repetition"]])
def test_rows_chosen_together_are_chosen_as_alone(names: list[str]) -> None:
    known = {"warm": hf.TemperatureLogitsWarper(0.7), **PREFIX_READERS}
    processors = LogitsProcessorList([known[name] for name in names])
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    prefixes = [[1, 2, 1], [3], [0, 0, 0, 0], [5, 4], [2, 1, 2]]
    shared = Sampler(False, processors)
    for samplers in ([shared] * 5, [Sampler(row % 2 == 0, processors) for row in range(5)]):

        def choose(
            rows: range, samplers: list[Sampler] = samplers
        ) -> tuple[list[int], Tensor, Tensor | None]:
            generators = [torch.Generator().manual_seed(row) for row in rows]
            own = [samplers[row] for row in rows]
            return next_tokens(
                own, logits[rows.start : rows.stop], lambda at: prefixes[rows[at]], generators
            )

        tokens, scores, distributions = choose(range(5))
        assert distributions is not None
        for row in range(5):
            token, own, distribution = choose(range(row, row + 1))
            assert token == [tokens[row]] and own.equal(scores[row : row + 1])
            assert distribution is None or distribution.equal(distributions[row : row + 1])


@pytest.mark.parametrize("source", [None, SeededStream(0).at(0)], ids=["torch", "seeded"])
def test_a_distribution_of_nothing_is_refused(source: Source) -> None:
    for distribution in (torch.full((4,), torch.nan), torch.zeros(4)):
        refuses("no token can be sampled", sample, distribution, source)


def test_samples_follow_the_distribution_and_never_give_what_has_no_probability() -> None:
    distribution = torch.tensor([0.0, 0.5, 0.0, 1.5, 2.0, 0.0])  # not normalised
    generator = torch.Generator().manual_seed(5)
    assert p_value([[sample(distribution, generator)] for _ in range(4000)], distribution) > 1e-3


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_sums_by_blocks_sample_what_a_sum_token_by_token_does(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    p = torch.rand(size, generator=generator).pow(8)
    p[torch.rand(size, generator=generator) < 0.5] = 0.0
    p[300:800] = 0.0  # whole blocks
    p[size // 2] = 1.0
    below = p.cumsum(-1, dtype=torch.float64)
    for seed in range(500):
        number = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        expected = int(torch.searchsorted(below, number * below[-1], right=True))
        assert sample(p, torch.Generator().manual_seed(seed)) == expected and p[expected] > 0


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("least", [1, 3])
def test_quick_top_p_keeps_what_transformers_keeps(top_p: float, least: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slow = hf.TopPLogitsWarper(top_p, -9.0, least)
    fast = QuickTopP(top_p, -9.0, least)
    counts = set()
    for width in (0.1, 1.0, 5.0, 40.0):
        scores = width * torch.randn(4, 200, generator=generator)
        masked = scores.clone()
        masked[:, ::2] = -torch.inf
        for given in (scores, masked, scores.round()):  # the last has many equal ones
            kept = slow(None, given)  # type: ignore[arg-type]
            assert torch.equal(fast(None, given), kept)  # type: ignore[arg-type]
            counts |= set((kept > -9.0).sum(-1).tolist())
    assert min(counts) >= least and len(counts) > 3
    sampler = Sampler(False, LogitsProcessorList([slow]))
    assert type(sampler.processors[0]) is QuickTopP and sampler.prefix_free  # type: ignore[index]


def test_few_numbers_are_for_one_thread_and_the_others_come_back() -> None:
    before = torch.get_num_threads()
    seen = []
    torch.set_num_threads(3)
    try:
        for numbers in (threads.MAX_NUMBERS_OF_ONE_THREAD, threads.MAX_NUMBERS_OF_ONE_THREAD + 1):
            with suppress(KeyError), threads.one_thread(numbers):
                seen.append(torch.get_num_threads())
                raise KeyError
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3, 3, 3]
