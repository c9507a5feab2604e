"""`forerun demo`: plain decoding and a faster method answer the same questions, as a race."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.api.choose import resolve
from forerun.cli.common import quiet, say, shown_size
from forerun.cli.options import (
    GuardOption,
    JsonOption,
    MaxNewTokensOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
    grouped,
)
from forerun.cli.writing import say_loading
from forerun.methods import AR
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, FOLDERS, MODELS, QWEN_CODER, SMOLLM2, find
from forerun.zoo.fetch import fetch

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.api.decoder import Decoder
    from forerun.cli.race import Run

# Code and prose, because drafts gain more in code. Short answers come first, so that something can
# be seen soon.
QUESTIONS = (
    "Write a Python function that checks whether a word is a palindrome. Answer with code only.",
    "What is the difference between weather and climate?",
    "Add type hints to this function, and change nothing else:\n\n"
    "def pairs(items):\n    result = []\n    for first, second in zip(items, items[1:]):\n"
    "        if first != second:\n            result.append((first, second))\n    return result",
    "Explain in two sentences what a hash table is, then show one in Python.",
    "Write a Python class for a queue with the methods put, get and size.",
    "List five ways to save water at home.",
)
WARM_UP_TOKENS = 16
MAX_ROUNDS = 5
# If the first round has taken so many seconds, no further prompts are asked in this demo.
FIRST_ROUND_SECONDS = 25.0
# No further round begins if it would end after so many seconds of answers.
ALL_ROUNDS_SECONDS = 62.0
# The machine counts as busy if the speeds of plain decoding in two rounds differ by more than this
# share of their median.
BUSY_SPREAD = 0.15
AS_FAST = 0.04  # speedups of 1 plus or minus this are called "as fast"
COLUMN_WORDS = {"True": "yes", "False": "no", "None": "-"}


@dataclass(frozen=True)
class DemoOptions:
    """What is asked, and how it is decoded."""

    target: Annotated[
        str,
        typer.Option(
            help=(
                "qwen-coder (1.1 GB), smollm2 (98 MB), or embedded: the pair that ships with "
                "forerun, on held-out code."
            )
        ),
    ] = QWEN_CODER
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of questions or pieces of code. "
                f"Default: {len(QUESTIONS)}, fewer on a slow machine."
            ),
        ),
    ] = None
    method: MethodOption = None
    max_new_tokens: MaxNewTokensOption = 96
    temperature: TemperatureOption = 0.0
    guard: GuardOption = None

    @property
    def draft(self) -> str | None:
        """The draft that is downloaded with the target, if any.

        The default method of a target that is downloaded needs none, which saves its download.
        """
        has_draft = self.method is not None and self.target in MODELS
        return MODELS[self.target].draft if has_draft else None

    def params(self) -> SamplingParams:
        """Return how the answers are sampled. Raises ValueError for bad values."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=0
        )

    def check(self) -> None:
        """Raise ValueError for bad options. Needs no model, so that a mistake downloads nothing."""
        if self.target not in FOLDERS:
            names = ", ".join(FOLDERS)
            raise ValueError(f"--target of the demo is one of {names}, not {self.target!r}")
        if self.target != EMBEDDED and (self.prompts or 1) > len(QUESTIONS):
            raise ValueError(
                f"--prompts is at most {len(QUESTIONS)} for {self.target}, not {self.prompts}"
            )
        resolve(self.target, self.draft, self.method)
        self.params()


@dataclass(frozen=True)
class Answers:
    """The answers to a prompt in one round."""

    plain: Run
    fast: Run


@dataclass(frozen=True)
class Comparison:
    """What was decoded, and its figures.

    Attributes:
        target: the name of the target.
        method: the name of the faster method.
        temperature: of sampling; 0 is greedy.
        rounds: the answers of each round, in the order of the prompts.
    """

    target: str
    method: str
    temperature: float
    rounds: Sequence[Sequence[Answers]]

    @cached_property
    def plain_speeds(self) -> list[float]:
        """The tokens/s of plain decoding in each round."""
        speeds = []
        for answered in self.rounds:
            stats = [answers.plain.stats for answers in answered]
            speeds.append(sum(each.tokens for each in stats) / sum(each.seconds for each in stats))
        return speeds

    @cached_property
    def speedups(self) -> list[float]:
        """The time of plain decoding over that of the method, in each round."""
        speedups = []
        for answered in self.rounds:
            plain_seconds = sum(answers.plain.stats.seconds for answers in answered)
            fast_seconds = sum(answers.fast.stats.seconds for answers in answered)
            speedups.append(plain_seconds / fast_seconds)
        return speedups

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each prompt."""
        by_prompt = zip(*self.rounds, strict=True)
        return [_row(number, answers) for number, answers in enumerate(by_prompt, 1)]

    @property
    def is_equal(self) -> bool:
        """Whether all answers of the method are those of plain decoding."""
        return all(row["equal"] for row in self.rows)

    @property
    def median_speedup(self) -> float | None:
        """The median of `speedups`; None if nothing was drafted."""
        was_drafted = any(row["speedup"] for row in self.rows)
        return round(median(self.speedups), 3) if was_drafted else None

    @property
    def is_busy(self) -> bool:
        """Whether plain decoding's own speed differed much between rounds."""
        speeds = self.plain_speeds
        return max(speeds) - min(speeds) > BUSY_SPREAD * median(speeds)

    @property
    def sentence(self) -> str:
        """What the race showed."""
        if not self.is_equal:
            wrong = [str(row["prompt"]) for row in self.rows if not row["equal"]]
            return (
                f"The words differ in prompt {', '.join(wrong)}. They never should: please report "
                "it, with the output of `forerun doctor`."
            )
        speedup = self.median_speedup
        if speedup is None:
            return "As fast as plain decoding, because nothing was drafted; the same words."
        if abs(speedup - 1) < AS_FAST:
            return f"As fast as plain decoding ({speedup:.2f}), the same words."
        if speedup < 1:
            return f"Only {speedup:.2f} times as fast as plain decoding, the same words."
        return f"{speedup:.1f} times as fast as plain decoding, the same words."

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "target": self.target,
            "method": self.method,
            "temperature": self.temperature,
            "median_speedup": self.median_speedup,
            "rounds": [round(speedup, 3) for speedup in self.speedups],
            "busy": self.is_busy,
            "prompts": self.rows,
        }


@grouped
def demo(options: DemoOptions, threads: ThreadsOption = None, as_json: JsonOption = False) -> None:
    """Let plain decoding and a faster method answer the same questions, as a race.

    The model is downloaded at the first call. Both answers to a question stream, one after the
    other, each under a clock. Then the questions are asked again in the other order for about a
    minute, without showing the answers, and a table shows medians. No answer helps a later one. The
    exit status is 1 if an answer of the faster method differs from plain decoding.
    """
    options.check()
    target = _available_target(options)
    say_loading(target)
    quiet(threads)
    from rich.console import Console

    console = Console(quiet=as_json, highlight=False)
    comparison = _Race(target, options, console).run()
    _show(comparison, console)
    if as_json:
        print(json.dumps(comparison.as_dict()))
    # Sampled answers are equal too, because the seed alone decides what is sampled.
    if not comparison.is_equal:
        raise typer.Exit(1)


def _available_target(options: DemoOptions) -> str:
    """Return the target after downloading it, or the embedded one if it cannot be downloaded."""
    target = options.target
    names = [target, options.draft or target]
    if target == EMBEDDED or all(find(name) is not None for name in names):
        return target
    _say_sizes(target, sum(MODELS[name].size for name in set(names)))
    try:
        fetch([target], say, drafts=options.draft is not None)
    except ValueError as error:
        say(f"{error}. Until then the demo runs the embedded pair, on code")
        return EMBEDDED
    return target


def _say_sizes(target: str, size: int) -> None:
    """Say what is downloaded, how long the demo takes, and what takes less."""
    say(f"{target} is downloaded once ({shown_size(size)}); then the demo takes about 90 seconds")
    if target != SMOLLM2:
        smaller = shown_size(MODELS[SMOLLM2].size)
        say(
            f"for a slow line: `make demo TARGET=smollm2` downloads {smaller}, and "
            "`make demo TARGET=embedded` nothing (or `forerun demo --target ...`)"
        )


class _Race:
    """The answers of plain decoding and of a method, in one process and in turns."""

    def __init__(self, target: str, options: DemoOptions, console: Console) -> None:
        from forerun.api.load import Decoder, load

        # Nothing is kept of an answer that could help a later one.
        alone: dict[str, Any] = {"prefix_bytes": 0, "share_outputs": False}
        self._target = target
        self._options = options
        self._console = console
        self._params = options.params()
        self._fast: Any = load(target, method=options.method, guard=options.guard, **alone)
        self._plain = Decoder(self._fast.target, self._fast.tokenizer, method=AR(), **alone)
        self._method = self._fast.method_for(greedy=not options.temperature).name
        self._prompts = _prompts(target, self._fast.tokenizer, options.prompts)

    def run(self) -> Comparison:
        """Run all rounds: the first one is shown, and the machine is warm before it."""
        _, prompt = self._prompts[0]
        for decoder in (self._plain, self._fast):
            decoder.generate(prompt, max_new_tokens=WARM_UP_TOKENS)
        started_at = perf_counter()
        rounds = [self._shown_round()]
        first_seconds = perf_counter() - started_at
        prompts = self._prompts[: len(rounds[0])]
        while len(rounds) < MAX_ROUNDS:
            seconds = perf_counter() - started_at
            if len(rounds) > 1 and seconds + first_seconds > ALL_ROUNDS_SECONDS:
                break
            is_plain_first = len(rounds) % 2 == 0
            with self._console.status(f"round {len(rounds) + 1} ...", refresh_per_second=1):
                rounds.append([self._answers(prompt, is_plain_first) for _, prompt in prompts])
        return Comparison(self._target, self._method, self._options.temperature, rounds)

    def _shown_round(self) -> list[Answers]:
        """Ask the prompts, as many as the time allows, and show the answers as they come."""
        from forerun.cli.race import Lane, run

        started_at = perf_counter()
        answered: list[Answers] = []
        for number, (text, prompt) in enumerate(self._prompts, 1):
            self._console.print(f"{number}. {text}", style="dim", markup=False)
            # A file shows one text, because the other is the same.
            plain_lane = Lane(self._console, "plain decoding", shows_text=self._console.is_terminal)
            plain = run(self._stream(self._plain, prompt), plain_lane)
            fast = run(
                self._stream(self._fast, prompt), Lane(self._console, f"with {self._method}")
            )
            answered.append(Answers(plain, fast))
            is_slow = perf_counter() - started_at > FIRST_ROUND_SECONDS
            if self._options.prompts is None and is_slow:
                break
        return answered

    def _answers(self, prompt: list[int], is_plain_first: bool) -> Answers:
        """Return both answers to a prompt."""
        from forerun.cli.race import run

        if is_plain_first:
            plain = run(self._stream(self._plain, prompt))
            return Answers(plain, run(self._stream(self._fast, prompt)))
        fast = run(self._stream(self._fast, prompt))
        return Answers(run(self._stream(self._plain, prompt)), fast)

    def _stream(self, decoder: Decoder, prompt: list[int]) -> Any:
        return decoder.stream(prompt, self._params)


def _show(comparison: Comparison, console: Console) -> None:
    """Print the figures of a comparison."""
    from rich.table import Table

    method = comparison.method
    count = len(comparison.rounds)
    title = f"{comparison.target}, medians of {count} rounds"
    if comparison.temperature:
        title += f", temperature {comparison.temperature}"
    table = Table(title=title)
    columns = ("prompt", "tokens", "same words", "plain tokens/s", f"{method} tokens/s")
    for column in (*columns, "tokens a forward", "times as fast"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        table.add_row(*(COLUMN_WORDS.get(str(value), str(value)) for value in row.values()))
    console.print(table)
    console.print(comparison.sentence, style="bold")
    if comparison.is_busy:
        speeds = comparison.plain_speeds
        console.print(
            "The machine is busy: plain decoding's own speed was "
            f"{min(speeds):.1f} to {max(speeds):.1f} tokens/s."
        )


def _prompts(target: str, tokenizer: Any, count: int | None) -> list[tuple[str, list[int]]]:
    """Return `count` prompts, as many as there are QUESTIONS for None, as text and as token ids.

    Raises ValueError if this Python has less held-out code.
    """
    count = count or len(QUESTIONS)
    if target != EMBEDDED:
        from forerun.text.chat import chat_prompt

        return [
            (text, chat_prompt(tokenizer, [{"role": "user", "content": text}]))
            for text in QUESTIONS[:count]
        ]
    from forerun.train.corpus import held_out_prompts

    pieces = held_out_prompts(tokenizer, "test", count)
    if len(pieces) < count:
        raise ValueError(
            f"--prompts is at most {len(pieces)}, the pieces of held-out code in this Python's "
            f"standard library, not {count}"
        )
    return [(str(tokenizer.decode(piece)), piece) for piece in pieces]


def _row(number: int, rounds: Sequence[Answers]) -> dict[str, Any]:
    """Return the figures of a prompt: medians over all rounds.

    There is no speedup if nothing was drafted.
    """
    first = rounds[0].plain.tokens
    plain = [answers.plain.stats for answers in rounds]
    fast = [answers.fast.stats for answers in rounds]
    speedups = [before.seconds / after.seconds for before, after in zip(plain, fast, strict=True)]
    was_drafted = any(stats.drafted for stats in fast)
    return {
        "prompt": number,
        "tokens": fast[0].tokens,
        "equal": all(answers.plain.tokens == answers.fast.tokens == first for answers in rounds),
        "ar_tokens_per_s": round(median(stats.tokens_per_s for stats in plain), 1),
        "tokens_per_s": round(median(stats.tokens_per_s for stats in fast), 1),
        "tau": round(median(stats.tau for stats in fast), 3),
        "speedup": round(median(speedups), 3) if was_drafted else None,
    }
