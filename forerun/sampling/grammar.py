"""Output that follows a JSON schema, a regular expression or a grammar, checked by llguidance.

A grammar only changes the target's distribution: after each text it keeps the tokens that may
follow. It is a logits processor. The draft model's distribution and the target's distribution at
every node of a draft pass through it, so the acceptance rule stays the same. Whatever is drafted,
the output follows the target's distribution, restricted to the allowed tokens and renormalised at
each step. Repetition penalties and biases apply before the grammar. Temperature, top-k, top-p and
min-p apply to the scores that it keeps.

llguidance decides which tokens are allowed: those whose text can be continued to a complete text.
Where the grammar allows only one text, only the tokens in which the tokenizer would write that text
are allowed. Special tokens never count as text; they are allowed only where a Lark grammar names
them as `<[ID]>`. End tokens are allowed where the text may end, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from forerun.sampling.sampler import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# The number of texts per request whose allowed tokens are remembered. It exceeds the number of
# nodes in a draft, so that the texts of one step stay remembered together.
MAX_STATES = 64
_INSTALL = "response_format needs the package llguidance: pip install '.[grammar]' in the clone"

_Stop = Callable[[Sequence[int]], bool]
# For each tokenizer: its length, llguidance's form of it, and its special tokens.
_vocabularies: WeakKeyDictionary[
    PreTrainedTokenizerBase, tuple[int, LLTokenizer, frozenset[int]]
] = WeakKeyDictionary()
_lock = Lock()


class FormError(ValueError):
    """Output that cannot follow the response format, which shows only during generation."""


def compiled(
    form: tuple[str, str], tokenizer: PreTrainedTokenizerBase | None, ends: frozenset[int]
) -> Callable[[int], Grammar]:
    """Compile a response format for a tokenizer.

    `form` is what `forerun.sampling.response_format.form_of` returns, and `ends` are the tokens
    that end a text. The function that is returned makes the Grammar of a prompt from the prompt's
    length. The grammars share no state.

    Raises:
        ValueError: llguidance is missing, there is no tokenizer or no end token, llguidance cannot
            read the tokenizer, the format cannot be parsed, or it allows no text at all. The
            message is one line of bounded length.
    """
    if find_spec("llguidance") is None:
        raise ValueError(_INSTALL)
    if tokenizer is None:
        raise ValueError("response_format needs a tokenizer; give tokenizer=...")
    if not ends:
        raise ValueError(
            "response_format needs an end token; neither the model nor its tokenizer names one"
        )
    kind, text = form
    try:
        vocabulary, marked = _vocabulary(tokenizer, min(ends))
    except Exception as error:  # unsupported kinds of tokenizers raise errors of any type
        raise ValueError(f"llguidance cannot read the tokenizer: {_line(error)}") from None
    matcher = _new_matcher(kind, text, vocabulary)
    eos = vocabulary.eos_token
    special = set(marked)
    special.update(
        token for token in (eos, *tokenizer.all_special_ids) if token < vocabulary.vocab_size
    )
    if kind == "grammar":
        named = {int(token) for token in re.findall(r"<\[(\d{1,9})\]>", text)}
        special -= named - {eos}
    tokens = _Tokens(vocabulary.vocab_size, eos, ends, frozenset(special))
    reason = Grammar(matcher, tokens, 0)._state([]).error
    if reason is not None:
        raise ValueError(f"cannot use response_format.{kind}: it allows no text: {reason}")
    return lambda start: Grammar(matcher, tokens, start)


def end_of(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end token that a tokenizer names, if any."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset([end] if isinstance(end, int) else [])


def _vocabulary(tokenizer: PreTrainedTokenizerBase, end: int) -> tuple[LLTokenizer, frozenset[int]]:
    """Return llguidance's form of a tokenizer, and the tokens that are special to it.

    Making them takes a second, so they are kept as long as the tokenizer lives.
    """
    import llguidance.hf

    size = len(tokenizer)
    with _lock:
        cached = _vocabularies.get(tokenizer)
        if cached is not None and cached[0] == size:
            return cached[1], cached[2]
        # Any end token will do here, because each request names the tokens that end its text.
        eos = min(end_of(tokenizer), default=end)
        vocabulary = llguidance.hf.from_tokenizer(
            tokenizer,  # type: ignore[arg-type]
            eos_token=eos,
        )
        marked = frozenset(
            token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)
        )
        _vocabularies[tokenizer] = size, vocabulary, marked
        return vocabulary, marked


def _new_matcher(kind: str, text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Parse a format. Raises ValueError if llguidance cannot."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    # Verbose errors would hold the text so far.
    limits = LLParserLimits(verbose_errors=False)
    try:
        grammar = grammar_from(kind, text)  # type: ignore[arg-type]
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    except Exception as error:
        raise ValueError(f"cannot use response_format.{kind}: {_line(error)}") from None
    if matcher.is_error():
        raise ValueError(f"cannot use response_format.{kind}: {_line(matcher.get_error())}")
    return matcher


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a vocabulary.

    Attributes:
        size: their number.
        eos: the token that means the end to llguidance.
        ends: the tokens that end a text of the request.
        special: the tokens that are never text.
    """

    size: int
    eos: int
    ends: frozenset[int]
    special: frozenset[int]


@dataclass(frozen=True)
class _State:
    """What may follow a text.

    Attributes:
        allowed: the allowed tokens, one bit per token. None if the text itself is not allowed, or
            if llguidance cannot tell.
        is_complete: whether only an end token may follow.
        error: why the text cannot be continued, or None.
    """

    allowed: np.ndarray | None = None
    is_complete: bool = False
    error: str | None = None


class Grammar(Constraint):
    """Keeps the tokens that a grammar allows after the output of one prompt.

    Scores depend only on the arguments. Two things are kept to save time: llguidance's state after
    the last text, and the allowed tokens after the last `MAX_STATES` texts. With them a node of a
    draft costs one step instead of the whole text again.

    After a text that the grammar forbids, scores stay as they are. Decoding never reaches such a
    node of a draft, because its token has the probability 0. `complete` verifies this after each
    token of the output.
    """

    def __init__(self, matcher: LLMatcher, tokens: _Tokens, start: int) -> None:
        """Take a matcher at the beginning of a text, which is copied.

        `start` is where in the ids the text begins.
        """
        self._beginning = matcher
        self._tokens = tokens
        self._start = start
        self._matcher: LLMatcher | None = None
        self._matched: list[int] = []  # the text that the matcher has read
        self._states: dict[tuple[int, ...], _State] = {}
        self._lock = Lock()  # because a request may be given to several engines

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores [R, V] after ids [R, n], with -inf for tokens that are not allowed.

        The padding of the vocabulary is never allowed.
        """
        size = scores.shape[-1]
        forbidden = np.zeros((len(scores), size), dtype=bool)
        for row, text in enumerate(input_ids[:, self._start :].tolist()):
            allowed = self._state(text).allowed
            if allowed is not None:
                forbidden[row] = np.unpackbits(allowed, count=size, bitorder="little") == 0
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many tokens of a chain may follow `tokens`; none may follow an end token."""
        text = list(tokens[self._start :])
        for count, token in enumerate(chain):
            allowed = self._state(text).allowed
            if allowed is None or not _has_bit(allowed, token):
                return count
            text.append(token)
        return len(chain)

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether the output is complete, so that only an end token may follow.

        Raises FormError for output that the grammar forbids or that cannot be continued. Drafts
        never cause this, but a grammar may lead to a dead end or become too large for llguidance.
        """
        state = self._state(list(ids[self._start :]))
        if state.error is not None:
            count = len(ids) - self._start
            raise FormError(
                f"the response_format cannot be kept after {count} tokens: {state.error}"
            )
        return state.is_complete

    def stop(self, other: _Stop | None) -> _Stop:
        """Return a rule that ends a sequence when its output is complete, or when `other` does.

        The end token is then not generated, which saves its forward.
        """
        return lambda ids: self.complete(ids) or (other is not None and other(ids))

    def _state(self, text: Sequence[int]) -> _State:
        """Return what may follow a text, from memory if it is there."""
        with self._lock:
            key = tuple(text)
            state = self._states.get(key)
            if state is not None:
                return state
            state = self._read(key)
            if self._matcher is None:
                # Once more with a new matcher, because other texts may have used up a limit.
                state = self._read(key)
            if len(self._states) == MAX_STATES:
                del self._states[next(iter(self._states))]
            self._states[key] = state
            return state

    def _read(self, text: tuple[int, ...]) -> _State:
        """Compute what may follow a text."""
        if not self._tokens.ends.isdisjoint(text):
            return _State(is_complete=True)
        matcher = self._matcher
        # The matcher comes back at the end only, so an error or an interrupt discards it.
        self._matcher = None
        if matcher is None:
            matcher = self._beginning.deep_copy()
            self._matched = []
        if self._move(matcher, text):
            state = self._following(matcher)
        else:
            state = _State(error="the grammar forbids that text")
        if matcher.is_error():
            return _State(error=_line(matcher.get_error()))
        self._matcher = matcher
        return state

    def _move(self, matcher: LLMatcher, text: tuple[int, ...]) -> bool:
        """Move the matcher to the end of a text. Return whether the grammar allows the text."""
        before = tuple(self._matched)
        common = min(len(before), len(text))
        while before[:common] != text[:common]:
            common -= 1
        if common < len(before) and not matcher.rollback(len(before) - common):
            return False
        del self._matched[common:]
        for token in text[common:]:
            if token in self._tokens.special or token >= self._tokens.size:
                return False
            # One by one, because llguidance checks some limits only for the first token of a list.
            if matcher.validate_tokens([token]) != 1 or not matcher.consume_token(token):
                return False
            self._matched.append(token)
        return True

    def _following(self, matcher: LLMatcher) -> _State:
        """Return what may follow the text that the matcher has read."""
        tokens = self._tokens
        ends = list(tokens.ends)
        raw = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(raw, count=max(tokens.size, *ends, 0) + 1, bitorder="little")
        may_end = bool(bits[tokens.eos])
        bits[list(tokens.special)] = 0
        bits[ends] = 0
        may_continue = bool(bits.any())
        bits[ends] = may_end
        if not may_end and not may_continue:
            return _State(error="no token of the vocabulary may follow")
        return _State(np.packbits(bits, bitorder="little"), is_complete=not may_continue)


def _has_bit(bits: np.ndarray, index: int) -> bool:
    """Return whether a bit is set; the lowest bit of a byte comes first."""
    return index < 8 * len(bits) and bool(bits[index // 8] >> index % 8 & 1)


def _line(error: object) -> str:
    """Return an error's message as one line of at most 200 characters and an ellipsis."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
