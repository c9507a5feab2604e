"""All bits of forwards of many tokens beside those of decoding one by one: logits, keys and values.

One text is decoded token by token, once, by the machine's best instruction set and one thread. Its keys and values and
a digest of each token's logits are what everything else is compared with: `Reference`. A case (`Cases`) is a way to run
tokens of that text, and others beside it, after a beginning of a given length. Its number and the seed decide all of
it, so that one case can be run again alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import gcd
from typing import Any

import torch
from torch import Tensor

from forerun.csrc.library import library, variants
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM

MULTIPLES, LONGEST = (8, 16, 32, 64, 256), 2100
ROWS, THREADS = 64, 3
CHUNK = 8  # a case of `size` n reads its prompt in chunks of 8 n - 7 to 8 n tokens
KINDS = ("chain", "tree", "chunks", "batch", "walk")
STEPS = 6  # of a walk
BATCH = 6  # the most rows of a batch or a walk
GOLDEN = 0.6180339887
ROW = 0  # the row of whatever has one row


class Difference(Exception):  # noqa: N818
    """Bits that differ from those of decoding one by one. The text says which and where."""


@dataclass(frozen=True)
class Case:
    """A way to run tokens: after `context` tokens, `size` of them, by a variant and a number of threads."""

    number: int
    kind: str
    variant: str
    threads: int
    context: int
    size: int


def contexts(longest: int = LONGEST, multiples: Sequence[int] = MULTIPLES) -> list[int]:
    """Return all lengths up to `longest` that are a multiple, one less or one more."""
    near = {
        k * each + shift
        for each in multiples
        for k in range(longest // each + 1)
        for shift in (-1, 0, 1)
    }
    return sorted(length for length in near if 1 <= length <= longest)


def some_text(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return tokens at random, with phrases that come again, because real texts have them and attention finds them."""
    numbers, text = random.Random(seed), list[int]()
    while len(text) < length:
        if len(text) > 40 and numbers.random() < 0.3:
            start = numbers.randrange(len(text) - 20)
            text += text[start : start + numbers.randrange(4, 20)]
        else:
            text += [numbers.randrange(vocabulary) for _ in range(numbers.randrange(4, 20))]
    return text[:length]


def some_parents(size: int, numbers: random.Random) -> list[int]:
    """Return the parents of a random tree. Most nodes continue the last one, because deep paths cross more tiles."""
    deep = numbers.random()
    return [
        -1,
        *(
            node - 1 if numbers.random() < deep else numbers.randrange(node)
            for node in range(1, size)
        ),
    ]


def digests(logits: Tensor) -> list[bytes]:
    """Return a digest of each row's bytes."""
    rows = logits.contiguous().numpy()
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def bits(numbers: Tensor) -> Tensor:
    """Return floats as integers, because NaN differs from itself."""
    return numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)


def use(variant: str, threads: int) -> None:
    """Choose the instruction set and the number of threads of this process."""
    found = library()
    assert found is not None
    if found.fr_select(variant.encode()) < 0:
        raise ValueError(f"this machine has no {variant}")
    torch.set_num_threads(threads)


class Reference:
    """A text that was decoded token by token.

    Attributes:
        model: keeps the text's keys and values in its row.
        text: the tokens.
        after: [n] digest of the logits after each token.
    """

    @torch.inference_mode()
    def __init__(
        self, model: CausalLM, text: Sequence[int], say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.model, self.text, self.after = model.fresh(), list(text), list[bytes]()
        use("", 1)
        self.model.add(ROW, len(text))
        for place, token in enumerate(self.text):
            if place % 256 == 0:
                say(f"the reference: {place} of {len(self.text)} tokens")
            self.after += digests(self.model.extend([ROW], [[token]])[0])
        self.stored = self.model.cache.view(ROW, len(self.text))
        self._branches = model.fresh()

    def begin(self, model: CausalLM, id: int, length: int) -> None:
        """Give a row of another model the first `length` tokens of the text."""
        if length:
            model.cache.copy_in(id, self.stored, length)

    @torch.inference_mode()
    def logits(self, length: int, path: Sequence[int]) -> Tensor:
        """Return the logits [n, V] after each token of a path behind the first `length` of the text, one by one."""
        use("", 1)
        model = self._branches
        model.reset()
        model.add(ROW, length + len(path))
        self.begin(model, ROW, length)
        return torch.cat([model.extend([ROW], [[token]])[0] for token in path])

    @torch.inference_mode()
    def tree(self, length: int, draft: Draft) -> list[bytes]:
        """Return the digest of the logits at each node of a draft behind the first `length` tokens. Each node is run
        once, behind its parent."""
        use("", 1)
        model, found = self._branches, [b""] * len(draft)
        model.reset()
        model.add(ROW, length + max(draft.depths) + 1)
        self.begin(model, ROW, length)
        below = [ROW]
        while below:
            node = below.pop()
            model.crop([ROW], [length + draft.depths[node]])
            (found[node],) = digests(model.extend([ROW], [[draft.tokens[node]]])[0])
            below += reversed(draft.children[node])
        return found


class Check:
    """Compares a model with a reference, and counts.

    Attributes:
        rows: of logits that were compared.
        entries: positions of keys and values that were compared.
    """

    def __init__(self, model: CausalLM, reference: Reference) -> None:
        self.model, self.reference = model.fresh(), reference
        self.rows = self.entries = 0

    @torch.inference_mode()
    def run(self, case: Case, seed: int = 0) -> None:
        """Run a case. Raises Difference."""
        numbers = random.Random(f"{seed} {case.number}")
        self.model.reset()
        if case.kind != "walk" and numbers.random() < 0.1:
            self.model.cache.release()  # so that buffers begin small and grow again
        getattr(self, f"_{case.kind}")(case, numbers)

    # Kinds of cases.

    def _chain(self, case: Case, numbers: random.Random) -> None:
        """The text's next tokens, in one forward."""
        self._join(ROW, case.context, case.size)
        self._step(case, {ROW: self._chain_of(case.context, case.size)})

    def _tree(self, case: Case, numbers: random.Random) -> None:
        """A tree with the text's next tokens in it."""
        self._join(ROW, case.context, case.size)
        self._step(case, {ROW: self._tree_of(case.context, case.size, numbers)})

    def _chunks(self, case: Case, numbers: random.Random) -> None:
        """The text up to `context`, read in chunks of one size; a long one from the third last chunk on."""
        chunk = CHUNK * case.size - numbers.randrange(CHUNK)
        start = max(0, case.context - 3 * chunk)
        self._join(ROW, start, 0)
        while start < case.context:
            end = min(start + chunk, case.context)
            use(case.variant, case.threads)
            (logits,) = self.model.extend([ROW], [self.reference.text[start:end]])
            self._compare(
                case, f"chunk {start}:{end}", start, self._chain_of(start, end - start), logits
            )
            start = end
        self._compare_stored(case, ROW, max(0, case.context - 3 * chunk))

    def _batch(self, case: Case, numbers: random.Random) -> None:
        """A ragged batch, each row with another context and draft."""
        drafts = dict[int, Draft]()
        for id in range(numbers.randint(2, BATCH)):
            context = case.context if id == 0 else numbers.randint(1, self._longest)
            drafts[id] = self._join_with_draft(id, context, case.size if id == 0 else 0, numbers)
        self._step(case, drafts)

    def _walk(self, case: Case, numbers: random.Random) -> None:
        """Steps of rows that join and leave between, in buffers that grow as they go."""
        self.model.cache.release()
        lengths, id = dict[int, int](), 0
        for _ in range(STEPS):
            while not lengths or (len(lengths) < BATCH and numbers.random() < 0.5):
                lengths[id] = case.context if id == 0 else numbers.randint(1, self._longest)
                self._join(id, lengths[id], 0)
                id += 1
            drafting = sorted(numbers.sample(sorted(lengths), numbers.randint(1, len(lengths))))
            drafts = {}
            for each in drafting:
                size = min(numbers.randint(1, case.size), len(self.reference.text) - lengths[each])
                make = self._tree_of if numbers.random() < 0.5 else self._chain_of
                drafts[each] = make(lengths[each], size, numbers)
            grown = self._step(case, drafts)
            for each in drafting:
                lengths[each] += grown[each]
                if numbers.random() < 0.3 or lengths[each] >= len(self.reference.text):
                    self.model.drop(each)  # the last row moves into its place
                    del lengths[each]

    # Parts of cases.

    @property
    def _longest(self) -> int:
        return len(self.reference.text) - ROWS

    def _join(self, id: int, context: int, reserve: int) -> None:
        self.model.add(id, context + reserve)
        self.reference.begin(self.model, id, context)

    def _join_with_draft(self, id: int, context: int, size: int, numbers: random.Random) -> Draft:
        size = size or numbers.choice((1, 1, numbers.randint(2, 16), numbers.randint(2, ROWS)))
        self._join(id, context, size)
        make = self._tree_of if numbers.random() < 0.5 else self._chain_of
        return make(context, size, numbers)

    def _chain_of(self, context: int, size: int, numbers: random.Random | None = None) -> Draft:
        first, *rest = self.reference.text[context : context + size]
        return Draft.chain(first, rest)

    def _tree_of(self, context: int, size: int, numbers: random.Random) -> Draft:
        """Return a tree. One of its paths is the text's; other nodes have tokens at random."""
        parents, text = some_parents(size, numbers), self.reference.text
        draft = Draft([0] * size, parents)
        tokens = [numbers.randrange(self.model.vocab_size) for _ in range(size)]
        for node in draft.path(numbers.randrange(size)):
            tokens[node] = text[context + draft.depths[node]]
        tokens[0] = text[context]
        return Draft(tokens, parents)

    def _step(self, case: Case, drafts: dict[int, Draft]) -> dict[int, int]:
        """Run drafts in one forward, compare, and commit what is the text's. Return how many tokens that is, by row."""
        lengths = {id: self.model.length(id) for id in drafts}
        use(case.variant, case.threads)
        found = self.model.forward(list(drafts), list(drafts.values())).logits
        for (id, draft), logits in zip(drafts.items(), found, strict=True):
            self._compare(
                case, f"row {id} of lengths {list(lengths.values())}", lengths[id], draft, logits
            )
        paths = [self._text_path(lengths[id], draft) for id, draft in drafts.items()]
        self.model.commit(list(drafts), paths)
        for id in drafts:
            self._compare_stored(case, id, lengths[id])
        return {id: len(path) for id, path in zip(drafts, paths, strict=True)}

    def _text_path(self, length: int, draft: Draft) -> list[int]:
        """Return the nodes from the root on that are the text's."""
        path = [0]
        while True:
            token = (
                self.reference.text[length + len(path)]
                if length + len(path) < len(self.reference.text)
                else None
            )
            following = [node for node in draft.children[path[-1]] if draft.tokens[node] == token]
            if not following:
                return path
            path.append(following[0])

    def _compare(self, case: Case, where: str, length: int, draft: Draft, logits: Tensor) -> None:
        if draft.is_chain and draft.tokens == self.reference.text[length : length + len(draft)]:
            wanted = self.reference.after[length : length + len(draft)]
        else:
            wanted = self.reference.tree(length, draft)
        for node, (own, one) in enumerate(zip(digests(logits), wanted, strict=True)):
            if own != one:
                path = [draft.tokens[each] for each in draft.path(node)]
                single = self.reference.logits(length, path)[-1]
                raise Difference(
                    self._told(case, f"{where}, length {length}", draft, node, logits[node], single)
                )
        self.rows += len(draft)

    def _told(
        self, case: Case, where: str, draft: Draft, node: int, found: Tensor, single: Tensor
    ) -> str:
        different = (bits(found) != bits(single)).nonzero().flatten().tolist()
        lines = [
            f"logits differ in {case}",
            f"{where}, node {node} of {len(draft)} at depth {draft.depths[node]}",
        ]
        lines.append(f"path {draft.path(node)}, parents {draft.parents}, tokens {draft.tokens}")
        if not different:
            return "\n".join(
                [*lines, "decoding one by one gave other bits the second time: it is the reference"]
            )
        first, most = different[0], (found - single).abs().max().item()
        lines.append(
            f"{len(different)} of {len(found)} logits differ, at most by {most:g}; the first is {first}:"
        )
        lines.append(f"{found[first].item()!r} together, {single[first].item()!r} one by one")
        return "\n".join(lines)

    def _compare_stored(self, case: Case, id: int, start: int) -> None:
        """Compare a row's keys and values from position `start` on, and all of them now and then."""
        end = self.model.length(id)
        start = 0 if case.number % 16 == 0 else start
        pairs = zip(self.model.cache.view(id, end), self.reference.stored, strict=True)
        for layer, (own, one) in enumerate(pairs):
            assert own is not None and one is not None
            for name, found, wanted in zip(("keys", "values"), own, one, strict=True):
                found, wanted = found[:, start:end], wanted[:, start:end]
                if not torch.equal(bits(found), bits(wanted)):
                    first = (bits(found) != bits(wanted)).nonzero()[0].tolist()
                    values = found[tuple(first)].item(), wanted[tuple(first)].item()
                    group, place, number = first
                    raise Difference(
                        f"{name} differ in {case}\nrow {id} from {start} to {end}, layer {layer}, head {group}, "
                        f"position {start + place}, number {number}: {values[0]!r} together, {values[1]!r} one by one"
                    )
        self.entries += end - start


class Cases(Sequence[Case]):
    """All combinations of kinds, variants, threads, contexts and sizes, in an order that mixes them.

    Any part of them is spread over all: consecutive cases are a golden section of the whole apart.
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
            range(1, ROWS + 1),
            kinds,
            list(of_variants or variants()),
            range(1, threads + 1),
        )
        self.total = 1
        for part in self.parts:
            self.total *= len(part)
        self._first = random.Random(seed).randrange(self.total)
        self._stride = next(
            each
            for each in range(max(1, int(GOLDEN * self.total)), 2 * self.total)
            if gcd(each, self.total) == 1
        )

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.total:
            raise IndexError(number)
        left, chosen = (self._first + number * self._stride) % self.total, []
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
    return Reference(model, some_text(longest + ROWS, model.vocab_size, seed), say)


def told(case: Case) -> dict[str, Any]:
    """Return a case for JSON."""
    return asdict(case)
