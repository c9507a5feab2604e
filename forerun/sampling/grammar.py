"""Output that follows a JSON schema, a regular expression or a grammar, checked by llguidance.

A grammar changes the target's distribution and nothing else: after each text only the tokens that
may follow are left. It is a logits processor, so it processes the draft model's distribution and
the target's at every node of a draft, and the acceptance rule stays the same. Output follows the
target's distribution, restricted to what the grammar allows and renormalised at each step, whatever
is drafted. Repetition penalties and biases come before it. Temperature, top-k, top-p and min-p come
after it.

llguidance decides what is allowed: a token after which the text can still be completed. Where only
one text can follow, it allows the tokens in which the tokenizer writes that text. Special tokens
are never text. They are allowed where a Lark grammar names them, as `<[ID]>`. End tokens are
allowed only where the text may end.

What may follow is found in other threads, because it may take long: the engine decodes the other
requests meanwhile. A form that takes too long ends its request (`_Budget`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from time import sleep, thread_time
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from forerun.sampling.sampler import Constraint
from forerun.sampling.thoughts import Thoughts
from forerun.sampling.waits import ends_soon

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Per request, the allowed tokens after this many texts are remembered. A draft has fewer nodes.
MAX_STATES = 64
# Seconds that a thread may compute. Times are ours: a schema of an API takes 0.0005 for a text.
SLOW_SECONDS = 0.01  # for what may follow a text; a slower form is decoded without drafts
MAX_STATE_SECONDS = 2.0  # for the same, before the request ends
MAX_TOKEN_SECONDS = 0.01  # for reading a token, in which llguidance keeps Python's lock
MAX_FORM_SECONDS = 30.0  # for all texts of a request
# A call that has kept Python's lock for longer than `LOCK_SECONDS` is followed by a pause of
# `PAUSES` times its length, at most `LONGEST_PAUSE` seconds because requests may wait for the form.
# A step of the engine takes the lock many times, so that without pauses it would wait for many such
# calls. A schema of an API keeps the lock for 0.0003 s.
LOCK_SECONDS = 0.001
PAUSES = 9
LONGEST_PAUSE = 0.1
THREADS = 8  # for forms that are not known to be slow
SLOW_THREADS = 2  # for those that are, so that they do not delay the others
# Of the latter. A core that they share with a step is theirs for a quarter. With much less, a
# thread that keeps Python's lock would be late to give it back.
NICENESS = 5
_INSTALL = "response_format needs the package llguidance: pip install '.[grammar]' in the clone"

_T = TypeVar("_T")
_Stop = Callable[[Sequence[int]], bool]
# For each tokenizer: its length, llguidance's form of it, and the tokens that are special to it.
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, LLTokenizer, frozenset[int]]] = (
    WeakKeyDictionary()
)
_lock = Lock()


_threads = ThreadPoolExecutor(THREADS, "forerun-form")


def _go_last() -> None:
    """Give the running thread less of a core than those that compute the steps of others.

    Elsewhere than on Linux, where each thread has a priority, it would be the whole process's.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(NICENESS)


_slow_threads = ThreadPoolExecutor(SLOW_THREADS, "forerun-slow-form", _go_last)


class FormError(ValueError):
    """The output cannot keep the response format, which shows only during decoding."""


def compiled(
    form: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase | None,
    ends: frozenset[int],
    thoughts: Thoughts | None = None,
) -> Callable[[int], Grammar]:
    """Compile a response format for a tokenizer.

    Args:
        form: the kind and the text (`forerun.sampling.response_format.form_of`).
        tokenizer: that of the model.
        ends: the tokens that end an output.
        thoughts: what may stand before the text that follows the format.

    Returns:
        A function that makes a Grammar, with its own state, from the length of a prompt.

    Raises:
        ValueError: in one short line: there is no tokenizer, or llguidance cannot read it or is not
            installed; there is no end token; the format cannot be parsed or allows no text.
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
    except Exception as error:  # unsupported tokenizers raise errors of any type
        raise ValueError(f"llguidance cannot read the tokenizer: {_line(error)}") from None
    try:
        quiet = LLParserLimits(verbose_errors=False)  # verbose errors would hold the text so far
        format_name: Any = kind  # its type is a list of names, of which these are some
        grammar = grammar_from(format_name, text)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=quiet)
    except Exception as error:
        raise ValueError(f"cannot use response_format.{kind}: {_line(error)}") from None
    if matcher.is_error():
        raise ValueError(f"cannot use response_format.{kind}: {_line(matcher.get_error())}")
    size = vocabulary.vocab_size
    end = vocabulary.eos_token
    special = marked.union(token for token in (end, *tokenizer.all_special_ids) if token < size)
    if kind == "grammar":
        named = {int(token) for token in re.findall(r"<\[(\d{1,9})\]>", text)}
        special -= named - {end}
    tokens = _Tokens(size, end, ends, special)
    beginning = Grammar(matcher, tokens, 0)
    first = beginning.text_state(())
    if first.error is not None:
        why = first.error if first.is_late else f"it allows no text: {first.error}"
        raise ValueError(f"cannot use response_format.{kind}: {why}")
    for token in (*first.some_token(tokens), *vocabulary.tokenize_str("{")[:1]):
        limit = _limit(beginning.text_state((token,)).error)
        if limit is not None:
            raise ValueError(f"cannot use response_format.{kind}: it is too large: {limit}")
    return lambda start: Grammar(matcher, tokens, start, thoughts, first)


def prepare(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Make what forms need of a tokenizer, if they can be used with it.

    Python's lock is kept meanwhile, so a server does this before it has requests.
    """
    ends = end_of(tokenizer)
    if tokenizer is not None and ends:
        with suppress(ValueError):  # the first form that is asked for says it
            compiled(("regex", "a"), tokenizer, ends)


def end_of(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end token that a tokenizer names, if any."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset([end] if isinstance(end, int) else [])


def _vocabulary(tokenizer: PreTrainedTokenizerBase, end: int) -> tuple[LLTokenizer, frozenset[int]]:
    """Return llguidance's form of a tokenizer, and the tokens that are special to it.

    Making them takes a second, so they are kept as long as the tokenizer is.
    """
    import llguidance.hf

    with _lock:
        size, made, marked = _tokenizers.get(tokenizer, (-1, None, frozenset()))
        if made is None or size != len(tokenizer):
            # Any end token will do, because each request names the tokens that end its text.
            eos_token = min(end_of(tokenizer), default=end)
            fast: Any = tokenizer  # its class is a narrower one in llguidance's types
            made = llguidance.hf.from_tokenizer(fast, eos_token=eos_token)
            tokens = range(made.vocab_size)
            marked = frozenset(token for token in tokens if made.is_special_token(token))
            _tokenizers[tokenizer] = len(tokenizer), made, marked
        return made, marked


@dataclass(frozen=True)
class _Tokens:
    """A vocabulary.

    Attributes:
        size: the number of tokens.
        eos: the token that means the end to llguidance.
        ends: the tokens that end an output.
        special: the tokens that are no text.
    """

    size: int
    eos: int
    ends: frozenset[int]
    special: frozenset[int]

    @cached_property
    def thinking(self) -> _State:
        """What may follow in thoughts: any token but those that end an output."""
        bits = np.ones(max(self.size, *self.ends, 0) + 1, dtype=np.uint8)
        bits[list(self.ends)] = 0
        return _State(np.packbits(bits, bitorder="little"))


@dataclass(frozen=True)
class _State:
    """What may follow a text.

    Attributes:
        allowed: the tokens, one bit each; None if the text itself is not allowed or has ended.
        is_complete: whether only an end token may follow.
        error: why the text cannot be continued, or None.
        is_late: whether that is because it takes too long to find what may follow.
    """

    allowed: np.ndarray | None = None
    is_complete: bool = False
    error: str | None = None
    is_late: bool = False

    def some_token(self, tokens: _Tokens) -> tuple[int, ...]:
        """Return a token of text that may follow, if there is one."""
        if self.allowed is None:
            return ()
        allowed = np.flatnonzero(np.unpackbits(self.allowed, bitorder="little")).tolist()
        return tuple(token for token in allowed if token not in tokens.ends)[:1]

    def allows(self, token: int) -> bool:
        """Return whether a token may follow."""
        if self.allowed is None or token >= 8 * len(self.allowed):
            return False
        return bool(self.allowed[token // 8] >> token % 8 & 1)


class _TooLongError(Exception):
    """A form has used up its time."""


class _Stopwatch:
    """The time that the calling thread computes. Turns of other threads do not count."""

    def __init__(self) -> None:
        self._started_at = thread_time()

    @property
    def seconds(self) -> float:
        """Return the seconds since this was made, in the same thread."""
        return thread_time() - self._started_at


@dataclass
class _Budget:
    """The time that a request's form may take.

    Attributes:
        spent: seconds for the texts before the present one.
        is_slow: whether one of them has taken more than `SLOW_SECONDS`.
    """

    spent: float = 0.0
    is_slow: bool = False

    def add(self, seconds: float) -> None:
        """Count the seconds of a text that has been read."""
        self.spent += seconds
        self.is_slow |= seconds > SLOW_SECONDS

    def check(self, text_seconds: float, token_seconds: float = 0.0) -> None:
        """Raise _TooLongError if the present text, or a token of it, has taken too long."""
        if token_seconds > MAX_TOKEN_SECONDS:
            raise _TooLongError(f"a token took more than {MAX_TOKEN_SECONDS} seconds")
        if text_seconds > MAX_STATE_SECONDS:
            raise _TooLongError(f"a text took more than {MAX_STATE_SECONDS:g} seconds")
        if self.spent + text_seconds > MAX_FORM_SECONDS:
            raise _TooLongError(f"its texts took more than {MAX_FORM_SECONDS:g} seconds together")

    def allows_again(self, text_seconds: float) -> bool:
        """Return whether the present text may be read once more."""
        is_short = text_seconds <= MAX_STATE_SECONDS / 2
        return is_short and self.spent + text_seconds <= MAX_FORM_SECONDS


def _sharing_lock(call: Callable[[], _T]) -> tuple[_T, float]:
    """Call llguidance where it keeps Python's lock, and leave the lock to others afterwards.

    Return what the call returns, and the seconds that it has computed.
    """
    watch = _Stopwatch()
    result = call()
    seconds = watch.seconds
    if seconds > LOCK_SECONDS:
        sleep(min(PAUSES * seconds, LONGEST_PAUSE))
    return result, seconds


class Grammar(Constraint):
    """The constraint of a grammar on the output of one prompt.

    Scores depend only on the arguments. Two things are kept to save time: llguidance's state after
    the last text, and the allowed tokens after the last `MAX_STATES` texts. With them a node of a
    draft takes one step instead of the whole text again.

    Thoughts before the text are free, but no end token is allowed in them. The text begins after
    the token that closes them. If the prompt has not begun them, the output may do so with its
    first token. Marks of several tokens are not known here: then the text begins at once.

    Each state is found by a job in another thread. There is one job at a time, because there is one
    matcher. `__call__` waits for it; the engine asks `is_ready` before.

    After a text that the grammar forbids scores stay as they are. Such a node of a draft is never
    reached, because its token has the probability 0. `complete` checks that after each token of the
    output.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: _Tokens,
        start: int,
        thoughts: Thoughts | None = None,
        first: _State | None = None,
    ) -> None:
        """Begin before the first token of the output.

        Args:
            matcher: at the beginning of a text. It is copied.
            tokens: the vocabulary.
            start: the length of the prompt, which is where the text begins in ids.
            thoughts: what may stand before the text.
            first: what may follow the empty text, if it is known.
        """
        self._beginning = matcher
        self._tokens = tokens
        self._start = start
        self._thoughts = thoughts if thoughts and thoughts.close_token is not None else None
        self._matcher: LLMatcher | None = None
        self._read_tokens: list[int] = []  # the text that the matcher has read
        self._states: dict[tuple[int, ...], _State] = {} if first is None else {(): first}
        self._budget = _Budget()
        self._job: Future[None] | None = None
        self._lock = Lock()  # a request may be given to several engines

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores [R, V] after ids [R, n], with -inf for tokens that are not allowed.

        The padding of the vocabulary is not allowed either.
        """
        size = scores.shape[-1]
        forbidden = np.zeros((len(scores), size), dtype=bool)
        for row, text in enumerate(input_ids[:, self._start :].tolist()):
            allowed = self._state(text).allowed
            if allowed is not None:
                forbidden[row] = np.unpackbits(allowed, count=size, bitorder="little") == 0
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)

    def fitting(self, tokens: Sequence[int], chain: Sequence[int]) -> int:
        """Return how many of a chain's first tokens are allowed after `tokens`.

        No token is allowed after an end token.
        """
        ids = list(tokens)
        for count, token in enumerate(chain):
            if not self.is_ready(ids, waits=True):
                return count
            if not self._state(ids[self._start :]).allows(token):
                return count
            ids.append(token)
        return len(chain)

    @property
    def is_slow(self) -> bool:
        """Return whether states take so long that drafts, which need many, do not pay."""
        return self._budget.is_slow

    def is_ready(self, ids: Sequence[int], waits: bool = False) -> bool:
        """Return whether what may follow `ids` is known, now or after a short wait.

        If it is not, a job begins to find it, unless the job of another text still runs.
        """
        text = self._text(ids[self._start :])
        if text is None:
            return True
        while text not in self._states:
            job = self._begin(text)
            if not job.done() and not (waits and ends_soon(job)):
                return False
        return True

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether the output is complete, so that only an end token may follow.

        If that is not known in time it returns False, and the engine asks again.

        Raises FormError for output that the grammar forbids or that cannot be continued. Drafts
        never cause this, but a grammar may lead to a dead end or become too large for llguidance.
        """
        if not self.is_ready(ids, waits=not self.is_slow):
            return False
        state = self._state(ids[self._start :])
        if state.error is not None:
            count = len(ids) - self._start
            raise FormError(
                f"the response_format cannot be kept after {count} tokens: {state.error}"
            )
        return state.is_complete

    def stop(self, other: _Stop | None) -> _Stop:
        """Return a rule that ends a sequence when its output is complete, or when `other` says so.

        The end token is then not generated, which saves its forward.
        """
        return lambda ids: self.complete(ids) or (other is not None and other(ids))

    def _text(self, output: Sequence[int]) -> tuple[int, ...] | None:
        """Return the text of an output, without the thoughts before it; None inside of them."""
        thoughts = self._thoughts
        if thoughts is None or thoughts.close_token is None:
            return tuple(output)
        if not thoughts.have_begun(output):
            return tuple(output)
        if thoughts.close_token not in output:
            return None
        return tuple(output[output.index(thoughts.close_token) + 1 :])

    def _state(self, output: Sequence[int]) -> _State:
        """Return what may follow an output, with its thoughts if it has some."""
        text = self._text(output)
        if text is None:
            return self._tokens.thinking
        state = self.text_state(text)
        begin = self._thoughts.begin_token if self._thoughts is not None else None
        if output or begin is None or state.allowed is None or begin >= 8 * len(state.allowed):
            return state
        bits = np.unpackbits(state.allowed, bitorder="little")
        bits[begin] = 1
        return _State(np.packbits(bits, bitorder="little"))

    def text_state(self, text: tuple[int, ...]) -> _State:
        """Return what may follow a text, without thoughts before it. It waits until that is known.

        Args:
            text: its tokens.
        """
        while True:
            state = self._states.get(text)
            if state is not None:
                return state
            self._begin(text).result()

    def _begin(self, text: tuple[int, ...]) -> Future[None]:
        """Begin a job that finds what may follow a text, or return the job that runs."""
        with self._lock:
            if self._job is None or self._job.done():
                threads = _slow_threads if self.is_slow else _threads
                self._job = threads.submit(self._find, text)
            return self._job

    def _find(self, text: tuple[int, ...]) -> None:
        """Find what may follow a text. This is the job of another thread."""
        if text in self._states:
            return
        watch = _Stopwatch()
        try:
            state = self._read(text, watch)
            if self._matcher is None and self._budget.allows_again(watch.seconds):
                # Once more with a new matcher, because earlier texts may have used up a limit.
                state = self._read(text, watch)
        except BaseException as error:  # also a panic of llguidance, which is in Rust
            state = _State(error=f"llguidance failed: {_line(error)}")
        self._budget.add(watch.seconds)
        if len(self._states) >= MAX_STATES:
            del self._states[next(iter(self._states))]
        self._states[text] = state

    def _read(self, text: tuple[int, ...], watch: _Stopwatch) -> _State:
        """Return what may follow a text. After an error or an interrupt the matcher is replaced.

        `watch` was started with the text.
        """
        if not self._tokens.ends.isdisjoint(text):
            return _State(is_complete=True)
        matcher = self._matcher
        self._matcher = None  # it comes back if it has read the text without an error
        try:
            if matcher is None:
                matcher = _sharing_lock(self._beginning.deep_copy)[0]
                self._read_tokens = []
            if self._moves_to(matcher, text, watch):
                state = self._state_after(matcher)
                self._budget.check(watch.seconds)
            else:
                state = _State(error="the grammar forbids that text")
        except _TooLongError as error:
            return _State(error=f"it takes too long: {error}", is_late=True)
        if matcher.is_error():
            return _State(error=_line(matcher.get_error()))
        self._matcher = matcher
        return state

    def _moves_to(self, matcher: LLMatcher, text: tuple[int, ...], watch: _Stopwatch) -> bool:
        """Move the matcher from the text that it has read to another one, if that is allowed.

        Raises _TooLongError.
        """
        before = tuple(self._read_tokens)
        same = min(len(before), len(text))
        while before[:same] != text[:same]:
            same -= 1
        if same < len(before) and not matcher.rollback(len(before) - same):
            return False
        del self._read_tokens[same:]
        for index, token in enumerate(text[same:], same):
            if token in self._tokens.special or token >= self._tokens.size:
                return False
            if not self._allows(matcher, text[:index], token):
                return False
            is_allowed, seconds = _sharing_lock(partial(matcher.consume_token, token))
            if not is_allowed:
                return False
            self._read_tokens.append(token)
            self._budget.check(watch.seconds, seconds)
        return True

    def _allows(self, matcher: LLMatcher, text: tuple[int, ...], token: int) -> bool:
        """Return whether a token may follow the text that the matcher has read.

        llguidance is asked only if that is not known, because its answer takes as long as reading.
        It checks one token at a time, because it knows some limits only for the first of a list.
        """
        state = self._states.get(text)
        if state is None or state.allowed is None:
            count, _ = _sharing_lock(partial(matcher.validate_tokens, [token]))
            return count == 1
        return state.allows(token)

    def _state_after(self, matcher: LLMatcher) -> _State:
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


def _limit(error: str | None) -> str | None:
    """Return which limit of llguidance an error names, or None if it names none.

    Some large forms can be read, and fail with the first token of a text.
    """
    items = re.search(r"row has (\d+) items; max is (\d+)", error or "")
    if items is not None:
        return f"{items[1]} ways to go on at one place, of at most {items[2]} (max_items_in_row)"
    if "too many expressions" in (error or ""):
        return "its repetitions need too many expressions; give smaller numbers"
    return None


def _line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
