"""The three built-in prompts of `forerun try`: short code, prose, and the edit of a long file.

They suit any model: one with a chat template answers messages, another one continues texts, and one
without a tokenizer gets bytes as token ids, of which only the repetitions mean anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun import methods
from forerun.bench.datasets import front_of
from forerun.text.chat import chat_prompt, has_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDIT_TOKENS = 2000  # of the prompt with the long file
MIN_EDIT_TOKENS = 48  # of a model whose context leaves no place for more
# Modules of forerun that the long file consists of, because they are on every machine.
EDITED_FILES = ("base.py", "lookup.py", "hybrid.py")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Task:
    """A built-in prompt.

    Attributes:
        name: in the table.
        message: what a chat model is asked; "{}" stands for the long file.
        beginning: what another model continues, likewise.
    """

    name: str
    message: str
    beginning: str


CODE = Task(
    "code",
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    'def merge(first, second):\n    """Merge two sorted lists into one sorted list."""\n',
)
PROSE = Task(
    "prose",
    "Explain in a few sentences why the leaves of many trees change their colour in autumn.",
    "The leaves of many trees change their colour in autumn, because",
)
EDIT = Task(
    "edit",
    "Write this Python file again with the class Method renamed to Strategy, and change nothing "
    "else.\n\n```python\n{}```",
    "# The file before the class Method was renamed to Strategy\n\n{}\n"
    "# The file after the class Method was renamed to Strategy\n\n",
)
TASKS = (CODE, PROSE, EDIT)


def encoded(
    task: Task, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, limit: int
) -> list[int]:
    """Return a task's prompt as token ids, with as much of the long file as `limit` leaves.

    Args:
        task: the task.
        tokenizer: that of the model, or None.
        vocab_size: of the model.
        limit: the most token ids. A prompt of one sentence is cut at the beginning.
    """
    encode = _encoder(task, tokenizer, vocab_size)
    if "{}" not in task.message:
        return encode("")[-limit:]
    lines = _long_file().splitlines(keepends=True)
    return _fitting(encode, lines, limit)[-limit:]


def _encoder(task: Task, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Encode:
    """Return what makes token ids of a task with a file's text."""
    if tokenizer is None:
        return lambda text: [
            byte % vocab_size for byte in task.beginning.replace("{}", text).encode()
        ]

    def continued(text: str) -> list[int]:
        ids = tokenizer(task.beginning.replace("{}", text), add_special_tokens=False)["input_ids"]
        return [*front_of(tokenizer), *ids]

    def asked(text: str) -> list[int]:
        content = task.message.replace("{}", text)
        return chat_prompt(tokenizer, [{"role": "user", "content": content}])

    if not has_template(tokenizer):
        return continued
    try:
        asked("")
    except ValueError:  # the template refuses a single message
        return continued
    return asked


def _fitting(encode: Encode, lines: list[str], limit: int) -> list[int]:
    """Return the prompt with the most lines that `limit` token ids hold.

    The number of lines is found by bisection, because a tokenizer need not give a line the same
    tokens in every place.
    """
    fits = 0
    too_many = len(lines) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(encode("".join(lines[:middle]))) <= limit:
            fits = middle
        else:
            too_many = middle
    return encode("".join(lines[:fits]))


def _long_file() -> str:
    folder = Path(methods.__file__).parent
    return "\n\n".join((folder / name).read_text(encoding="utf-8") for name in EDITED_FILES)
