"""Drafts: token trees under the last committed token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A token tree. Node 0 is the root: the last committed token, which the target has not run yet.

    Attributes:
        tokens: [N] of the nodes.
        parents: [N] index of each node's parent, smaller than the node's own; -1 for the root.
        q: [S, V] the distributions that nodes 1..S were sampled from, each on condition that its
            earlier siblings were rejected. Later nodes are point masses, and all are if `q` is
            None.
        origins: [N] the source of each token, for statistics and display.
        block: whether to use block verification (`forerun.engine.acceptance.accept`).
    """

    tokens: list[int]
    parents: list[int]
    q: Tensor | None = None
    origins: list[str] = field(default_factory=list)
    block: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1 and self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        assert self.q is None or len(self.q) < len(self.tokens)
        if not self.origins:
            object.__setattr__(self, "origins", ["draft"] * len(self.tokens))
        assert len(self.origins) == len(self.tokens)

    @classmethod
    def root(cls, token: int) -> Draft:
        """Return the empty draft: the target's forward adds one token, as in plain decoding.

        `Drafter.propose` says when there is nothing more to propose.
        """
        return cls([token], [-1])

    @classmethod
    def chain(
        cls, root: int, tokens: Sequence[int], q: Tensor | None = None, origin: str = "draft"
    ) -> Draft:
        """Return a chain.

        Its tokens were sampled from the distributions `q` [len(tokens), V]. Without `q` they are
        point masses.
        """
        parents = list(range(-1, len(tokens)))
        origins = [origin] * (len(tokens) + 1)
        return cls([root, *tokens], parents, q, origins, block=q is not None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens."""
        return len(self.tokens) - 1

    @property
    def sampled(self) -> int:
        """Return the number of nodes that were sampled from a distribution."""
        return 0 if self.q is None else len(self.q)

    @property
    def is_chain(self) -> bool:
        """Return whether each node is the parent of the next one."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @cached_property
    def is_block(self) -> bool:
        """Return whether block verification is wanted and possible.

        It is possible if the sampled tokens are a chain of at least two.
        """
        chain = all(self.children[node] == [node + 1] for node in range(self.sampled))
        return self.block and self.sampled > 1 and chain

    @cached_property
    def children(self) -> list[list[int]]:
        """Return the children of each node, in the order in which they are tested."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], 1):
            below[parent].append(node)
        return below

    @cached_property
    def depths(self) -> list[int]:
        """Return each node's distance [N] from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def part(self, nodes: Sequence[int]) -> Draft:
        """Return the tree of some nodes in their order, the root and each one's parent included."""
        places = {node: place for place, node in enumerate(nodes)}
        sampled = [node - 1 for node in nodes if 0 < node <= self.sampled]
        q = self.q[sampled] if self.q is not None and sampled else None
        return Draft(
            [self.tokens[node] for node in nodes],
            [-1 if node == 0 else places[self.parents[node]] for node in nodes],
            q,
            [self.origins[node] for node in nodes],
            self.block,
        )

    def mask(self) -> Tensor:
        """Return the attention mask [N, N] bool.

        Node i sees node j if j is on the path from the root to i. The mask is made of bytes,
        because calls of torch for each row would take longer than a small model's forward.
        """
        size = len(self)
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parents):
            row = bytearray(rows[parent]) if node else bytearray(size)
            row[node] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(size, size)

    def merge(self, other: Draft) -> Draft:
        """Return both trees as one, this one's nodes first; common paths are kept once.

        `other` must consist of point masses. A sibling that repeats a sampled token is dropped,
        because the residual after the rejection of that token does not contain it.
        """
        assert other.q is None and other.tokens[0] == self.tokens[0]
        tree = Tree(self)
        # Siblings depend on sampled tokens, so one rule must hold with and without them.
        tree.block = False
        moved = [0]
        for node in range(1, len(other)):
            parent = moved[other.parents[node]]
            moved.append(tree.add(parent, other.tokens[node], other.origins[node]))
        return tree.draft()


class Tree:
    """A growing draft of point masses; a path that is added twice is kept once."""

    def __init__(self, draft: Draft) -> None:
        """Begin with a copy of a draft."""
        self.tokens = list(draft.tokens)
        self.parents = list(draft.parents)
        self.origins = list(draft.origins)
        self.q = draft.q
        self.block = draft.block
        # {(parent, token): node}; of siblings with one token only the first can be accepted
        self._place: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            self._place.setdefault(key, node)

    def add(self, parent: int, token: int, origin: str) -> int:
        """Return the child of `parent` with that token, added if need be."""
        node = self._place.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.origins.append(origin)
        return node

    def branch(self, parent: int, tokens: Sequence[int], origin: str) -> list[int]:
        """Return the nodes of a path of tokens after `parent`, added if need be."""
        nodes = []
        for token in tokens:
            parent = self.add(parent, token, origin)
            nodes.append(parent)
        return nodes

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` with that token, or None."""
        return self._place.get((parent, token))

    def draft(self) -> Draft:
        """Return the tree so far."""
        return Draft(list(self.tokens), list(self.parents), self.q, list(self.origins), self.block)
