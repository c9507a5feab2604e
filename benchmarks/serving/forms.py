"""Are forced calls and schema answers valid, from many clients at once, and what do forms cost?

    python -m benchmarks.serving.forms [--target smollm2] [--requests 510] [--clients 16]
        [--out JSON]

The requests take turns: a schema answer, then a call of a named tool, then one of any tool. They
are sampled at temperature 1, each with a seed of its own. jsonschema judges the answers. An answer
that `max_tokens` has cut is counted apart. All forms are bounded, so that there should be none.

`plain` are as many requests without a form, of about as many tokens. `seconds` are those of a
request, and of one to the first piece of a streamed answer, of half of the requests and of 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import httpx
from jsonschema import ValidationError, validate

from benchmarks.serving.servers import System, measure, question, questions, started

TIMEOUT = 600.0
MAX_TOKENS = 300
PLAIN_TOKENS = 40
WORD = {"type": "string", "maxLength": 20}


def strict(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has just these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    strict(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    strict(
        kind={"enum": ["cat", "dog", "bird"]}, tags={"type": "array", "items": WORD, "maxItems": 3}
    ),
    strict(
        when={"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"},
        note={"anyOf": [WORD, {"type": "null"}]},
    ),
    {
        "type": "array",
        "items": strict(x={"type": "integer", "minimum": -9, "maximum": 9}),
        "minItems": 1,
        "maxItems": 2,
    },
]
TOOLS = {
    "weather": strict(city=WORD, days={"type": "integer", "minimum": 1, "maximum": 14}),
    "search": strict(text=WORD, exact={"type": "boolean"}),
    "stop": strict(),
}


@dataclass(frozen=True)
class Answer:
    """An answer, and how long it took.

    Attributes:
        problem: why it is not valid; "" if it is.
        tokens: of the answer.
        first: seconds until its first piece.
        seconds: until its end.
    """

    problem: str
    tokens: int
    first: float
    seconds: float


def body(number: int, texts: list[str], has_form: bool) -> dict[str, Any]:
    """Return the body of a request."""
    text = question(number, texts)
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS if has_form else PLAIN_TOKENS}
    if not has_form:
        fields["ignore_eos"] = True
    elif number % 3 == 0:
        schema = {"schema": SCHEMAS[number // 3 % len(SCHEMAS)], "name": "answer"}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        fields["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in TOOLS.items()
        ]
        name = sorted(TOOLS)[number % len(TOOLS)]
        named = {"type": "function", "function": {"name": name}}
        fields["tool_choice"] = named if number % 3 == 1 else "required"
        fields["parallel_tool_calls"] = False  # a small model would call on and on
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 1,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def ask(url: str, texts: list[str], has_form: bool, number: int) -> Answer:
    """Ask for an answer, and judge it."""
    asked = body(number, texts, has_form)
    begin = perf_counter()
    first = 0.0
    chunks = []
    with httpx.stream("POST", url, json=asked, timeout=TIMEOUT, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                first = first or perf_counter() - begin
                chunks.append(json.loads(line.removeprefix("data: ")))
    seconds = perf_counter() - begin
    tokens = chunks[-1]["usage"]["completion_tokens"] if chunks else 0
    return Answer(problem(asked, chunks) if has_form else "", tokens, first, seconds)


def problem(asked: dict[str, Any], chunks: list[dict[str, Any]]) -> str:
    """Return why a streamed answer is not what was asked for, or ""."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    if not choices:
        return f"no answer: {str(chunks)[:200]}"
    deltas = [choice["delta"] for choice in choices]
    if choices[-1]["finish_reason"] == "length":
        return "cut"
    try:
        if "tools" in asked:
            check_calls(asked["tool_choice"], deltas)
        else:
            text = "".join(delta.get("content") or "" for delta in deltas)
            validate(json.loads(text), asked["response_format"]["json_schema"]["schema"])
    except (ValueError, KeyError, ValidationError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def check_calls(choice: Any, deltas: list[dict[str, Any]]) -> None:
    """Raise ValueError, KeyError or ValidationError unless the calls are valid."""
    names: defaultdict[int, str] = defaultdict(str)
    arguments: defaultdict[int, str] = defaultdict(str)
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            names[call["index"]] += function.get("name") or ""
            arguments[call["index"]] += function.get("arguments") or ""
    if not names:
        raise ValueError("no call")
    for index, name in names.items():
        if choice != "required" and name != choice["function"]["name"]:
            raise ValueError(f"{name} was called")
        validate(json.loads(arguments[index]), TOOLS[name])


def figures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return the figures of some answers that took `seconds` together."""
    firsts = [answer.first for answer in answers]
    times = [answer.seconds for answer in answers]
    return {
        "requests": len(answers),
        "valid": sum(not answer.problem for answer in answers),
        "cut": sum(answer.problem == "cut" for answer in answers),
        "problems": sorted({answer.problem for answer in answers} - {"", "cut"})[:5],
        "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 1),
        "first": [round(median(firsts), 3), round(quantiles(firsts, n=20)[-1], 3)],
        "seconds": [round(median(times), 3), round(quantiles(times, n=20)[-1], 3)],
    }


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results of a server."""
    options = ("--target", args.target, "--max-rows", str(args.clients), "--log-level", "warning")
    server = System("forerun", (sys.executable, "-m", "forerun", "serve", *options))
    texts = questions()
    results: dict[str, Any] = {}
    with started(server, sorted(os.sched_getaffinity(0)), folder / "log") as (_, address):
        url = f"{address}/v1/chat/completions"
        for name, has_form in (("warm-up", True), ("forms", True), ("plain", False)):
            count = args.clients if name == "warm-up" else args.requests
            begin = perf_counter()
            with ThreadPoolExecutor(args.clients) as pool:
                answers = list(pool.map(partial(ask, url, texts, has_form), range(count)))
            results[name] = figures(answers, perf_counter() - begin)
            print(name, results[name], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--requests", type=int, default=510)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path)
    measure(parser, measured)


if __name__ == "__main__":
    main()
