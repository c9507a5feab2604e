"""Drafting by phrases (Ouroboros, arXiv 2402.13720): a forward of the draft model checks what came behind the last
token before, and the longest phrase that it says as well is drafted at once.

Ours: sampling, rows of their own lengths, length policies, and that phrases come from the prompt too. Tokens are drawn
from the draft's laws one by one as in a plain chain; phrases only spare forwards where they foresaw the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter

import torch
from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft, Tree
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.phrases import PhrasePool
from forerun.drafters.window import Window
from forerun.lengths import LengthPolicy, Look
from forerun.model import CausalLM
from forerun.sampling import Verdict, choose


@dataclass
class _Row:
    """What belongs to one sequence, and its present draft."""

    policy: LengthPolicy
    pool: PhrasePool
    window: Window | None
    learnt: int  # up to where its text is in the pool
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    suffixes: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)  # phrases and their nodes
    policy_seconds: float = 0.0


class OuroborosDrafter(ChainDrafter):
    """A chain from the draft model, as long as the policy says, several tokens a forward where phrases fit; up to
    `suffixes` phrases hang behind its end as branches, for which the draft model does nothing.

    With a shared `pool` phrases outlive the call; without one every sequence has its own.
    """

    def __init__(
        self,
        model: CausalLM,
        policy: Callable[[], LengthPolicy],
        vocab_size: int | None = None,
        *,
        width: int,
        guesses: int,
        shape: tuple[int, int],
        suffixes: int,
        sources: Collection[str],
        pool: PhrasePool | None = None,
    ) -> None:
        """`width` of the window, 0 for none; `guesses`: phrases that a forward checks at most; `shape`: the length of
        phrases, and how many a token has at most. Sequences have policies of their own, which `policy` makes."""
        super().__init__(model, policy(), vocab_size)
        self.make_policy, self.width, self.guesses, self.shape = policy, width, guesses, shape
        self.suffixes, self.sources, self.pool = suffixes, sources, pool

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self._run_prompts(seqs)
        self.rows = []
        for seq in seqs:
            pool = PhrasePool(*self.shape) if self.pool is None else self.pool
            window = Window(self.width, self.shape[0], seq.tokens, Random(0)) if self.width else None
            row = _Row(self.make_policy(), pool, window, 0 if "prompt" in self.sources else len(seq.tokens) - 1)
            row.policy.start([seq])
            if row.learnt == 0:
                row.learnt = pool.learn(seq.tokens)
            self.rows.append(row)

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        depths = self._depths(seqs)
        for row in self.rows:
            row.tokens, row.laws, row.suffixes, row.policy_seconds = [], [], [], 0.0
        forwards, seconds = 0, 0.0
        going = [depth > 0 for depth in depths]
        while any(going):
            trees = [self._tree(at, seqs[at], depths[at]) if on else None for at, on in enumerate(going)]
            begun = perf_counter()
            logits = self.model.forward([tree.draft() if tree is not None else None for tree in trees])
            seconds += perf_counter() - begun
            forwards += 1
            paths: list[list[int]] = [[] for _ in seqs]
            for at, tree in enumerate(trees):
                if tree is not None:
                    going[at], paths[at] = self._walk(at, seqs[at], tree, logits[at], depths[at])
            self.model.commit(paths)
        drafts = [self._with_suffixes(row, seq) for row, seq in zip(self.rows, seqs, strict=True)]
        return Proposal(drafts, forwards, seconds, sum(row.policy_seconds for row in self.rows))

    def _tree(self, at: int, seq: Generation, depth: int) -> Tree:
        """What the draft model has not run of a sequence and its draft, and guesses of how it goes on."""
        row, length = self.rows[at], self.model.cache.lengths[at]
        pending = [*seq.tokens[length:], *row.tokens[max(0, length - len(seq.tokens)) :]]
        tree = Tree(Draft.chain(pending[0], pending[1:]))
        tip = len(pending) - 1
        left = depth - len(row.tokens) - 1  # as the forward gives one token more
        for phrase in row.pool.get(pending[-1], self.guesses):
            tree.branch(tip, self._known(phrase[:left]), "phrase")
        if row.window is not None:
            row.window.plant(tree, tip, len(seq.tokens) + len(row.tokens), left)
        return tree

    def _known(self, phrase: Sequence[int]) -> Sequence[int]:
        """A phrase, or nothing where the draft model has no embeddings for it."""
        return phrase if self._knows(phrase or [0]) else ()

    def _walk(self, at: int, seq: Generation, tree: Tree, logits: Tensor, depth: int) -> tuple[bool, list[int]]:
        """Drafts as long as the tree foresaw it: whether to go on, and the nodes to keep."""
        row, sampler = self.rows[at], seq.sampler
        node = len(seq.tokens) + len(row.tokens) - self.model.cache.lengths[at] - 1
        path = list(range(node + 1))
        logits = self._fitted(logits)
        at_once = sampler.greedy and sampler.prefix_free
        scores = sampler.scores(logits, lambda _: []) if at_once else logits
        best = scores.argmax(-1).tolist() if at_once or row.window is not None else []
        hidden = self.model.hidden
        while True:
            here = scores[node : node + 1]
            if at_once:
                token, law = best[node], None
            else:
                (token,), here, law = choose([sampler], here, lambda _: [*seq.tokens, *row.tokens], [seq.generator])
            row.tokens.append(token)
            if law is not None:
                row.laws.append(law[0])
            asked = perf_counter()
            look = Look([0], [row.tokens], here, hidden[at, node][None] if hidden is not None else None)
            (more,) = row.policy.more(look)
            row.policy_seconds += perf_counter() - asked
            going = more and len(row.tokens) < depth and token not in seq.eos and self._knows([token])
            child = tree.child(node, token)
            if not going or child is None:
                break
            node = child
            path.append(node)
        if row.window is not None:
            for key, phrase in row.window.harvest(best):
                row.pool.add(key, phrase)
        return going, path

    def _with_suffixes(self, row: _Row, seq: Generation) -> Draft:
        chain = Draft.chain(seq.tokens[-1], row.tokens, torch.stack(row.laws) if row.laws else None)
        room = seq.room - 1 - len(row.tokens)
        if not self.suffixes or room < 1 or chain.tokens[-1] in seq.eos:
            return chain
        tree = Tree(chain)
        for phrase in row.pool.get(chain.tokens[-1], self.suffixes):
            row.suffixes.append((phrase, tree.branch(len(row.tokens), phrase[:room], "phrase")))
        return tree.draft()

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        for at, (row, seq, draft, verdict) in enumerate(zip(self.rows, seqs, drafts, verdicts, strict=True)):
            # The policy answers for the chain; what became of phrases behind it is none of its doing.
            of_chain = replace(verdict, rejected=verdict.rejected and verdict.accepted < len(row.tokens))
            row.policy.observe([draft], [of_chain], hidden[at : at + 1] if hidden is not None else None)
            self._feed_back(row, draft, verdict.best)
            if verdict.accepted < len(row.tokens) and "rejected" in self.sources:
                self._learn_rejected(row, draft, verdict)
            if "output" in self.sources:
                row.learnt = row.pool.learn(seq.tokens, row.learnt)
            row.tokens, row.suffixes = [], []  # a step without a draft may follow
        self._crop(seqs)

    def _learn_rejected(self, row: _Row, draft: Draft, verdict: Verdict) -> None:
        """From the rejected token on, what the target says behind each token of the chain."""
        span = self.shape[0]
        for node in range(verdict.accepted + 1, len(row.tokens) - span + 2):
            row.pool.add(draft.tokens[node], verdict.best[node : node + span])

    def _feed_back(self, row: _Row, draft: Draft, best: list[int]) -> None:
        """Phrases behind the chain become what the target says there, whether or not it came so far (the original does
        this where it did)."""
        chain = len(row.tokens)
        for phrase, nodes in row.suffixes if "suffixes" in self.sources else ():
            if len(nodes) == self.shape[0]:
                row.pool.drop(draft.tokens[chain], phrase)
                row.pool.add(draft.tokens[chain], [best[node] for node in (chain, *nodes[:-1])])

    def keep(self, rows: list[int]) -> None:
        self.model.keep(rows)
        self.rows = [self.rows[row] for row in rows]
