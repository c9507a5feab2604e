"""`forerun demo`: plain decoding beside a faster method, with the chat model on questions or the embedded pair on
code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.api.resolve import resolve
from forerun.cli.common import STYLES, quiet, say
from forerun.cli.options import (
    GammaOption,
    GuardOption,
    JsonOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
)
from forerun.methods import AR, Method
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, SMOLLM2, find_smollm2
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
    as_json: JsonOption = False,
) -> None:
    """Answer questions with the chat model twice, plainly and faster, and compare. The model is fetched at first."""
    target = EMBEDDED if embedded else SMOLLM2
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

    from forerun.api.load import Decoder, load

    is_named = method is not None or gamma is not None
    decoder = load(target, method=settings if is_named else None, guard=guard)
    method = decoder.method_for(greedy=not temperature).name
    plain = Decoder(decoder.target, decoder.tokenizer, method=AR())
    console = Console(quiet=as_json, highlight=False)
    warm_up, chosen = (_code if target == EMBEDDED else _chats)(decoder.tokenizer, prompts)
    for each in (plain, decoder):
        each.generate(warm_up, max_new_tokens=16)
    rows = []
    for number, (text, prompt) in enumerate(chosen, 1):
        with _panes(console, text, method) as add:
            slow = _timed(plain, prompt, params, partial(add, 0))
            fast = _timed(decoder, prompt, params, partial(add, 1))
        count = len(fast["tokens"])
        rates = len(slow["tokens"]) / slow["seconds"], count / fast["seconds"]
        rows.append(
            {
                "prompt": number,
                "tokens": count,
                "equal": slow["tokens"] == fast["tokens"],
                "ar_tokens_per_s": round(rates[0], 1),
                "tokens_per_s": round(rates[1], 1),
                "tau": round(count / fast["steps"], 3),
                "speedup": round(rates[1] / rates[0], 3),
            }
        )
    how = f"temperature {temperature}" if temperature else "greedy"
    table = Table(title=f"autoregressive beside {method}, {how}")
    for title in ("prompt", "tokens", "equal", "ar tokens/s", f"{method} tokens/s", "tau", "speedup"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(("no", "yes")[value] if isinstance(value, bool) else str(value) for value in row.values()))
    console.print(table)
    overall = median(row["speedup"] for row in rows)
    console.print(f"median speedup {overall:.2f}x over plain decoding with the same target in the same loop")
    if as_json:
        facts = {"target": target, "method": method, "temperature": temperature, "median_speedup": overall}
        print(json.dumps(facts | {"prompts": rows}))
    if not all(row["equal"] for row in rows):  # the seed alone decides what is sampled
        raise typer.Exit(1)


def _settings(target: str, name: str | None, gamma: int | None) -> Method:
    """Return the method of these options. Raises ValueError for mistakes, and if the target comes without a part that
    the method needs."""
    return resolve(target, None, name, {} if gamma is None else {"gamma": gamma}).method


def _fetched() -> bool:
    """Fetch the chat model if need be. If that fails, say why and return False."""
    try:
        if find_smollm2() is None:
            fetch(SMOLLM2, say)
    except ValueError as error:
        say(f"{error}. Until then: the embedded pair, on code")
        return False
    return True


def _chats(tokenizer: Any, count: int) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """Return a prompt to warm up with, and questions, each as it is shown and as token ids."""
    from forerun.text.chat import chat_prompt

    texts = WARM_UP, *QUESTIONS[:count]
    warm_up, *prompts = (chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts)
    return warm_up, list(zip(texts[1:], prompts, strict=True))


def _code(tokenizer: Any, count: int) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """Likewise of held-out code. Raises ValueError if this Python comes without it."""
    from forerun.train.corpus import held_out_prompts

    warm_up, chosen = held_out_prompts(tokenizer, "validation", 1), held_out_prompts(tokenizer, "test", count)
    if not warm_up or not chosen:
        raise ValueError("this Python comes without the standard library's sources, which the demo continues")
    return warm_up[0], [(str(tokenizer.decode(prompt)), prompt) for prompt in chosen]


def _timed(decoder: Any, prompt: list[int], params: SamplingParams, show: Callable[[Any], None]) -> dict[str, Any]:
    """Stream one prompt. The seconds are those of decoding, without the terminal's."""
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


@contextmanager
def _panes(console: Any, prompt: str, method: str) -> Iterator[Callable[[int, Any], None]]:
    """Show two texts side by side, live on a terminal and at their end elsewhere; yields what adds a chunk to one."""
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console.print(Panel(Text(prompt, style="dim"), title="prompt"))
    texts = Text(overflow="fold"), Text(overflow="fold")
    grid = Table.grid(expand=True)
    for _ in texts:
        grid.add_column(ratio=1)
    grid.add_row(Panel(texts[0], title="ar"), Panel(texts[1], title=method))
    # Refreshed between the timed stretches: a thread of its own would take time from what is measured.
    live = Live(grid, console=console, auto_refresh=False, vertical_overflow="crop")
    is_live, refreshed = console.is_terminal and not console.quiet, perf_counter()

    def add(side: int, chunk: Any) -> None:
        nonlocal refreshed
        for piece, origin in chunk.pieces:
            texts[side].append(piece, style=STYLES.get(origin, "") if side else "")
        if is_live and (chunk.finish_reason or perf_counter() - refreshed > REDRAW):
            live.refresh()
            refreshed = perf_counter()

    if is_live:
        with live:
            yield add
    else:
        yield add
        console.print(grid)
