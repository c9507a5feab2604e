"""`forerun demo`: plain decoding beside a faster one: the chat model on questions, or the embedded pair on code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.cli.common import (
    STYLES,
    GammaOption,
    GuardOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
    parse_method,
    quiet,
)
from forerun.cli.fetch import say
from forerun.methods import Method, Pacer, default_method
from forerun.params import SamplingParams
from forerun.zoo import EMBEDDED, SMOLLM2, companion, find_smollm2, own_draft
from forerun.zoo.fetch import fetch

REDRAW = 0.08  # seconds between pictures on a terminal
NEW_TOKENS = {SMOLLM2: 96, EMBEDDED: 128}
WARM_UP = "Name three planets."
QUESTIONS = (
    "What is the difference between weather and climate?",
    "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "List five ways to save water at home.",
    "Why is the sky blue?",
    "Write a short email to a colleague: our meeting is moved from Monday to Wednesday.",
    "Tell me a short story about a lighthouse keeper and a lost dog.",
)


def demo(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The pair that forerun ships, on held-out standard-library code.")
    ] = False,
    prompts: Annotated[
        int, typer.Option(min=1, help=f"How many questions, {len(QUESTIONS)} at most, or held-out pieces of code.")
    ] = 3,
    method: MethodOption = None,
    gamma: GammaOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; 96 by default, 128 of code.", show_default=False)
    ] = None,
    temperature: TemperatureOption = 0.0,
    guard: GuardOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
) -> None:
    """Answer questions with the chat model twice, plainly and faster, and compare. The model is fetched at first."""
    target = EMBEDDED if embedded else SMOLLM2
    is_named = method is not None or gamma is not None
    settings = _settings(target, method, gamma)  # a mistake is reported before anything is fetched
    SamplingParams(max_new_tokens=1 if max_new_tokens is None else max_new_tokens, temperature=temperature)
    if target != EMBEDDED and not _fetched():
        target = EMBEDDED
        settings = _settings(target, method, gamma)
    limit = NEW_TOKENS[target] if max_new_tokens is None else max_new_tokens
    params = SamplingParams(max_new_tokens=limit, temperature=temperature, seed=0)
    quiet(threads)
    from rich.console import Console
    from rich.table import Table

    from forerun.api import Decoder, load
    from forerun.methods import AR

    decoder = load(target, method=settings if is_named else None, guard=guard)
    method = decoder.method_for(greedy=not temperature).name
    plain = Decoder(decoder.target, decoder.tokenizer, method=AR())
    assert decoder.tokenizer is not None
    console = Console(quiet=as_json, highlight=False)
    rows = []
    warm_up, chosen = _code(decoder.tokenizer, prompts) if target == EMBEDDED else _chats(decoder.tokenizer, prompts)
    for each in (plain, decoder):
        each.generate(warm_up, max_new_tokens=16)
    for number, (text, prompt) in enumerate(chosen, 1):
        panes = _Panes(console, text, method)
        with panes.live():
            slow = _timed(plain, prompt, params, panes.left)
            fast = _timed(decoder, prompt, params, panes.right)
        same = slow["tokens"] == fast["tokens"]
        rows.append(
            {
                "prompt": number,
                "tokens": len(fast["tokens"]),
                "equal": same,
                "ar_tokens_per_s": round(len(slow["tokens"]) / slow["seconds"], 1),
                "tokens_per_s": round(len(fast["tokens"]) / fast["seconds"], 1),
                "tau": round(len(fast["tokens"]) / fast["steps"], 3),
                "speedup": round(len(fast["tokens"]) / fast["seconds"] * slow["seconds"] / len(slow["tokens"]), 3),
            }
        )
    table = Table(
        title=f"autoregressive beside {method}, {'greedy' if not temperature else f'temperature {temperature}'}"
    )
    for column in ("prompt", "tokens", "equal", "ar tokens/s", f"{method} tokens/s", "tau", "speedup"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("prompt", "tokens")),
            "yes" if row["equal"] else "no",
            *(str(row[key]) for key in ("ar_tokens_per_s", "tokens_per_s", "tau", "speedup")),
        )
    console.print(table)
    overall = median(row["speedup"] for row in rows)
    console.print(f"median speedup {overall:.2f}x over plain decoding with the same target in the same loop")
    if as_json:
        facts = {"target": target, "method": method, "temperature": temperature, "median_speedup": overall}
        print(json.dumps(facts | {"prompts": rows}))
    if not all(row["equal"] for row in rows):  # a seed decides alone what is sampled
        raise typer.Exit(1)


def _settings(target: str, name: str | None, gamma: int | None) -> Method:
    """The method of these options. Raises ValueError for mistakes, and where it needs what does not come with the
    target."""
    layered = companion(target, Pacer.layer) is not None
    unnamed = default_method(own_draft(target) is not None, layered, ["gamma"] * (gamma is not None))
    settings = parse_method(name or unnamed, gamma)
    needed = {"draft": "draft" if settings.needs_draft else None, "pre-verifier": settings.layer, "head": settings.head}
    for what, part in needed.items():
        if part is not None and companion(target, part) is None:
            raise ValueError(f"method {settings.name!r} needs a {what}, and forerun has none for the target {target!r}")
    return settings


def _fetched() -> bool:
    """Whether the chat model is here, or could be fetched; says why not."""
    try:
        if find_smollm2() is None:
            fetch(SMOLLM2, say)
    except ValueError as error:
        say(f"{error}. Until then: the embedded pair, on code")
        return False
    return True


def _chats(tokenizer: Any, count: int) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """A prompt to warm up with, and questions, each as it is shown and as token ids."""
    from forerun.chat import chat_prompt

    warm_up, *chosen = (
        (text, chat_prompt(tokenizer, [{"role": "user", "content": text}])) for text in (WARM_UP, *QUESTIONS[:count])
    )
    return warm_up[1], chosen


def _code(tokenizer: Any, count: int) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """Likewise of held-out code. Raises ValueError where this Python has none."""
    from forerun.train.corpus import held_out_prompts

    warm_up, chosen = held_out_prompts(tokenizer, "validation", 1), held_out_prompts(tokenizer, "test", count)
    if not warm_up or not chosen:
        raise ValueError("this Python comes without the standard library's sources, which the demo continues")
    return warm_up[0], [(str(tokenizer.decode(prompt)), prompt) for prompt in chosen]


def _timed(decoder: Any, prompt: list[int], params: SamplingParams, show: Callable[[Any], None]) -> dict[str, Any]:
    """Streams one prompt. The seconds are those of decoding, without the terminal's."""
    tokens: list[int] = []
    steps, seconds = 0, 0.0
    stream = decoder.stream(prompt, params)
    while True:
        begun = perf_counter()
        chunk = next(stream, None)
        seconds += perf_counter() - begun
        if chunk is None:
            return {"tokens": tokens, "steps": steps, "seconds": seconds}
        tokens += chunk.step.tokens
        steps += 1
        show(chunk)


class _Panes:
    """Two texts side by side on a terminal, one after the other where the output is a file."""

    def __init__(self, console: Any, prompt: str, method: str) -> None:
        from rich.panel import Panel
        from rich.text import Text

        self.console, self.method = console, method
        self.texts = [Text(overflow="fold"), Text(overflow="fold")]
        console.print(Panel(Text(prompt, style="dim"), title="prompt"))

    def live(self) -> Any:
        from rich.live import Live

        if not self.console.is_terminal or self.console.quiet:
            return nullcontext()
        # Refreshed between the timed stretches: a thread of its own would take time from what is measured.
        self._live = Live(self._view(), console=self.console, auto_refresh=False, vertical_overflow="crop")
        self._refreshed = perf_counter()
        return self._live

    def _view(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(Panel(self.texts[0], title="ar"), Panel(self.texts[1], title=self.method))
        return grid

    def left(self, chunk: Any) -> None:
        self._add(0, chunk)

    def right(self, chunk: Any) -> None:
        self._add(1, chunk)

    def _add(self, side: int, chunk: Any) -> None:
        for piece, origin in chunk.pieces:
            self.texts[side].append(piece, style=STYLES.get(origin, "") if side else "")
        if self.console.is_terminal and not self.console.quiet:
            if chunk.finish_reason or perf_counter() - self._refreshed > REDRAW:
                self._live.update(self._view(), refresh=True)
                self._refreshed = perf_counter()
        elif chunk.finish_reason and side:
            self.console.print(self._view())
