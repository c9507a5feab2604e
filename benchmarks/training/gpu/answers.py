"""Conversations of a target on a GPU, to train heads on.

The target answers requests about the standard library from a file
(`benchmarks/training/code_requests.py` makes it), and exercises and questions that it makes up.
"""

from __future__ import annotations

import ast
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.training.chats import Question, apart, is_sound, plain, user_header
from benchmarks.training.gpu.target import Target
from forerun.files import write_text
from forerun.text.chat import chat_prompt
from forerun.train.corpus import Split, split_of
from forerun.train.texts import SPLITS, Conversation

ROWS = 2048  # decoded together
QUESTION_TOKENS = 160  # at most
PROMPT_TOKENS = 320  # of a prompt that is answered, at most
# A token of a question is not drawn if it is less likely than this share of the likeliest.
LIKELY = 0.02
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
EXERCISE = (
    "Invent a programming exercise about {topic}. Write a Python function's signature and its "
    "docstring, which says what the function must do and shows two calls with their results. Do "
    "not write the body."
)
TOPICS = (
    "strings",
    "lists of integers",
    "dictionaries",
    "matrices",
    "prime numbers",
    "dates and times",
    "parentheses",
    "sorting",
    "searching",
    "recursion",
    "words in a sentence",
    "vowels and letters",
    "ciphers",
    "file paths",
    "polynomials",
    "fractions",
    "bits",
    "base conversion",
    "intervals",
    "graphs",
    "trees",
    "stacks and queues",
    "counting",
    "permutations",
    "geometry",
    "money",
    "sets",
    "tuples",
    "sequences",
    "digits of a number",
    "palindromes",
    "sums and products",
    "medians and averages",
    "parsing",
    "validation of input",
    "text formatting",
    "grids and games",
    "linked lists",
    "rounding",
    "sliding windows",
    "dynamic programming",
    "divisors",
    "Roman numerals",
    "filtering",
    "grouping",
    "merging",
    "removing duplicates",
    "the largest and smallest elements",
    "music notes",
    "temperatures",
)


class Given(NamedTuple):
    """A question from a file, and what it is about: questions about one thing share a split."""

    text: str
    about: str


@dataclass(frozen=True)
class Wishes:
    """What is asked and answered.

    Attributes:
        given: requests from a file.
        held: texts with which nothing may share a stretch.
        exercises, questions: how many the target is asked to make up.
        limit: the most tokens of an answer.
    """

    given: Sequence[Given]
    held: Sequence[str]
    exercises: int
    questions: int
    limit: int


class Maker:
    """Makes conversations with a target.

    All questions are kept in questions.json, and answers in a file for ROWS of them, so that a run
    that was stopped goes on.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        wishes: Wishes,
        out: Path,
        say: Callable[[str], None],
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.wishes = wishes
        self.out = out
        self.say = say
        self.stops = [tokenizer.convert_tokens_to_ids(token) for token in END_TOKENS]

    def make(self) -> None:
        """Write validation.jsonl and train.jsonl.

        Every second answer is greedy, and the others are drawn at temperature 1. Conversations of
        the test split are left out, and those that share text with `held` or with another split's
        questions.
        """
        questions = self.questions()
        sources = Counter(question.source for question in questions)
        self.say(f"questions {dict(sources)}")
        conversations = self.answered(questions)
        held = [Question(text, "held", SPLITS[2]) for text in self.wishes.held]
        kept, dropped = apart(conversations, questions + held)
        self.say(f"{len(kept)} conversations, {dropped} more are neighbours of held-out questions")
        for split in (SPLITS[1], SPLITS[0]):
            rows = [conversation for conversation in kept if conversation.split == split]
            lines = [json.dumps(asdict(conversation)) + "\n" for conversation in rows]
            write_text(self.out / f"{split}.jsonl", "".join(lines))

    def questions(self) -> list[Question]:
        """Return all questions but those of the test split, shuffled."""
        path = self.out / "questions.json"
        if not path.exists():
            asked = [
                ("request", request.text, split_of(request.about)) for request in self.wishes.given
            ]
            asked += self._made_up()
            chosen = {plain(row[1]): row for row in asked if row[2] != SPLITS[2]}
            known = {plain(text) for text in self.wishes.held}
            rows = sorted(row for name, row in chosen.items() if name not in known)
            random.Random(0).shuffle(rows)
            write_text(path, json.dumps(rows))
        rows = json.loads(path.read_text())
        return [Question(text, source, split) for source, text, split in rows]

    def _made_up(self) -> list[tuple[str, str, Split]]:
        """Return (source, text, split) of exercises and questions that the target makes up.

        Exercises of one name share a split. Questions are sampled after the template's user header
        (as in Magpie, arXiv 2406.08464).
        """
        count = self.wishes.exercises
        asked = [EXERCISE.format(topic=TOPICS[number % len(TOPICS)]) for number in range(count)]
        prompts = [self._prompt(text) for text in asked]
        prompts += [user_header(self.tokenizer)] * self.wishes.questions
        drawn = self.target.generate(
            prompts,
            [1.0] * len(prompts),
            QUESTION_TOKENS,
            self.stops,
            rows=2 * ROWS,
            least=LIKELY,
        )
        texts = self.tokenizer.batch_decode(drawn, skip_special_tokens=True)
        rows: list[tuple[str, str, Split]] = []
        for text in texts[:count]:
            parts = exercise(text)
            if parts is not None:
                name, code = parts
                rows.append(("exercise", code, split_of(name)))
        for text, tokens in zip(texts[count:], drawn[count:], strict=True):
            question = text.strip()
            if tokens[-1] in self.stops and is_sound(question):
                rows.append(("own", question, split_of(question)))
        return rows

    def answered(self, questions: list[Question]) -> list[Conversation]:
        """Return the questions with their answers."""
        prompts = [self._prompt(question.text) for question in questions]
        # Prompts of about one length run together, so that short ones do not wait.
        order = [number for number, prompt in enumerate(prompts) if len(prompt) <= PROMPT_TOKENS]
        order.sort(key=lambda number: len(prompts[number]))
        conversations: list[Conversation] = []
        for part, start in enumerate(range(0, len(order), ROWS)):
            chosen = order[start : start + ROWS]
            temperatures = [float(number % 2) for number in chosen]
            path = self.out / f"answers-{part:05d}.json"
            if not path.exists():
                started_at = time.time()
                asked = [prompts[number] for number in chosen]
                answers = self.target.generate(asked, temperatures, self.wishes.limit, self.stops)
                write_text(path, json.dumps(answers))
                rate = sum(map(len, answers)) / (time.time() - started_at)
                self.say(
                    f"answers to {start + len(chosen)} of {len(order)} questions, {rate:.0f} "
                    "tokens a second"
                )
            answers = json.loads(path.read_text())
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
            rows = zip(chosen, temperatures, answers, texts, strict=True)
            for number, temperature, answer, text in rows:
                question = questions[number]
                conversations.append(
                    Conversation(
                        question=question.text,
                        prompt=prompts[number],
                        answer=answer,
                        text=text,
                        temperature=temperature,
                        source=question.source,
                        split=question.split,
                    )
                )
        return conversations

    def _prompt(self, text: str) -> list[int]:
        return chat_prompt(self.tokenizer, [{"role": "user", "content": text}])


def held_texts(prompts: Iterable[Any]) -> list[str]:
    """Return the texts of prompts, as `forerun bench` reads them."""
    texts = []
    for prompt in prompts:
        words = " ".join(message["content"] for message in prompt.messages or ())
        texts.append(prompt.text or words)
    return texts


def exercise(text: str) -> tuple[str, str] | None:
    """Return the name of a function in an answer, and its signature with the docstring.

    It is None if the answer has no such function.
    """
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
