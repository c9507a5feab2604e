"""`forerun demo`: the embedded pair on held-out code, plain decoding beside a faster method."""

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
    MaxNewTokensOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
    parse_method,
    quiet,
)
from forerun.methods import default_method
from forerun.params import SamplingParams

REDRAW = 0.08  # seconds between pictures on a terminal


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="How many held-out prompts.")] = 3,
    method: MethodOption = None,
    gamma: GammaOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    guard: GuardOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
) -> None:
    """Decode held-out standard-library code twice, plainly and faster, and compare."""
    settings = parse_method(method or default_method(True, True, ["gamma"] * (gamma is not None)), gamma)
    is_named = method is not None or gamma is not None
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=0)
    quiet(threads)
    from rich.console import Console
    from rich.table import Table

    from forerun.api import Decoder, load
    from forerun.methods import AR
    from forerun.zoo.corpus import held_out_prompts

    decoder = load(method=settings if is_named else None, guard=guard)
    method = decoder.method_for(greedy=not temperature).name
    plain = Decoder(decoder.target.model, decoder.tokenizer, method=AR())
    assert decoder.tokenizer is not None
    console = Console(quiet=as_json, highlight=False)
    rows = []
    warm_up = held_out_prompts(decoder.tokenizer, "validation", 1)
    chosen = held_out_prompts(decoder.tokenizer, "test", prompts)
    if not warm_up or not chosen:
        raise ValueError("this Python comes without the standard library's sources, which the demo continues")
    for each in (plain, decoder):
        each.generate(warm_up[0], max_new_tokens=16)
    for number, prompt in enumerate(chosen, 1):
        panes = _Panes(console, str(decoder.tokenizer.decode(prompt)), method)
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
        # Sampled texts differ; only greedy output can be compared token by token.
        equal = "yes" if row["equal"] else "no" if not temperature else "(sampled)"
        table.add_row(
            *(str(row[key]) for key in ("prompt", "tokens")),
            equal,
            *(str(row[key]) for key in ("ar_tokens_per_s", "tokens_per_s", "tau", "speedup")),
        )
    console.print(table)
    overall = median(row["speedup"] for row in rows)
    console.print(f"median speedup {overall:.2f}x over plain decoding with the same target in the same loop")
    if as_json:
        print(json.dumps({"method": method, "temperature": temperature, "median_speedup": overall, "prompts": rows}))
    if not temperature and not all(row["equal"] for row in rows):
        raise typer.Exit(1)


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
