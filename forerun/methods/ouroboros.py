"""Drafting by phrases (Ouroboros, arXiv 2402.13720): a forward of the draft model checks what followed the last token
before, and the longest phrase that it would choose as well is drafted at once.

Ours: sampling, rows of their own lengths, length policies, and phrases from the prompt. Tokens are sampled from the
draft's distributions one by one as in a plain chain; phrases only spare forwards where they foresaw the tokens.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft, Tree
from forerun.engine.step import Drafter, Proposal
from forerun.methods.base import Parts, Sampling, at_least, between, true_or_false
from forerun.methods.chain import Chain, ChainDrafter, Drafting, FixedLength
from forerun.methods.later import pools, probabilities, sampling
from forerun.methods.pacer import Pacer
from forerun.methods.stop import DraftState, LengthPolicy, StopRule
from forerun.methods.window import Window

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.sequence import Mode, Sequence
    from forerun.methods.pools import PhrasePool
    from forerun.model.causal_lm import CausalLM

SOURCES = ("prompt", "output", "rejected", "suffixes")  # of phrases, beside the window


@dataclass(frozen=True)
class _Phrases(Sampling, Drafting):
    """Settings of drafting by phrases: a window of `window` columns (0: none), at most `guesses` phrases of `ngram` - 1
    tokens in a draft's forward, and up to `suffixes` of them behind the draft. `sources` are those of phrases, with +
    between them. `warm`: phrases of greedy output outlive it."""

    window: int = 0
    guesses: int = 1
    ngram: int = 5
    suffixes: int = 1
    sources: str = "prompt+output+rejected+suffixes"
    warm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("window", self.window, 0)
        at_least("guesses", self.guesses, 0)
        at_least("ngram", self.ngram, 2)
        at_least("suffixes", self.suffixes, 0)
        true_or_false("warm", self.warm)
        if not isinstance(self.sources, str):
            raise ValueError(f"sources must be names with + between them, not {self.sources!r}")
        for source in filter(None, self.sources.split("+")):
            if source not in SOURCES:
                raise ValueError(f"sources must be of {'+'.join(SOURCES)}, not {source!r}")

    @property
    def any_tokenizer(self) -> bool:
        return False  # a phrase has tokens that target and draft must share

    @property
    def phrases(self) -> tuple[int, int]:
        return self.ngram - 1, max(self.guesses, self.suffixes, 1)

    def build(self, parts: Parts) -> Drafter:
        assert parts.draft is not None
        return OuroborosDrafter(
            parts.draft,
            self.policy(parts),
            parts.target.vocab_size,
            self.verification == "block",
            width=self.window,
            guesses=self.guesses,
            shape=self.phrases,
            suffixes=self.suffixes,
            sources=self.sources.split("+"),
            pool=parts.pool(self.phrases) if self.warm else None,
            most_greedy=self.most_greedy,
        )

    @property
    def most_greedy(self) -> int | None:
        """Greedy sequences that are drafted by phrases beside each other, at most; None for any number."""
        return None


@dataclass(frozen=True)
class Ouroboros(_Phrases):
    """Drafts `gamma` tokens, several a forward where phrases foresaw them (arXiv 2402.13720)."""

    gamma: int = 10
    name: ClassVar[str] = "ouroboros"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("gamma", self.gamma, 1)

    def policy(self, parts: Parts) -> LengthPolicy:
        return FixedLength(self.gamma)


@dataclass(frozen=True)
class PacerOuroboros(_Phrases, Pacer):
    """Pacer's rule on drafts by phrases. Its costs assume `share` forwards for a drafted token.

    In steps of more than `rows` greedy sequences these go without phrases: each saves forwards at other places than its
    neighbours, and checking phrases makes forwards larger.
    """

    ngram: int = 9
    suffixes: int = 0  # a draft that the layer has ended is hardly ever accepted to its end
    share: float = 0.3
    rows: int = 3
    name: ClassVar[str] = "pacer-ouroboros"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("share", self.share, 0, 1)
        at_least("rows", self.rows, 1)

    @property
    def most_greedy(self) -> int:
        return self.rows

    def costs(self, parts: Parts, mode: Mode, rows: int) -> Costs | None:
        costs = parts.costs
        if costs is None or rows > self.rows:
            return costs
        ms = self.share * costs.drafting(1 + (self.guesses + self.window) * (self.ngram - 1))
        return replace(costs, draft={1: ms}, chained=0.0, chained_sampled=0.0)


@dataclass
class _Row:
    """What belongs to one sequence.

    Attributes:
        learnt: up to where its text is in the pool.
        chain: how many tokens of the present draft come from the draft model; None where it was made without phrases.
        suffixes: phrases behind it, and their nodes.
    """

    pool: PhrasePool
    window: Window | None
    learnt: int
    chain: int | None = None
    suffixes: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


@dataclass
class _Phrased(Chain):
    """A draft in the making, with the rule that ends it."""

    rule: StopRule | None = None
    policy_seconds: float = 0.0


class OuroborosDrafter(ChainDrafter):
    """A chain from the draft model, as long as the policy says, several tokens a forward where phrases fit; up to
    `suffixes` phrases hang behind its end as branches, for which the draft model does nothing.

    Where a step has more than `most_greedy` greedy sequences, these are drafted in step without phrases: each would
    save forwards at other places than its neighbours, and checking phrases makes forwards larger.

    With a `pool` the phrases of greedy sequences outlive them. Every other sequence has a pool of its own: phrases
    behind a draft use up random numbers.
    """

    def __init__(
        self,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int | None = None,
        block: bool = True,
        *,
        width: int,
        guesses: int,
        shape: tuple[int, int],
        suffixes: int,
        sources: Collection[str],
        pool: PhrasePool | None = None,
        most_greedy: int | None = None,
    ) -> None:
        """`width` of the window, 0 for none; `guesses`: phrases that a forward checks at most; `shape`: the length of
        phrases, and how many a token has at most."""
        super().__init__(model, policy, vocab_size, block)
        self.width, self.guesses, self.shape = width, guesses, shape
        self.suffixes, self.sources, self.pool, self.most_greedy = suffixes, sources, pool, most_greedy
        self.slack, self.spread = (width + guesses) * shape[0], suffixes * shape[0]
        self.rows: dict[int, _Row] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from super().admit(seq, hidden, chunk)
        shared = self.pool if seq.greedy and seq.shares else None
        pool = shared if shared is not None else pools.PhrasePool(*self.shape)
        window = Window(self.width, self.shape[0], seq.tokens, Random(0)) if self.width else None
        learnt = pool.learn(seq.tokens) if "prompt" in self.sources else len(seq.tokens) - 1
        self.rows[seq.id] = _Row(pool, window, learnt)

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self.rows.pop(seq.id, None)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        greedy = sum(seq.greedy for seq in seqs)
        wide = self.most_greedy is not None and greedy > self.most_greedy
        for seq in seqs:
            self.rows[seq.id].chain, self.rows[seq.id].suffixes = None, []
        plain = [Chain(seq, self._depth(seq), block=self.block) for seq in seqs if wide and seq.greedy]
        phrased = [_Phrased(seq, self._depth(seq), block=self.block) for seq in seqs if not (wide and seq.greedy)]
        proposals = [self._grow(plain, greedy)] if plain else []
        if phrased:
            proposals.append(self._grow_by_phrases(phrased))
        drafts = {
            chain.seq.id: draft
            for chain, draft in zip([*plain, *phrased], [d for each in proposals for d in each.drafts], strict=True)
        }
        return Proposal.together([drafts[seq.id] for seq in seqs], proposals)

    def _grow_by_phrases(self, chains: list[_Phrased]) -> Proposal:
        """Drafts for all chains, each at its own pace."""
        going = [chain for chain in chains if chain.depth > 0]
        for chain in going:
            chain.rule = self.policy.begin([chain.seq], 1)
        self._open.update(chain.seq.id for chain in going)
        forwards, seconds = 0, 0.0
        while going:
            ids = [chain.seq.id for chain in going]
            trees = [self._tree(chain) for chain in going]
            begun = perf_counter()
            logits, hidden = self.model.forward(ids, [tree.draft() for tree in trees], self.capture)
            seconds += perf_counter() - begun
            forwards += 1
            walks = [
                self._walk(chain, tree, logits[row], hidden[row] if hidden is not None else None)
                for row, (chain, tree) in enumerate(zip(going, trees, strict=True))
            ]
            self.model.commit(ids, [path for _, path in walks])
            going = [chain for chain, (on, _) in zip(going, walks, strict=True) if on]
        drafts = [self._with_suffixes(chain) for chain in chains]
        return Proposal(drafts, forwards, seconds, sum(chain.policy_seconds for chain in chains))

    def _tree(self, chain: _Phrased) -> Tree:
        """What the draft model has not run of a sequence and its draft, and guesses of how it goes on."""
        seq, row = chain.seq, self.rows[chain.seq.id]
        pending = chain.pending(self.model.length(seq.id))
        tree = Tree(Draft.chain(pending[0], pending[1:]))
        tip = len(pending) - 1
        left = chain.depth - len(chain.tokens) - 1  # as the forward gives one token more
        for phrase in row.pool.get(pending[-1], self.guesses):
            tree.branch(tip, self._known(phrase[:left]), "phrase")
        if row.window is not None:
            row.window.plant(tree, tip, len(seq.tokens) + len(chain.tokens), left)
        return tree

    def _known(self, phrase: abc.Sequence[int]) -> abc.Sequence[int]:
        """A phrase, or nothing where the draft model has no embeddings for it."""
        return phrase if self._knows(phrase or [0]) else ()

    def _walk(self, chain: _Phrased, tree: Tree, logits: Tensor, hidden: Tensor | None) -> tuple[bool, list[int]]:
        """Drafts as long as the tree foresaw it: whether to go on, and the nodes to keep.

        `logits` [N, V] and `hidden` [N, d] of the tree's nodes."""
        seq, sampler, row = chain.seq, chain.seq.sampler, self.rows[chain.seq.id]
        node = len(seq.tokens) + len(chain.tokens) - self.model.length(seq.id) - 1
        path = list(range(node + 1))
        logits = self._fitted(logits)
        at_once = sampler.greedy and sampler.prefix_free
        scores = sampler.scores(logits, lambda _: []) if at_once else logits
        best = probabilities.argmax_of(scores).tolist() if at_once or row.window is not None else []
        while True:
            here, q = scores[node : node + 1], None
            if at_once:
                token = best[node]
            else:
                try:
                    source = seq.source(len(chain.tokens))
                    (token,), here, q = sampling.next_tokens([sampler], here, lambda _: chain.text(), [source])
                except sampling.RowError:  # nothing is left to draft
                    return False, path
            chain.tokens.append(token)
            if q is not None and chain.is_drawn:
                chain.q.append(q[0])
            assert chain.rule is not None
            asked = perf_counter()
            (more,) = chain.rule.more(
                DraftState([seq], [chain.tokens], here, hidden[node][None] if hidden is not None else None)
            )
            chain.policy_seconds += perf_counter() - asked
            going = more and self._goes_on(chain)
            child = tree.child(node, token)
            if not going or child is None:
                break
            node = child
            path.append(node)
        if row.window is not None:
            for key, phrase in row.window.harvest(best):
                row.pool.add(key, phrase)
        return going, path

    def _with_suffixes(self, chain: _Phrased) -> Draft:
        draft, row, count = chain.draft(), self.rows[chain.seq.id], len(chain.tokens)
        row.chain = count
        room = chain.seq.remaining - 1 - count
        if not self.suffixes or room < 1 or draft.tokens[-1] in chain.seq.eos or chain.seq.error is not None:
            return draft
        tree = Tree(draft)
        for phrase in row.pool.get(draft.tokens[-1], self.suffixes):
            row.suffixes.append((phrase, tree.branch(count, phrase[:room], "phrase")))
        return tree.draft()

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        of_chains = []
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            row = self.rows[seq.id]
            count = draft.drafted if row.chain is None else row.chain
            # The policy answers for the chain, not for the phrases behind it.
            of_chains.append(replace(verdict, rejected=verdict.rejected and verdict.accepted < count))
            if row.chain is None or not verdict.argmax:  # one whose processor raised has none
                continue
            self._feed_back(row, draft, verdict.argmax)
            if verdict.accepted < count and "rejected" in self.sources:
                self._learn_rejected(row, draft, verdict)
            if "output" in self.sources:
                row.learnt = row.pool.learn(seq.tokens, row.learnt)
            row.chain, row.suffixes = None, []  # a step without a draft may follow
        self.policy.observe(seqs, drafts, of_chains, hidden)
        self._crop(seqs)

    def _learn_rejected(self, row: _Row, draft: Draft, verdict: Verdict) -> None:
        """From the rejected token on, the target's tokens behind each token of the chain."""
        assert row.chain is not None
        span = self.shape[0]
        for node in range(verdict.accepted + 1, row.chain - span + 2):
            row.pool.add(draft.tokens[node], verdict.argmax[node : node + span])

    def _feed_back(self, row: _Row, draft: Draft, argmax: list[int]) -> None:
        """Phrases behind the chain become the target's tokens there, whether or not it came so far (the original does
        this where it did)."""
        assert row.chain is not None
        for phrase, nodes in row.suffixes if "suffixes" in self.sources else ():
            if len(nodes) == self.shape[0]:
                row.pool.drop(draft.tokens[row.chain], phrase)
                row.pool.add(draft.tokens[row.chain], [argmax[node] for node in (row.chain, *nodes[:-1])])
