"""All bits of forwards of many tokens beside those of decoding one by one.

One text is decoded token by token, once, by the machine's best instruction set and one thread. Its
keys and values, and a digest of each token's logits, are what everything else is compared with:
`Reference`. A case (`Cases`) is a way to run tokens of that text, and others beside it, after a
beginning of a given length. Its number and the seed decide all of it, so that one case can be run
again alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd
from typing import Any

import torch
from torch import Tensor

from forerun.csrc.library import library, variants
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM

MULTIPLES = (8, 16, 32, 64, 256)  # contexts are near multiples of these
LONGEST = 2100  # tokens of a context, at most
MOST_TOKENS = 64  # new tokens of a row, at most
THREADS = 3  # at most
CHUNK = 8  # a case of `size` n reads its prompt in chunks of 8 n - 7 to 8 n tokens
KINDS = ("chain", "tree", "chunks", "batch", "walk")
STEPS = 6  # of a walk
BATCH_ROWS = 6  # of a batch or a walk, at most
GOLDEN = 0.6180339887
ROW = 0  # the row of a case that has one row


class DifferenceError(Exception):
    """Bits differ from those of decoding one by one. The text says which and where."""


@dataclass(frozen=True)
class Case:
    """A way to run `size` tokens after `context` others, by a variant and a number of threads."""

    number: int
    kind: str
    variant: str
    threads: int
    context: int
    size: int


def contexts(longest: int = LONGEST, multiples: Sequence[int] = MULTIPLES) -> list[int]:
    """Return all lengths up to `longest` that are a multiple, one less or one more."""
    near: set[int] = set()
    for multiple in multiples:
        for length in range(0, longest + 1, multiple):
            near |= {length - 1, length, length + 1}
    return sorted(length for length in near if 1 <= length <= longest)


def some_text(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return random tokens with phrases that come again.

    Real texts have such phrases, and attention finds them.
    """
    numbers = random.Random(seed)
    text: list[int] = []
    while len(text) < length:
        if len(text) > 40 and numbers.random() < 0.3:
            start = numbers.randrange(len(text) - 20)
            text += text[start : start + numbers.randrange(4, 20)]
        else:
            text += [numbers.randrange(vocabulary) for _ in range(numbers.randrange(4, 20))]
    return text[:length]


def some_parents(size: int, numbers: random.Random) -> list[int]:
    """Return the parents of a random tree.

    Most nodes continue the last one, because deep paths cross more tiles.
    """
    deep = numbers.random()
    later = [
        node - 1 if numbers.random() < deep else numbers.randrange(node) for node in range(1, size)
    ]
    return [-1, *later]


def digests(logits: Tensor) -> list[bytes]:
    """Return a digest of each row's bytes."""
    rows = logits.contiguous().numpy()
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def bits(numbers: Tensor) -> Tensor:
    """Return floats as integers, because NaN differs from itself."""
    return numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)


def use(variant: str, threads: int) -> None:
    """Choose the instruction set and the number of threads of this process."""
    kernels = library()
    assert kernels is not None
    if kernels.fr_select(variant.encode()) < 0:
        raise ValueError(f"this machine has no {variant}")
    torch.set_num_threads(threads)


class Reference:
    """A text that was decoded token by token.

    Attributes:
        model: keeps the text's keys and values in its row.
        text: the tokens.
        after: [n] digest of the logits after each token.
        stored: the keys and values of the text, layer by layer.
    """

    @torch.inference_mode()
    def __init__(
        self, model: CausalLM, text: Sequence[int], say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.model = model.fresh()
        self.text = list(text)
        self.after: list[bytes] = []
        use("", 1)
        self.model.add(ROW, len(text))
        for place, token in enumerate(self.text):
            if place % 256 == 0:
                say(f"the reference: {place} of {len(self.text)} tokens")
            self.after += digests(self.model.extend([ROW], [[token]])[0])
        self.stored = self.model.cache.view(ROW, len(self.text))
        self._branches = model.fresh()

    def begin(self, model: CausalLM, row: int, length: int) -> None:
        """Give a row of another model the first `length` tokens of the text."""
        if length:
            model.cache.copy_in(row, self.stored, length)

    @torch.inference_mode()
    def logits(self, length: int, path: Sequence[int]) -> Tensor:
        """Return the logits [n, V] after each token of a path, one by one.

        The path follows the first `length` tokens of the text.
        """
        use("", 1)
        model = self._branches
        model.reset()
        model.add(ROW, length + len(path))
        self.begin(model, ROW, length)
        return torch.cat([model.extend([ROW], [[token]])[0] for token in path])

    @torch.inference_mode()
    def tree(self, length: int, draft: Draft) -> list[bytes]:
        """Return the digest of the logits at each node of a draft.

        The draft follows the first `length` tokens. Each node is run once, after its parent.
        """
        use("", 1)
        model = self._branches
        model.reset()
        model.add(ROW, length + max(draft.depths) + 1)
        self.begin(model, ROW, length)
        after = [b""] * len(draft)
        waiting = [ROW]
        while waiting:
            node = waiting.pop()
            model.crop([ROW], [length + draft.depths[node]])
            (after[node],) = digests(model.extend([ROW], [[draft.tokens[node]]])[0])
            waiting += reversed(draft.children[node])
        return after


class Check:
    """Compares a model with a reference, and counts.

    Attributes:
        rows: how many rows of logits were compared.
        entries: how many positions of keys and values were compared.
    """

    def __init__(self, model: CausalLM, reference: Reference) -> None:
        self.model = model.fresh()
        self.reference = reference
        self.rows = 0
        self.entries = 0
        self._kinds = {
            "chain": self._chain,
            "tree": self._tree,
            "chunks": self._chunks,
            "batch": self._batch,
            "walk": self._walk,
        }

    @torch.inference_mode()
    def run(self, case: Case, seed: int = 0) -> None:
        """Run a case. Raises DifferenceError."""
        numbers = random.Random(f"{seed} {case.number}")
        self.model.reset()
        if case.kind != "walk" and numbers.random() < 0.1:
            self.model.cache.release()  # so that buffers begin small and grow again
        self._kinds[case.kind](case, numbers)

    # The kinds of cases.

    def _chain(self, case: Case, numbers: random.Random) -> None:
        """Run the text's next tokens in one forward."""
        self._join(ROW, case.context, case.size)
        self._step(case, {ROW: self._chain_of(case.context, case.size)})

    def _tree(self, case: Case, numbers: random.Random) -> None:
        """Run a tree with the text's next tokens in it."""
        self._join(ROW, case.context, case.size)
        self._step(case, {ROW: self._tree_of(case.context, case.size, numbers)})

    def _chunks(self, case: Case, numbers: random.Random) -> None:
        """Read the text up to `context` in chunks of one size; only the last three of a long one.

        What stands before them is copied.
        """
        chunk = CHUNK * case.size - numbers.randrange(CHUNK)
        first = max(0, case.context - 3 * chunk)
        self._join(ROW, first, 0)
        for start in range(first, case.context, chunk):
            end = min(start + chunk, case.context)
            use(case.variant, case.threads)
            (logits,) = self.model.extend([ROW], [self.reference.text[start:end]])
            draft = self._chain_of(start, end - start)
            self._compare(case, f"chunk {start}:{end}", start, draft, logits)
        self._compare_stored(case, ROW, first)

    def _batch(self, case: Case, numbers: random.Random) -> None:
        """Run a ragged batch, whose rows have other contexts and drafts."""
        drafts: dict[int, Draft] = {}
        for row in range(numbers.randint(2, BATCH_ROWS)):
            context = case.context if row == 0 else numbers.randint(1, self._longest)
            size = case.size if row == 0 else 0
            drafts[row] = self._join_with_draft(row, context, size, numbers)
        self._step(case, drafts)

    def _walk(self, case: Case, numbers: random.Random) -> None:
        """Run steps between which rows join and leave, in buffers that grow meanwhile."""
        self.model.cache.release()
        lengths: dict[int, int] = {}
        joined = 0
        for _ in range(STEPS):
            while not lengths or (len(lengths) < BATCH_ROWS and numbers.random() < 0.5):
                lengths[joined] = case.context if joined == 0 else numbers.randint(1, self._longest)
                self._join(joined, lengths[joined], 0)
                joined += 1
            drafting = sorted(numbers.sample(sorted(lengths), numbers.randint(1, len(lengths))))
            drafts = {}
            for row in drafting:
                size = min(numbers.randint(1, case.size), len(self.reference.text) - lengths[row])
                drafts[row] = self._some_draft(lengths[row], size, numbers)
            committed = self._step(case, drafts)
            for row in drafting:
                lengths[row] += committed[row]
                if numbers.random() < 0.3 or lengths[row] >= len(self.reference.text):
                    self.model.drop(row)  # the last row moves into its place
                    del lengths[row]

    # The parts of cases.

    @property
    def _longest(self) -> int:
        return len(self.reference.text) - MOST_TOKENS

    def _join(self, row: int, context: int, reserve: int) -> None:
        self.model.add(row, context + reserve)
        self.reference.begin(self.model, row, context)

    def _join_with_draft(self, row: int, context: int, size: int, numbers: random.Random) -> Draft:
        if not size:
            sizes = (1, 1, numbers.randint(2, 16), numbers.randint(2, MOST_TOKENS))
            size = numbers.choice(sizes)
        self._join(row, context, size)
        return self._some_draft(context, size, numbers)

    def _some_draft(self, context: int, size: int, numbers: random.Random) -> Draft:
        if numbers.random() < 0.5:
            return self._tree_of(context, size, numbers)
        return self._chain_of(context, size)

    def _chain_of(self, context: int, size: int) -> Draft:
        first, *rest = self.reference.text[context : context + size]
        return Draft.chain(first, rest)

    def _tree_of(self, context: int, size: int, numbers: random.Random) -> Draft:
        """Return a tree with one path of the text's tokens; other nodes have random tokens."""
        parents = some_parents(size, numbers)
        text = self.reference.text
        draft = Draft([0] * size, parents)
        tokens = [numbers.randrange(self.model.vocab_size) for _ in range(size)]
        for node in draft.path(numbers.randrange(size)):
            tokens[node] = text[context + draft.depths[node]]
        tokens[0] = text[context]
        return Draft(tokens, parents)

    def _step(self, case: Case, drafts: dict[int, Draft]) -> dict[int, int]:
        """Run drafts in one forward, compare, and commit the text's tokens.

        Returns:
            How many tokens were committed, by row.
        """
        lengths = {row: self.model.length(row) for row in drafts}
        use(case.variant, case.threads)
        output = self.model.forward(list(drafts), list(drafts.values())).logits
        for (row, draft), logits in zip(drafts.items(), output, strict=True):
            where = f"row {row} of lengths {list(lengths.values())}"
            self._compare(case, where, lengths[row], draft, logits)
        paths = [self._text_path(lengths[row], draft) for row, draft in drafts.items()]
        self.model.commit(list(drafts), paths)
        for row in drafts:
            self._compare_stored(case, row, lengths[row])
        return {row: len(path) for row, path in zip(drafts, paths, strict=True)}

    def _text_path(self, length: int, draft: Draft) -> list[int]:
        """Return the nodes from the root on that have the text's tokens."""
        path = [0]
        for token in self.reference.text[length + 1 :]:
            following = [node for node in draft.children[path[-1]] if draft.tokens[node] == token]
            if not following:
                break
            path.append(following[0])
        return path

    def _compare(self, case: Case, where: str, length: int, draft: Draft, logits: Tensor) -> None:
        """Compare the logits at all nodes of a draft. Raises DifferenceError."""
        if draft.is_chain and draft.tokens == self.reference.text[length : length + len(draft)]:
            wanted = self.reference.after[length : length + len(draft)]
        else:
            wanted = self.reference.tree(length, draft)
        for node, (digest, right) in enumerate(zip(digests(logits), wanted, strict=True)):
            if digest != right:
                path = [draft.tokens[ancestor] for ancestor in draft.path(node)]
                single = self.reference.logits(length, path)[-1]
                place = f"{where}, length {length}, {_node_of(draft, node)}"
                raise DifferenceError(_difference(case, place, logits[node], single))
        self.rows += len(draft)

    def _compare_stored(self, case: Case, row: int, start: int) -> None:
        """Compare a row's keys and values from position `start` on, sometimes all of them.

        Raises:
            DifferenceError: they differ from those of the text.
        """
        end = self.model.length(row)
        start = 0 if case.number % 16 == 0 else start
        pairs = zip(self.model.cache.view(row, end), self.reference.stored, strict=True)
        for layer, (together, one_by_one) in enumerate(pairs):
            assert together is not None and one_by_one is not None
            for name, ours, right in zip(("keys", "values"), together, one_by_one, strict=True):
                place = _first_difference(ours[:, start:end], right[:, start:end])
                if place is None:
                    continue
                group, position, number = place
                where = (group, start + position, number)
                raise DifferenceError(
                    f"{name} differ in {case}\nrow {row} from {start} to {end}, layer {layer}, "
                    f"head {group}, position {start + position}, number {number}: "
                    f"{ours[where].item()!r} together, {right[where].item()!r} one by one"
                )
        self.entries += end - start


def _first_difference(ours: Tensor, right: Tensor) -> tuple[int, ...] | None:
    """Return the place of the first number that has other bits, or None."""
    if torch.equal(bits(ours), bits(right)):
        return None
    return tuple((bits(ours) != bits(right)).nonzero()[0].tolist())


def _node_of(draft: Draft, node: int) -> str:
    return (
        f"node {node} of {len(draft)} at depth {draft.depths[node]}\n"
        f"path {draft.path(node)}, parents {draft.parents}, tokens {draft.tokens}"
    )


def _difference(case: Case, place: str, together: Tensor, single: Tensor) -> str:
    """Return a text about logits that differ."""
    lines = [f"logits differ in {case}", place]
    different = (bits(together) != bits(single)).nonzero().flatten().tolist()
    if not different:
        lines.append("decoding one by one gave other bits the second time: the reference is wrong")
        return "\n".join(lines)
    first = different[0]
    most = (together - single).abs().max().item()
    lines += [
        f"{len(different)} of {len(together)} logits differ, at most by {most:g}; the first is "
        f"{first}:",
        f"{together[first].item()!r} together, {single[first].item()!r} one by one",
    ]
    return "\n".join(lines)


class Cases(Sequence[Case]):
    """All combinations of kinds, variants, threads, contexts and sizes, in a mixed order.

    Any part of them is spread over all, because consecutive cases are a golden section of the whole
    apart.
    """

    def __init__(
        self,
        longest: int = LONGEST,
        seed: int = 0,
        *,
        multiples: Sequence[int] = MULTIPLES,
        kinds: Sequence[str] = KINDS,
        of_variants: Sequence[str] | None = None,
        threads: int = THREADS,
    ) -> None:
        self.parts: tuple[Sequence[Any], ...] = (
            contexts(longest, multiples),
            range(1, MOST_TOKENS + 1),
            kinds,
            list(of_variants or variants()),
            range(1, threads + 1),
        )
        self.total = 1
        for part in self.parts:
            self.total *= len(part)
        self._first = random.Random(seed).randrange(self.total)
        self._stride = max(1, int(GOLDEN * self.total))
        while gcd(self._stride, self.total) != 1:
            self._stride += 1

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.total:
            raise IndexError(number)
        left = (self._first + number * self._stride) % self.total
        chosen: list[Any] = []
        for part in reversed(self.parts):
            left, place = divmod(left, len(part))
            chosen.append(part[place])
        threads, variant, kind, size, context = chosen
        return Case(number, kind, variant, threads, context, size)

    def __iter__(self) -> Iterator[Case]:
        return (self[number] for number in range(self.total))


def reference_of(
    model: CausalLM, longest: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Reference:
    """Return a reference for cases of contexts up to `longest`."""
    return Reference(model, some_text(longest + MOST_TOKENS, model.vocab_size, seed), say)
