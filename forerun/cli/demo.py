"""`forerun demo`: compares plain decoding with a faster method.

The chat model answers questions; the embedded pair continues pieces of code.
"""

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
from forerun.cli.common import quiet, say
from forerun.cli.options import (
    GuardOption,
    JsonOption,
    MaxNewTokensOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
    grouped,
)
from forerun.cli.writing import say_loading, tinted
from forerun.methods import AR
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, FOLDERS, MODELS, SMOLLM2, find
from forerun.zoo.fetch import fetch

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.api.completion import Completion

QUESTIONS = (
    "What is the difference between weather and climate?",
    "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "List five ways to save water at home.",
    "Why is the sky blue?",
    "Write a short email to a colleague: our meeting is moved from Monday to Wednesday.",
    "Tell me a short story about a lighthouse keeper and a lost dog.",
    "Explain what a bicycle's gears do.",
    "Write a Python class for a queue with the methods put, get and size.",
    "Which fruits ripen in autumn?",
)
DEFAULT_PROMPTS = 6
ROUNDS = 5  # the counted rounds, after one that warms up
# If the first round has taken so many seconds, no further prompts are asked in this demo.
FIRST_ROUND_SECONDS = 8.0
# The machine counts as busy if the speeds of plain decoding in two rounds differ by more than this
# share of their median.
BUSY_SPREAD = 0.15
COLUMN_WORDS = {"True": "yes", "False": "no", "None": "-"}


@dataclass(frozen=True)
class DemoOptions:
    """What is asked, and how it is decoded."""

    target: Annotated[
        str,
        typer.Option(
            help=(
                "smollm2, qwen-coder, or embedded: the pair that ships with forerun, on held-out "
                "code."
            )
        ),
    ] = SMOLLM2
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of questions or pieces of code. "
                f"Default: {DEFAULT_PROMPTS}, fewer on a slow machine."
            ),
        ),
    ] = None
    method: MethodOption = None
    max_new_tokens: MaxNewTokensOption = 96
    temperature: TemperatureOption = 0.0
    guard: GuardOption = None

    @property
    def draft(self) -> str | None:
        """The draft that is downloaded with the target, if any."""
        return MODELS[self.target].draft if self.target in MODELS else None

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

    plain: Completion
    fast: Completion


@dataclass(frozen=True)
class Comparison:
    """What was decoded, and its figures.

    Attributes:
        target: the name of the target.
        method: the name of the faster method.
        temperature: of sampling; 0 is greedy.
        rounds: the answers of each round, in the order of the prompts. The first round warmed up.
    """

    target: str
    method: str
    temperature: float
    rounds: Sequence[Sequence[Answers]]

    @cached_property
    def plain_speeds(self) -> list[float]:
        """The tokens/s of plain decoding in each counted round."""
        speeds = []
        for answered in self.rounds[1:]:
            stats = [answers.plain.stats for answers in answered]
            speeds.append(sum(each.tokens for each in stats) / sum(each.seconds for each in stats))
        return speeds

    @cached_property
    def speedups(self) -> list[float]:
        """The time of plain decoding over that of the method, in each counted round."""
        speedups = []
        for answered in self.rounds[1:]:
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
    def median_speedup(self) -> float | None:
        """The median of `speedups`; None if nothing was drafted."""
        was_drafted = any(row["speedup"] for row in self.rows)
        return round(median(self.speedups), 3) if was_drafted else None

    @property
    def is_busy(self) -> bool:
        """Whether plain decoding's own speed differed much between rounds."""
        speeds = self.plain_speeds
        return max(speeds) - min(speeds) > BUSY_SPREAD * median(speeds)

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
    """Compare plain decoding with a faster method on the same questions.

    The chat model is downloaded at the first call. Shows medians of 5 rounds. A round before these
    warms up, so that the guard knows which drafts pay, as it does in a server. No answer helps a
    later one. The exit status is 1 if an answer of the faster method differs from plain decoding.
    """
    options.check()
    target = _available_target(options)
    say_loading(target)
    quiet(threads)
    from rich.console import Console

    console = Console(quiet=as_json, highlight=False)
    comparison = _compare(target, options, console)
    _show(comparison, console)
    if as_json:
        print(json.dumps(comparison.as_dict()))
    # Sampled answers are equal too, because the seed alone decides what is sampled.
    if not all(row["equal"] for row in comparison.rows):
        raise typer.Exit(1)


def _available_target(options: DemoOptions) -> str:
    """Return the target after downloading it, or the embedded one if it cannot be downloaded."""
    target = options.target
    names = [target, options.draft or target]
    if target == EMBEDDED or all(find(name) is not None for name in names):
        return target
    try:
        fetch([target], say)
    except ValueError as error:
        say(f"{error}. Until then the demo runs the embedded pair, on code")
        return EMBEDDED
    return target


def _compare(target: str, options: DemoOptions, console: Console) -> Comparison:
    """Decode the prompts in all rounds; print the faster method's answers of the first round.

    Plain decoding and the method take turns in going first, and nothing is printed while they
    decode.
    """
    from forerun.api.load import Decoder, load

    # Nothing is kept of an answer that could help a later one.
    alone: dict[str, Any] = {"prefix_bytes": 0, "share_outputs": False}
    fast: Any = load(target, method=options.method, guard=options.guard, **alone)
    plain = Decoder(fast.target, fast.tokenizer, method=AR(), **alone)
    params = options.params()
    prompts = _prompts(target, fast.tokenizer, options.prompts)
    started_at = perf_counter()
    rounds: list[list[Answers]] = []
    for round_number in range(1, 2 + ROUNDS):
        answered: list[Answers] = []
        for number, (text, prompt) in enumerate(prompts, 1):
            if (round_number + number) % 2:
                plain_answer = plain.generate(prompt, params)
                fast_answer = fast.generate(prompt, params)
            else:
                fast_answer = fast.generate(prompt, params)
                plain_answer = plain.generate(prompt, params)
            answered.append(Answers(plain_answer, fast_answer))
            if round_number > 1:
                continue
            _print_answer(text, prompt, fast_answer, fast.tokenizer, console)
            is_slow = perf_counter() - started_at > FIRST_ROUND_SECONDS
            if options.prompts is None and is_slow:
                break
        rounds.append(answered)
        prompts = prompts[: len(answered)]
    method = fast.method_for(greedy=not options.temperature).name
    return Comparison(target, method, options.temperature, rounds)


def _print_answer(
    text: str, prompt: list[int], answer: Completion, tokenizer: Any, console: Console
) -> None:
    """Print a prompt, and the answer in the colours of its tokens' origins."""
    from forerun.text.stop_strings import TextStream

    stream = TextStream(tokenizer, prompt)
    pieces = stream.push(answer.tokens, answer.origins, finished=True)
    console.print(text, style="dim", markup=False)
    console.print(tinted(pieces), end="\n\n")


def _show(comparison: Comparison, console: Console) -> None:
    """Print the figures of a comparison."""
    from rich.table import Table

    method = comparison.method
    is_greedy = not comparison.temperature
    mode = "greedy" if is_greedy else f"temperature {comparison.temperature}"
    table = Table(title=f"autoregressive and {method}, {mode}")
    columns = (
        "prompt",
        "tokens",
        "equal",
        "ar tokens/s",
        f"{method} tokens/s",
        "tau",
        "speedup",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in comparison.rows:
        table.add_row(*(COLUMN_WORDS.get(str(value), str(value)) for value in row.values()))
    console.print(table)
    speedup = comparison.median_speedup
    if speedup is None:
        console.print("no speedup: nothing was drafted")
    else:
        console.print(
            f"median speedup {speedup:.2f}x over plain decoding with the same target in the same "
            f"loop, {len(comparison.speedups)} rounds"
        )
    if comparison.is_busy:
        speeds = comparison.plain_speeds
        console.print(
            "machine busy: plain decoding's own speed was "
            f"{min(speeds):.0f} to {max(speeds):.0f} tokens/s"
        )


def _prompts(target: str, tokenizer: Any, count: int | None) -> list[tuple[str, list[int]]]:
    """Return `count` prompts, DEFAULT_PROMPTS for None, each as text and as token ids.

    Raises ValueError if this Python has less held-out code.
    """
    if target != EMBEDDED:
        from forerun.text.chat import chat_prompt

        return [
            (text, chat_prompt(tokenizer, [{"role": "user", "content": text}]))
            for text in QUESTIONS[: count or DEFAULT_PROMPTS]
        ]
    from forerun.train.corpus import held_out_prompts

    pieces = held_out_prompts(tokenizer, "test", count or DEFAULT_PROMPTS)
    if len(pieces) < (count or 1):
        raise ValueError(
            f"--prompts is at most {len(pieces)}, the pieces of held-out code in this Python's "
            f"standard library, not {count or 1}"
        )
    return [(str(tokenizer.decode(piece)), piece) for piece in pieces]


def _row(number: int, rounds: Sequence[Answers]) -> dict[str, Any]:
    """Return the figures of a prompt: medians over all rounds but the first.

    There is no speedup if nothing was drafted.
    """
    first = rounds[0].plain.tokens
    plain = [answers.plain.stats for answers in rounds[1:]]
    fast = [answers.fast.stats for answers in rounds[1:]]
    speedups = [
        after.tokens_per_s / before.tokens_per_s for before, after in zip(plain, fast, strict=True)
    ]
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
