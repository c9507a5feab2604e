"""`forerun demo`: plain decoding and a faster method, with the chat model on questions or the embedded pair on code."""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.api.resolve import resolve
from forerun.cli.common import quiet, say
from forerun.cli.options import (
    GuardOption,
    JsonOption,
    MaxNewTokensOption,
    MethodOption,
    TemperatureOption,
    ThreadsOption,
)
from forerun.cli.writing import say_loading, tinted
from forerun.methods import AR
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, FOLDERS, MODELS, SMOLLM2, find
from forerun.zoo.fetch import fetch

QUESTIONS = (
    "What is the difference between weather and climate?",
    "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "List five ways to save water at home.",
    "Why is the sky blue?",
    "Write a short email to a colleague: our meeting is moved from Monday to Wednesday.",
    "Tell me a short story about a lighthouse keeper and a lost dog.",
)


def demo(
    target: Annotated[
        str,
        typer.Option(help="smollm2, qwen-coder, or embedded: the pair that comes with forerun, on held-out code."),
    ] = SMOLLM2,
    prompts: Annotated[
        int, typer.Option(min=1, help=f"How many questions, {len(QUESTIONS)} at most, or held-out pieces of code.")
    ] = 3,
    method: MethodOption = None,
    max_new_tokens: MaxNewTokensOption = 96,
    temperature: TemperatureOption = 0.0,
    guard: GuardOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer questions with the chat model twice, plainly and faster, and compare. The model is fetched at first."""
    if target not in FOLDERS:
        raise ValueError(f"--target of the demo is one of {', '.join(FOLDERS)}, not {target!r}")
    draft = MODELS[target].draft if target in MODELS else None
    found = resolve(target, draft, method)  # a mistake is reported before anything is fetched
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=0)
    if target != EMBEDDED and None in (find(target), find(draft or target)):
        try:
            fetch([target], say)
        except ValueError as error:
            say(f"{error}. Until then: the embedded pair, on code")
            target = EMBEDDED
    say_loading(target, method=found.method)
    quiet(threads)
    from rich.console import Console
    from rich.table import Table

    from forerun.api.load import Decoder, load
    from forerun.engine.stats import summarise

    decoder = load(target, method=method, guard=guard)
    name = decoder.method_for(greedy=not temperature).name
    plain = Decoder(decoder.target, decoder.tokenizer, method=AR())
    console = Console(quiet=as_json, highlight=False)
    (_, warm_up), *chosen = _prompts(target, decoder.tokenizer, prompts)
    for each in (plain, decoder):
        each.generate(warm_up, max_new_tokens=16)
    table = Table(title=f"autoregressive beside {name}, {f'temperature {temperature}' if temperature else 'greedy'}")
    for title in ("prompt", "tokens", "equal", "ar tokens/s", f"{name} tokens/s", "tau", "speedup"):
        table.add_column(title, justify="right")
    rows: list[dict[str, Any]] = []
    for number, (text, prompt) in enumerate(chosen, 1):
        slow, fast = (_timed(each, prompt, params) for each in (plain, decoder))
        before, stats = (summarise([chunk.step for chunk in chunks], seconds) for chunks, seconds in (slow, fast))
        outputs = [[token for chunk in chunks for token in chunk.step.tokens] for chunks, _ in (slow, fast)]
        row = {
            "prompt": number,
            "tokens": stats.tokens,
            "equal": outputs[0] == outputs[1],
            "ar_tokens_per_s": round(before.tokens_per_s, 1),
            "tokens_per_s": round(stats.tokens_per_s, 1),
            "tau": round(stats.tau, 3),
            "speedup": round(stats.tokens_per_s / before.tokens_per_s, 3),
        }
        rows.append(row)
        table.add_row(*(("no", "yes")[value] if isinstance(value, bool) else str(value) for value in row.values()))
        console.print(text, style="dim", markup=False)
        console.print(tinted(piece for chunk in fast[0] for piece in chunk.pieces), end="\n\n")
    overall = median(row["speedup"] for row in rows)
    console.print(table)
    console.print(f"median speedup {overall:.2f}x over plain decoding with the same target in the same loop")
    if as_json:
        facts = {"target": target, "method": name, "temperature": temperature, "median_speedup": overall}
        print(json.dumps(facts | {"prompts": rows}))
    if not all(row["equal"] for row in rows):  # the seed alone decides what is sampled
        raise typer.Exit(1)


def _prompts(target: str, tokenizer: Any, count: int) -> list[tuple[str, list[int]]]:
    """Return a prompt to warm up with, and `count` or fewer more, each as text and as token ids.

    Raises ValueError if this Python comes without held-out code.
    """
    if target != EMBEDDED:
        from forerun.text.chat import chat_prompt

        texts = ("Name three planets.", *QUESTIONS[:count])
        return [(text, chat_prompt(tokenizer, [{"role": "user", "content": text}])) for text in texts]
    from forerun.train.corpus import held_out_prompts

    warm_up, chosen = held_out_prompts(tokenizer, "validation", 1), held_out_prompts(tokenizer, "test", count)
    if not warm_up or not chosen:
        raise ValueError("this Python comes without the standard library's sources, which the demo continues")
    return [(str(tokenizer.decode(prompt)), prompt) for prompt in (*warm_up, *chosen)]


def _timed(decoder: Any, prompt: list[int], params: SamplingParams) -> tuple[list[Any], float]:
    """Return the chunks of an answer, and their seconds. Nothing is printed meanwhile."""
    begun = perf_counter()
    chunks = list(decoder.stream(prompt, params))
    return chunks, perf_counter() - begun
