"""Conversations of a target on a GPU, to train heads on: requests about the standard library from a file
(`benchmarks/training/code_requests.py` makes it), exercises and questions of the model's own, and its answers to all."""

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
from typing import Any, NamedTuple

from benchmarks.training.chats import Question, apart, is_sound, plain, user_header
from benchmarks.training.gpu.target import Target
from forerun.files import write_text
from forerun.text.chat import chat_prompt
from forerun.train.corpus import Split, split_of
from forerun.train.texts import SPLITS, Conversation

ROWS = 2048  # decoded together
ASKED = 160  # tokens of a question
LONGEST = 320  # tokens of a prompt
LIKELY = (
    0.02  # of the likeliest token's probability: what is less likely is not drawn in a question
)
TOPICS = (
    "strings", "lists of integers", "dictionaries", "matrices", "prime numbers", "dates and times", "parentheses",
    "sorting", "searching", "recursion", "words in a sentence", "vowels and letters", "ciphers", "file paths",
    "polynomials", "fractions", "bits", "base conversion", "intervals", "graphs", "trees", "stacks and queues",
    "counting", "permutations", "geometry", "money", "sets", "tuples", "sequences", "digits of a number", "palindromes",
    "sums and products", "medians and averages", "parsing", "validation of input", "text formatting", "grids and games",
    "linked lists", "rounding", "sliding windows", "dynamic programming", "divisors", "Roman numerals", "filtering",
    "grouping", "merging", "removing duplicates", "the largest and smallest elements", "music notes", "temperatures",
)  # fmt: skip
EXERCISE = (
    "Invent a programming exercise about {topic}. Write a Python function's signature and its docstring, which says "
    "what the function must do and shows two calls with their results. Do not write the body."
)


class Given(NamedTuple):
    """A question from a file, and what it is about: questions about one thing are of one split."""

    text: str
    about: str


def make(
    target: Target,
    tokenizer: Any,
    given: Sequence[Given],
    held: Iterable[str],
    out: Path,
    exercises: int,
    questions: int,
    limit: int,
    say: Callable[[str], None],
) -> None:
    """Ask for `exercises` and `questions`, add the `given` requests, and answer all with at most `limit` tokens, every
    second greedily and the others at temperature 1. Write validation.jsonl and train.jsonl to `out`.

    Those of the test split are left out, and those that share text with `held` or with another split's questions. All
    questions are kept in questions.json and answers in a file for ROWS of them, so that a run that was stopped goes on.
    """
    stops = [tokenizer.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|endoftext|>")]
    path = out / "questions.json"
    held = list(held)
    if not path.exists():
        found = [("request", each.text, split_of(each.about)) for each in given]
        found += _asked(target, tokenizer, exercises, questions, stops)
        known = {plain(each) for each in held}
        chosen = {
            plain(text): (source, text, split)
            for source, text, split in found
            if split != SPLITS[2]
        }
        rows = sorted(each for name, each in chosen.items() if name not in known)
        random.Random(0).shuffle(rows)
        write_text(path, json.dumps(rows))
    rows = json.loads(path.read_text())
    say(f"questions {dict(Counter(source for source, _, _ in rows))}")
    prompts = [_prompt(tokenizer, text) for _, text, _ in rows]
    # Those of a length together, so that short ones do not wait.
    order = sorted(
        (at for at, each in enumerate(prompts) if len(each) <= LONGEST),
        key=lambda at: len(prompts[at]),
    )
    conversations: list[Conversation] = []
    for number, start in enumerate(range(0, len(order), ROWS)):
        some, path = order[start : start + ROWS], out / f"answers-{number:05d}.json"
        warmth = [float(at % 2) for at in some]
        if not path.exists():
            begun = time.time()
            answers = target.generate([prompts[at] for at in some], warmth, limit, stops)
            write_text(path, json.dumps(answers))
            rate = sum(map(len, answers)) / (time.time() - begun)
            say(
                f"answers to {start + len(some)} of {len(order)} questions, {rate:.0f} tokens a second"
            )
        answers = json.loads(path.read_text())
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for at, temperature, answer, text in zip(some, warmth, answers, texts, strict=True):
            source, question, split = rows[at]
            conversations.append(
                Conversation(question, prompts[at], answer, text, temperature, source, split)
            )
    splits = [Question(text, source, split) for source, text, split in rows]
    kept, dropped = apart(
        conversations, splits + [Question(text, "held", SPLITS[2]) for text in held]
    )
    say(f"{len(kept)} conversations, {dropped} more are neighbours of held-out questions")
    for split in (SPLITS[1], SPLITS[0]):
        lines = [json.dumps(asdict(each)) + "\n" for each in kept if each.split == split]
        write_text(out / f"{split}.jsonl", "".join(lines))


def _asked(
    target: Target, tokenizer: Any, exercises: int, questions: int, stops: list[int]
) -> list[tuple[str, str, Split]]:
    """Return (source, text, split) of exercises and questions that the target makes up. Exercises of one name are of
    one split; questions are sampled after the template's user header (as in Magpie, arXiv 2406.08464)."""
    asked = [EXERCISE.format(topic=TOPICS[number % len(TOPICS)]) for number in range(exercises)]
    prompts = [*(_prompt(tokenizer, each) for each in asked), *[user_header(tokenizer)] * questions]
    drawn = target.generate(
        prompts, [1.0] * len(prompts), ASKED, stops, rows=2 * ROWS, least=LIKELY
    )
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    made = [found for text in texts[:exercises] if (found := exercise(text))]
    own = [
        text.strip()
        for text, each in zip(texts[exercises:], drawn[exercises:], strict=True)
        if each[-1] in stops
    ]
    return [("exercise", text, split_of(name)) for name, text in made] + [
        ("own", text, split_of(text)) for text in own if is_sound(text)
    ]


def exercise(text: str) -> tuple[str, str] | None:
    """Return the name of a function in an answer and its signature with the docstring; None if there is none."""
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    start = re.search(r"^def (\w+).*", block[1] if block else text, re.MULTILINE | re.DOTALL)
    if start is None:
        return None
    quotes = '"""' if '"""' in start[0] else "'''"
    parts = start[0].split(quotes)
    code = quotes.join([*parts[:2], "\n"])
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    return (start[1], code) if len(parts) >= 3 and 80 <= len(code) <= 900 else None


def _prompt(tokenizer: Any, text: str) -> list[int]:
    return chat_prompt(tokenizer, [{"role": "user", "content": text}])
