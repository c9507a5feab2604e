"""Output that follows a JSON schema, a regular expression or a grammar, by llguidance.

A grammar changes the target's distribution and nothing else: after every text it leaves the tokens that may follow
there. It is a logits processor, so the draft model's distribution and the target's at every node of a draft go through
it, and the acceptance rule stays the same. Output follows the target's distribution, restricted to what the grammar
allows and renormalised at each step, whatever is drafted. Repetition penalties and biases come before it; temperature,
top-k, top-p and min-p see what it left.

What "allows" means is llguidance's: a token whose text can go on to something whole, but where the grammar leaves one
text only, the tokens in which the tokenizer would write it. Special tokens are never text, and may come where a Lark
grammar names them, as `<[ID]>`; end tokens may come where the text may end, and there alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from forerun.sampling.sampler import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # texts of a request whose tokens are remembered: more than the nodes of a draft
_INSTALL = "response_format needs the package llguidance: pip install '.[grammar]' in the clone"

_Stop = Callable[[Sequence[int]], bool]
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, LLTokenizer, frozenset[int]]] = (
    WeakKeyDictionary()
)
_lock = Lock()


class FormError(ValueError):
    """A format that cannot be kept, which shows only when there is output."""


def compiled(
    form: tuple[str, str], tokenizer: PreTrainedTokenizerBase | None, ends: frozenset[int]
) -> Callable[[int], Grammar]:
    """Compile a response format (`forerun.sampling.response_format.form_of`) for a tokenizer. Return what makes the
    Grammar of a prompt from the prompt's length; each has a state of its own.

    Raises ValueError, one line and bounded, for no tokenizer, one that llguidance cannot read, no end token, a format
    that cannot be parsed, one that allows no text at all, and a missing llguidance.
    """
    try:
        from llguidance import LLMatcher, LLParserLimits, grammar_from
    except ModuleNotFoundError:
        raise ValueError(_INSTALL) from None
    if tokenizer is None:
        raise ValueError("response_format needs a tokenizer; give tokenizer=...")
    if not ends:
        raise ValueError(
            "response_format needs an end token; neither the model nor its tokenizer names one"
        )
    kind, text = form
    try:
        vocabulary, marked = _vocabulary(tokenizer, min(ends))
    except Exception as error:  # tokenizers of other kinds raise anything
        raise ValueError(f"llguidance cannot read the tokenizer: {_line(error)}") from None
    try:
        quiet = LLParserLimits(verbose_errors=False)  # else errors hold the text so far
        matcher = LLMatcher(vocabulary, grammar_from(kind, text), log_level=0, limits=quiet)  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(f"cannot use response_format.{kind}: {_line(error)}") from None
    if matcher.is_error():
        raise ValueError(f"cannot use response_format.{kind}: {_line(matcher.get_error())}")
    size = vocabulary.vocab_size
    special = marked.union(
        token for token in (vocabulary.eos_token, *tokenizer.all_special_ids) if token < size
    )
    if kind == "grammar":
        special -= {int(token) for token in re.findall(r"<\[(\d{1,9})\]>", text)} - {
            vocabulary.eos_token
        }
    tokens = _Tokens(size, vocabulary.eos_token, ends, special)
    wrong = Grammar(matcher, tokens, 0)._state([]).wrong
    if wrong is not None:
        raise ValueError(f"cannot use response_format.{kind}: it allows no text: {wrong}")
    return lambda start: Grammar(matcher, tokens, start)


def end_of(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end token that a tokenizer names, if any."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset([end] if isinstance(end, int) else [])


def _vocabulary(tokenizer: PreTrainedTokenizerBase, end: int) -> tuple[LLTokenizer, frozenset[int]]:
    """Return llguidance's form of a tokenizer, and the tokens that are special to it. Making them takes a second, so
    they are kept as long as the tokenizer is."""
    import llguidance.hf

    with _lock:
        size, made, marked = _tokenizers.get(tokenizer, (-1, None, frozenset()))
        if made is None or size != len(tokenizer):
            # A request says which tokens end its text, so any of them does here.
            made = llguidance.hf.from_tokenizer(
                tokenizer, eos_token=min(end_of(tokenizer), default=end)
            )  # type: ignore[arg-type]
            marked = frozenset(
                token for token in range(made.vocab_size) if made.is_special_token(token)
            )
            _tokenizers[tokenizer] = len(tokenizer), made, marked
        return made, marked


@dataclass(frozen=True)
class _Tokens:
    """A vocabulary: its size, what llguidance takes for the end, what ends a text, and what is no text."""

    size: int
    eos: int
    ends: frozenset[int]
    special: frozenset[int]


@dataclass(frozen=True)
class _State:
    """What may follow a text.

    Attributes:
        allowed: the tokens, one bit each; None where the text itself is not allowed, or nothing can be said of it.
        last: only an end token.
        wrong: why the text cannot go on.
    """

    allowed: np.ndarray | None = None
    last: bool = False
    wrong: str | None = None


class Grammar(Constraint):
    """Leaves the tokens that a grammar allows after the output of one prompt.

    Scores depend on the arguments alone. llguidance's state at the last text and what may follow the last `KEPT` texts
    are kept, so that a node of a draft costs one step and not the whole text again.

    After a text that the grammar forbids scores stay as they are. Such a node of a draft is never reached: its token
    has the probability 0. `complete` checks that after each token of the output.
    """

    def __init__(self, matcher: LLMatcher, tokens: _Tokens, start: int) -> None:
        """`matcher` at the beginning of a text, which is copied; `start`: where in the ids the text begins."""
        self._beginning, self._tokens, self._start = matcher, tokens, start
        self._matcher: LLMatcher | None = None
        self._at: list[int] = []  # the text that the matcher has read
        self._states: dict[tuple[int, ...], _State] = {}
        self._lock = Lock()  # a request may be given to several engines

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores [R, V] after ids [R, n]: -inf for tokens that are not allowed, the vocabulary's padding too."""
        size = scores.shape[-1]
        forbidden = np.zeros((len(scores), size), dtype=bool)
        for row, text in enumerate(input_ids[:, self._start :].tolist()):
            allowed = self._state(text).allowed
            if allowed is not None:
                forbidden[row] = np.unpackbits(allowed, count=size, bitorder="little") == 0
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many tokens of a chain after the tokens are allowed; those after an end token are not."""
        text = list(tokens[self._start :])
        for count, token in enumerate(chain):
            allowed = self._state(text).allowed
            if (
                allowed is None
                or token >= 8 * len(allowed)
                or not allowed[token // 8] >> token % 8 & 1
            ):
                return count
            text.append(token)
        return len(chain)

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether the output is whole, so that only an end token may follow.

        Raises FormError for output that the grammar forbids or that cannot go on: never because of what was drafted,
        but a grammar may lead into a dead end or become too large for llguidance.
        """
        state = self._state(list(ids[self._start :]))
        if state.wrong is not None:
            raise FormError(
                f"the response_format cannot be kept after {len(ids) - self._start} tokens: {state.wrong}"
            )
        return state.last

    def stop(self, other: _Stop | None) -> _Stop:
        """Return what ends a sequence when the output is whole, at no forward for an end token, or `other` ends it."""
        return lambda ids: self.complete(ids) or (other is not None and other(ids))

    def _state(self, text: Sequence[int]) -> _State:
        with self._lock:
            key = tuple(text)
            found = self._states.get(key)
            if found is None:
                found = self._read(key)
                if self._matcher is None:  # a limit may have been reached because of other texts
                    found = self._read(key)
                if len(self._states) == KEPT:
                    del self._states[next(iter(self._states))]
                self._states[key] = found
            return found

    def _read(self, text: tuple[int, ...]) -> _State:
        """Return what may follow a text. After an error or an interrupt the matcher is replaced."""
        if not self._tokens.ends.isdisjoint(text):
            return _State(last=True)
        matcher, self._matcher = self._matcher, None
        if matcher is None:
            matcher, self._at = self._beginning.deep_copy(), []
        found = (
            self._follows(matcher)
            if self._goes(matcher, text)
            else _State(wrong="the grammar forbids that text")
        )
        if matcher.is_error():
            return _State(wrong=_line(matcher.get_error()))
        self._matcher = matcher
        return found

    def _goes(self, matcher: LLMatcher, text: tuple[int, ...]) -> bool:
        tokens, before, same = self._tokens, tuple(self._at), min(len(self._at), len(text))
        while before[:same] != text[:same]:
            same -= 1
        if same < len(before) and not matcher.rollback(len(before) - same):
            return False
        del self._at[same:]
        for token in text[same:]:
            # One by one: of several tokens llguidance looks at some limits for the first only.
            if (
                token in tokens.special
                or token >= tokens.size
                or matcher.validate_tokens([token]) != 1
            ):
                return False
            if not matcher.consume_token(token):
                return False
            self._at.append(token)
        return True

    def _follows(self, matcher: LLMatcher) -> _State:
        tokens, ends = self._tokens, list(self._tokens.ends)
        raw = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(raw, count=max(tokens.size, *ends, 0) + 1, bitorder="little")
        whole = bool(bits[tokens.eos])
        bits[list(tokens.special)] = 0
        bits[ends] = 0
        more = bool(bits.any())
        bits[ends] = whole
        if not whole and not more:
            return _State(wrong="no token of the vocabulary may follow")
        return _State(np.packbits(bits, bitorder="little"), last=not more)


def _line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
