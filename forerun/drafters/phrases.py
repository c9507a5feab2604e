"""Drafting by phrases (Ouroboros, arXiv 2402.13720). A forward of the draft model checks phrases, token strings that
followed the last token earlier, and the longest that it would choose itself is drafted at once.

Ours: sampling, a length for each row, length policies, and phrases from the prompt. Tokens are sampled from the draft's
distributions one by one, as in a plain chain; a phrase with the same tokens only saves forwards.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from forerun.drafters.model_chain import Chain, ChainDrafter
from forerun.drafters.pools import PhrasePool
from forerun.engine.draft import Draft, Tree
from forerun.engine.step import Proposal
from forerun.methods.phrases import PacerOuroboros, Phrases
from forerun.planning.cost_model import mean_context
from forerun.planning.forecast import StepSituation
from forerun.planning.source_chooser import PhraseChooser
from forerun.planning.stop_rules import DraftState, LengthPolicy, StopRule
from forerun.sampling import probabilities
from forerun.sampling import sampler as sampling

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.cost_model import Costs


@dataclass
class _Row:
    """The state of one sequence: its pool, and the length of its text that is in the pool."""

    pool: PhrasePool
    read: int


@dataclass
class _Phrased(Chain):
    """A chain in the making by phrases.

    Attributes:
        suffixes: phrases after the chain, and their nodes.
    """

    rule: StopRule | None = None
    policy_seconds: float = 0.0
    suffixes: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class PhraseNote:
    """What is kept of a chain that was made with phrases.

    Attributes:
        count: the number of its tokens, without those of phrases after it.
        suffixes: the phrases after it, and their nodes.
    """

    count: int
    suffixes: list[tuple[tuple[int, ...], list[int]]]


@dataclass(frozen=True)
class PhraseMemo:
    """What a drafter by phrases keeps of a step until it observes it: notes by sequence."""

    notes: dict[int, PhraseNote]


class OuroborosDrafter(ChainDrafter):
    """Draft a chain with the draft model, ended by the length policy, several tokens a forward if phrases fit."""

    def __init__(
        self,
        settings: Phrases,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int | None = None,
        pool: PhrasePool | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Take over a draft model. `pool`: the phrases that greedy sequences share. `costs`, if known, tell where
        plain chains draft more tokens a ms than forwards with phrases."""
        super().__init__(model, policy, vocab_size)
        self.settings, self.pool = settings, pool
        self.span = settings.phrases[0]
        self.chooser = PhraseChooser(costs, self.span, settings.guesses)
        self.slack, self.spread = settings.guesses * self.span, settings.suffixes * self.span
        self.rows: dict[int, _Row] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from super().admit(seq, hidden, chunk)
        shared = self.pool if seq.greedy and seq.shares else None
        pool = shared if shared is not None else PhrasePool(*self.settings.phrases)
        self.rows[seq.id] = _Row(pool, pool.learn(seq.tokens))

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self.rows.pop(seq.id, None)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        greedy = sum(seq.greedy for seq in seqs)
        situation = StepSituation(max(1, greedy), mean_context(seqs))
        wide = not self.chooser.tries_phrases(situation)
        plain = [Chain(seq, self._depth(seq)) for seq in seqs if wide and seq.greedy]
        phrased = [_Phrased(seq, self._depth(seq)) for seq in seqs if not (wide and seq.greedy)]
        proposals = [self._grow(plain, greedy)] if plain else []
        if phrased:
            proposals.append(self._grow_by_phrases(phrased))
        drafts = {
            chain.seq.id: draft
            for chain, draft in zip(
                [*plain, *phrased], [d for each in proposals for d in each.drafts], strict=True
            )
        }
        memo = PhraseMemo(
            {chain.seq.id: PhraseNote(len(chain.tokens), chain.suffixes) for chain in phrased}
        )
        return Proposal.together([drafts[seq.id] for seq in seqs], proposals, memo)

    def _grow_by_phrases(self, chains: list[_Phrased]) -> Proposal:
        going = [chain for chain in chains if chain.depth > 0]
        for chain in going:
            chain.rule = self.policy.begin([chain.seq], 1)
        self._open.update(chain.seq.id for chain in going)
        forwards, seconds = 0, 0.0
        while going:
            ids = [chain.seq.id for chain in going]
            trees, drafted = (
                [self._tree(chain) for chain in going],
                [len(chain.tokens) for chain in going],
            )
            begun = perf_counter()
            logits, _ = self.model.forward(ids, [tree.draft() for tree in trees])
            seconds += perf_counter() - begun
            forwards += 1
            walks = [
                self._walk(chain, tree, own)
                for chain, tree, own in zip(going, trees, logits, strict=True)
            ]
            self.model.commit(ids, [path for _, path in walks])
            for chain, tree, before in zip(going, trees, drafted, strict=True):
                if "phrase" in tree.origins:
                    self.chooser.observe(len(chain.tokens) - before)
            going = [chain for chain, (on, _) in zip(going, walks, strict=True) if on]
        drafts = [self._with_suffixes(chain) for chain in chains]
        return Proposal(drafts, forwards, seconds, sum(chain.policy_seconds for chain in chains))

    def _tree(self, chain: _Phrased) -> Tree:
        """Return the tokens of a sequence and its draft that the draft model has not run, with phrases after them."""
        seq, row = chain.seq, self.rows[chain.seq.id]
        pending = chain.pending(self.model.length(seq.id))
        tree = Tree(Draft.chain(pending[0], pending[1:]))
        tip = len(pending) - 1
        left = chain.depth - len(chain.tokens) - 1  # the forward itself gives one more token
        for phrase in row.pool.get(pending[-1], self.settings.guesses):
            tree.branch(tip, self._known(phrase[:left]), "phrase")
        return tree

    def _known(self, phrase: abc.Sequence[int]) -> abc.Sequence[int]:
        return phrase if self._knows(phrase or [0]) else ()

    def _walk(self, chain: _Phrased, tree: Tree, logits: Tensor) -> tuple[bool, list[int]]:
        """Draft tokens while the tree contains them; return whether to go on, and the nodes to keep. `logits` [N, V]
        are of the tree's nodes."""
        seq, sampler = chain.seq, chain.seq.sampler
        node = len(seq.tokens) + len(chain.tokens) - self.model.length(seq.id) - 1
        path = list(range(node + 1))
        logits = self._fitted(logits)
        at_once = sampler.greedy and sampler.prefix_free
        scores = sampler.scores(logits, lambda _: []) if at_once else logits
        best = probabilities.argmax_of(scores).tolist() if at_once else []
        while True:
            here, q = scores[node : node + 1], None
            if at_once:
                token = best[node]
            else:
                try:
                    source = seq.source(len(chain.tokens))
                    (token,), here, q = sampling.next_tokens(
                        [sampler], here, lambda _: chain.text(), [source]
                    )
                except sampling.RowError:  # no token is left to draft
                    return False, path
            chain.add(token, None if q is None else q[0])
            assert chain.rule is not None
            asked = perf_counter()
            (more,) = chain.rule.more(DraftState([seq], [chain.tokens], here))
            chain.policy_seconds += perf_counter() - asked
            going = more and self._goes_on(chain)
            child = tree.child(node, token)
            if not going or child is None:
                return going, path
            node = child
            path.append(node)

    def _with_suffixes(self, chain: _Phrased) -> Draft:
        draft, row, count = chain.draft(), self.rows[chain.seq.id], len(chain.tokens)
        remaining = chain.seq.remaining - 1 - count
        is_over = remaining < 1 or draft.tokens[-1] in chain.seq.eos or chain.seq.error is not None
        if is_over or not self.settings.suffixes:
            return draft
        tree = Tree(draft)
        for phrase in row.pool.get(draft.tokens[-1], self.settings.suffixes):
            chain.suffixes.append((phrase, tree.branch(count, phrase[:remaining], "phrase")))
        return tree.draft()

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: PhraseMemo | None) -> None:
        of_chains = []
        for outcome in outcomes:
            seq, draft, verdict = outcome.sequence, outcome.draft, outcome.verdict
            row = self.rows[seq.id]
            note = memo.notes.get(seq.id) if memo is not None else None
            count = draft.drafted if note is None else note.count
            # The policy observes the chain, not the phrases after it.
            is_rejected = verdict.rejected and verdict.accepted < count
            of_chains.append(replace(outcome, verdict=replace(verdict, rejected=is_rejected)))
            if note is None or not verdict.argmax:  # empty if a processor raised
                continue
            # Phrases after the chain give way to the target's tokens there, even if it was rejected before (unlike the
            # original); after each of its tokens from a rejected one on the target's are phrases too.
            for phrase, nodes in note.suffixes:
                if len(nodes) == self.span:
                    row.pool.drop(draft.tokens[count], phrase)
                    row.pool.add(
                        draft.tokens[count],
                        [verdict.argmax[node] for node in (count, *nodes[:-1])],
                    )
            for node in range(verdict.accepted + 1, count - self.span + 2):
                row.pool.add(draft.tokens[node], verdict.argmax[node : node + self.span])
            row.read = row.pool.learn(seq.tokens, row.read)
        self.policy.observe(of_chains)
        self._crop([outcome.sequence for outcome in outcomes])


def costs_by_phrases(settings: PacerOuroboros, costs: Costs) -> Costs:
    """Return the costs of chains that are drafted in `settings.share` forwards with phrases per token."""
    ms = settings.share * costs.drafting(1 + settings.guesses * (settings.ngram - 1))
    far = costs_by_phrases(settings, costs.far) if costs.far is not None else None
    return replace(costs, draft={1: ms}, chained=0.0, chained_sampled=0.0, far=far)
