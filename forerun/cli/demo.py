"""`forerun demo`: plain decoding and a faster method, with the chat model on questions or the embedded pair on code."""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from forerun.api.choose import resolve
from forerun.cli import options
from forerun.cli.common import quiet, say
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
    "Explain what a bicycle's gears do.",
    "Write a Python class for a queue with the methods put, get and size.",
    "Which fruits ripen in autumn?",
)
USUAL = 6  # of these questions
ROUNDS = 5  # after one that warms up
SLOW = 8.0  # seconds of the first round's questions, after which no more are asked
BUSY = 0.15  # share by which plain decoding's own speed may differ between rounds


@options.grouped
def demo(
    target: Annotated[
        str,
        typer.Option(
            help="smollm2, qwen-coder, or embedded: the pair that comes with forerun, on held-out code."
        ),
    ] = SMOLLM2,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"How many questions or pieces of code; {USUAL} by default, fewer if slow."
        ),
    ] = None,
    method: options.MethodOption = None,
    max_new_tokens: options.MaxNewTokensOption = 96,
    temperature: options.TemperatureOption = 0.0,
    guard: options.GuardOption = None,
    threads: options.ThreadsOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer questions with the chat model, plainly and faster, and compare. The model is fetched at first.

    Shows medians of 5 rounds. A first round warms up and is not counted, so the guard knows what pays, as in a server.
    No answer helps a later one.
    """
    if target not in FOLDERS:
        raise ValueError(f"--target of the demo is one of {', '.join(FOLDERS)}, not {target!r}")
    if target != EMBEDDED and (prompts or 1) > len(QUESTIONS):
        raise ValueError(f"--prompts is at most {len(QUESTIONS)} for {target}, not {prompts}")
    draft = MODELS[target].draft if target in MODELS else None
    resolve(target, draft, method)  # a mistake is reported before anything is fetched
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=0)
    if target != EMBEDDED and None in (find(target), find(draft or target)):
        try:
            fetch([target], say)
        except ValueError as error:
            say(f"{error}. Until then: the embedded pair, on code")
            target = EMBEDDED
    say_loading(target)
    quiet(threads)
    from rich.console import Console
    from rich.table import Table

    from forerun.api.load import Decoder, load
    from forerun.text.stop_strings import TextStream

    alone: dict[str, Any] = {"prefix_bytes": 0, "share_outputs": False}
    decoder: Any = load(target, method=method, guard=guard, **alone)
    name = decoder.method_for(greedy=not temperature).name
    both = Decoder(decoder.target, decoder.tokenizer, method=AR(), **alone), decoder
    console = Console(quiet=as_json, highlight=False)
    chosen, begun = _prompts(target, decoder.tokenizer, prompts), perf_counter()
    rounds: list[list[list[Any]]] = []
    speeds, speedups = (
        list[float](),
        list[float](),
    )  # of each round but the first: plain tokens/s, and over them
    for _ in range(1 + ROUNDS):
        rounds.append([])
        for number, (text, prompt) in enumerate(chosen, 1):
            turn = (
                1 if (len(rounds) + number) % 2 else -1
            )  # who goes first; nothing is printed meanwhile
            rounds[-1].append([each.generate(prompt, params) for each in both[::turn]][::turn])
            if len(rounds) == 1:
                done = rounds[0][-1][1]
                pieces = TextStream(decoder.tokenizer, prompt).push(
                    done.tokens, done.origins, finished=True
                )
                console.print(text, style="dim", markup=False)
                console.print(tinted(pieces), end="\n\n")
                if prompts is None and perf_counter() - begun > SLOW:
                    chosen = chosen[:number]
                    break
        if len(rounds) > 1:
            slow, fast = (sum(pair[who].stats.seconds for pair in rounds[-1]) for who in (0, 1))
            speeds.append(sum(pair[0].stats.tokens for pair in rounds[-1]) / slow)
            speedups.append(slow / fast)
    rows = [_row(number, pairs) for number, pairs in enumerate(zip(*rounds, strict=True), 1)]
    overall = round(median(speedups), 3) if any(row["speedup"] for row in rows) else None
    table = Table(
        title=f"autoregressive beside {name}, {f'temperature {temperature}' if temperature else 'greedy'}"
    )
    for title in ("prompt", "tokens", "equal", "ar tokens/s", f"{name} tokens/s", "tau", "speedup"):
        table.add_column(title, justify="right")
    words = {"True": "yes", "False": "no", "None": "-"}
    for row in rows:
        table.add_row(*(words.get(str(value), str(value)) for value in row.values()))
    console.print(table)
    console.print(
        f"median speedup {overall:.2f}x over plain decoding with the same target in the same loop, {len(speeds)} rounds"
        if overall
        else "no speedup: nothing was drafted"
    )
    if is_busy := max(speeds) - min(speeds) > BUSY * median(speeds):
        console.print(
            f"machine busy: plain decoding's own speed was {min(speeds):.0f} to {max(speeds):.0f} tokens/s"
        )
    if as_json:
        facts = {
            "target": target,
            "method": name,
            "temperature": temperature,
            "median_speedup": overall,
        }
        facts |= {"rounds": [round(each, 3) for each in speedups], "busy": is_busy}
        print(json.dumps(facts | {"prompts": rows}))
    if not all(row["equal"] for row in rows):  # the seed alone decides what is sampled
        raise typer.Exit(1)


def _prompts(target: str, tokenizer: Any, count: int | None) -> list[tuple[str, list[int]]]:
    """Return `count` prompts, or some, each as text and as token ids.

    Raises ValueError if this Python has less held-out code.
    """
    if target != EMBEDDED:
        from forerun.text.chat import chat_prompt

        return [
            (text, chat_prompt(tokenizer, [{"role": "user", "content": text}]))
            for text in QUESTIONS[: count or USUAL]
        ]
    from forerun.train.corpus import held_out_prompts

    chosen = held_out_prompts(tokenizer, "test", count or USUAL)
    if len(chosen) < (count or 1):
        raise ValueError(
            f"--prompts is at most {len(chosen)}, this Python's pieces of held-out code, not {count or 1}"
        )
    return [(str(tokenizer.decode(prompt)), prompt) for prompt in chosen]


def _row(number: int, pairs: tuple[list[Any], ...]) -> dict[str, Any]:
    """Return the figures of a prompt: medians of all rounds but the first. No speedup if nothing was drafted."""
    plain, fast = ([pair[who].stats for pair in pairs[1:]] for who in (0, 1))
    ratios = [
        after.tokens_per_s / before.tokens_per_s for before, after in zip(plain, fast, strict=True)
    ]
    return {
        "prompt": number,
        "tokens": fast[0].tokens,
        "equal": all(done.tokens == pairs[0][0].tokens for pair in pairs for done in pair),
        "ar_tokens_per_s": round(median(each.tokens_per_s for each in plain), 1),
        "tokens_per_s": round(median(each.tokens_per_s for each in fast), 1),
        "tau": round(median(each.tau for each in fast), 3),
        "speedup": round(median(ratios), 3) if any(each.drafted for each in fast) else None,
    }
