"""Conversations of qwen-coder on a GPU, to train heads on: requests about the standard library from a file
(`benchmarks/qwen-coder/requests.py` makes it), exercises and questions of the model's own, and its answers to all."""

from __future__ import annotations

import ast
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chat.data import is_sound
from benchmarks.gpu.target import Target
from forerun.files import write_text
from forerun.text.chat import chat_prompt
from forerun.train.corpus import STRETCH, split_of
from forerun.train.texts import SPLITS, Conversation

STEP = 8  # between the stretches of a text that are looked up
LONGEST = 320  # tokens of a prompt
LIKELY = 0.02  # of the likeliest token's probability: what is less likely is not drawn in a question
KINDS = (
    "strings", "lists of integers", "dictionaries", "matrices", "prime numbers", "dates and times", "parentheses",
    "sorting", "searching", "recursion", "words in a sentence", "vowels and letters", "ciphers", "file paths",
    "polynomials", "fractions", "bits", "base conversion", "intervals", "graphs", "trees", "stacks and queues",
    "counting", "permutations", "geometry", "money", "sets", "tuples", "sequences", "digits of a number", "palindromes",
    "sums and products", "medians and averages", "parsing", "validation of input", "text formatting", "grids and games",
    "linked lists", "rounding", "sliding windows", "dynamic programming", "divisors", "Roman numerals", "filtering",
    "grouping", "merging", "removing duplicates", "the largest and smallest elements", "music notes", "temperatures",
)  # fmt: skip
EXERCISE = (
    "Invent a programming exercise about {kind}. Write a Python function's signature and its docstring, which says "
    "what the function must do and shows two calls with their results. Do not write the body."
)


def make(
    target: Target,
    tokenizer: Any,
    given: Sequence[str],
    held: Iterable[str],
    out: Path,
    exercises: int,
    questions: int,
    limit: int,
    say: Callable[[str], None],
) -> None:
    """Make train.jsonl and validation.jsonl in `out`. So many `exercises` and `questions` are asked for, beside the
    `given` requests; those of the test split and those that share text with `held` are left out. Every second answer is
    greedy, the others are drawn at temperature 1."""
    stops = [tokenizer.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|endoftext|>")]
    known = {each[at : at + STRETCH] for each in held for at in range(len(each) - STRETCH + 1)}

    def is_apart(text: str) -> bool:
        return not any(text[at : at + STRETCH] in known for at in range(0, len(text) - STRETCH + 1, STEP))

    begun, rng = time.time(), random.Random(0)
    asked = [EXERCISE.format(kind=KINDS[number % len(KINDS)]) for number in range(exercises)]
    header = _prompt(tokenizer, "\x01")[: _prompt(tokenizer, "\x01").index(tokenizer.encode("\x01")[0])]
    prompts = [*(_prompt(tokenizer, each) for each in asked), *[header] * questions]
    drawn = target.generate(prompts, [1.0] * len(prompts), 160, stops, rows=4096, least=LIKELY)
    texts = tokenizer.batch_decode([each[:-1] if each[-1] in stops else each for each in drawn])
    is_ended = [each[-1] in stops for each in drawn]
    own = [text.strip() for text, ended in zip(texts[exercises:], is_ended[exercises:], strict=True) if ended]
    sources = {
        "request": given,
        "exercise": [found for text in texts[:exercises] if (found := exercise(text))],
        "own": [text for text in own if is_sound(text)],
    }
    chosen: dict[str, str] = {}  # by the text without signs
    for source, some in sources.items():
        for text in some:
            if split_of(text) != SPLITS[2] and is_apart(text):
                chosen.setdefault(re.sub(r"\W+", " ", text.lower()), f"{source}\n{text}")
    asked = list(chosen.values())
    rng.shuffle(asked)
    rows = [each.partition("\n") for each in asked]
    prompts = [_prompt(tokenizer, text) for _, _, text in rows]
    kept = [number for number, each in enumerate(prompts) if len(each) <= LONGEST]
    say(f"{time.time() - begun:.0f} s: questions {dict(Counter(rows[each][0] for each in kept))}")
    warmth = [float(place % 2) for place in range(len(kept))]
    begun = time.time()
    answers = target.generate([prompts[each] for each in kept], warmth, limit, stops)
    spent, tokens = time.time() - begun, sum(map(len, answers))
    say(f"{spent:.0f} s: {len(answers)} answers of {tokens} tokens, {tokens / spent:.0f} a second")
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    lines: dict[str, list[str]] = {split: [] for split in SPLITS[:2]}
    for number, temperature, answer, text in zip(kept, warmth, answers, texts, strict=True):
        source, _, question = rows[number]
        if is_apart(text):
            one = Conversation(question, prompts[number], answer, text, temperature, source, split_of(question))
            lines[one.split].append(json.dumps(asdict(one)) + "\n")
    for split, some in lines.items():
        write_text(out / f"{split}.jsonl", "".join(some))


def exercise(text: str) -> str | None:
    """Return the signature and the docstring in an answer, or None if it has no such function."""
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    code = block[1] if block else text
    start = re.search(r"^def ", code, re.MULTILINE)
    if start is None:
        return None
    code = code[start.start() :]
    quotes = '"""' if '"""' in code else "'''"
    parts = code.split(quotes)
    if len(parts) < 3:
        return None
    code = quotes.join(parts[:2]) + quotes
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    return code + "\n" if 80 <= len(code) <= 900 else None


def _prompt(tokenizer: Any, text: str) -> list[int]:
    return chat_prompt(tokenizer, [{"role": "user", "content": text}])
