"""Makes the long prompts of the runs qwen-coder/long.

    python benchmarks/speed/long_prompts.py

They are files of the standard library with a request, in three lengths, and follow-ups in
conversations of which all but the last message is known. The files are of the split that nothing
was trained on (`forerun.train.corpus`), as this Python has them. So the prompts themselves are
kept, and long.json says what made them and has their hashes.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs as a file

from forerun.api.loading import load_tokenizer
from forerun.text.chat import chat_prompt
from forerun.train.corpus import source_files

File = tuple[str, str]  # path and text
Messages = list[dict[str, str]]

BENCHMARKS = Path(__file__).parents[1]
FOLDER = BENCHMARKS / "speed" / "qwen-coder"
PROJECT = BENCHMARKS / "serving" / "project.json"
LENGTHS = {1000: 4, 4000: 4, 16000: 2}  # tokens of a prompt, and number of prompts
KNOWN_TOKENS = 4000  # of a conversation before its follow-up
ANSWER_TOKENS = 300  # of these, left for the answer
PROJECT_FILES = 5  # of the agent's project (`serving/agent.py`)
PROJECT_SIZES = (450, 900)  # least and most tokens of these files
REQUESTS = (
    "Explain in detail what this code does, class by class and function by function.",
    "Add type hints and a docstring to every function of `{file}`. Write the whole file anew.",
    "Write tests with pytest for `{name}`: usual cases, edges and errors.",
    "Rewrite `{name}` so that it is easier to read, and explain each change.",
)
FOLLOW_UPS = (
    "Write tests with pytest for `{name}`.",
    "Add type hints to every function of `{file}`. Write the whole file anew.",
    "Explain how `{name}` works, line by line.",
    "Which mistakes could a caller of `{name}` make? Write `{name}` anew so that it refuses them.",
)


def ordered_files() -> list[File]:
    """Return files that are no tests, in an order by hash, so that topics are mixed."""
    files = [(path, text) for path, text in source_files("test") if "test/" not in path]
    return sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).hexdigest())


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield names of the functions of 8 to 60 lines, and the first lines of their docstrings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno <= 60:
            yield node.name, (ast.get_docstring(node) or "").split("\n")[0]


def first_function(text: str) -> str:
    """Return the name of the first function, or an empty string."""
    return next((name for name, _ in functions(text)), "")


def whole_function(text: str, beginning: str) -> str:
    """Return the first function of a text that its beginning defines once, or an empty string."""
    for name, _ in functions(text):
        if beginning.count(f"def {name}(") == 1:
            return name
    return ""


def shown(files: list[File], request: str) -> Messages:
    """Return a message with files and a request."""
    texts = [f"`{path}`:\n\n```python\n{text.rstrip()}\n```" for path, text in files]
    return [{"role": "user", "content": "\n\n".join([*texts, request])}]


class Maker:
    """Fills prompts with files, each file once in a length."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer("qwen-coder")

    def size(self, messages: Messages) -> int:
        """Return the number of tokens of a conversation."""
        return len(chat_prompt(self.tokenizer, messages))

    def filled(self, files: list[File], length: int, request: str) -> tuple[list[File], str]:
        """Take files from the list until a prompt has `length` tokens.

        The last file is cut after a line.

        Returns:
            The files of the prompt, and its request.
        """
        parts: list[File] = []
        name = ""
        while True:
            path, text = files.pop(0)
            name = name or first_function(text)
            if not name:
                continue  # it has nothing to ask for
            asked = request.format(name=name, file=parts[0][0] if parts else path)
            if self.size(shown([*parts, (path, text)], asked)) <= length:
                parts.append((path, text))
                continue
            beginning = self.fitting(parts, path, text, asked, length)
            if not parts:
                name = whole_function(text, beginning)
                if not name:
                    continue
                asked = request.format(name=name, file=path)
            return ([*parts, (path, beginning)] if beginning else parts), asked

    def fitting(self, parts: list[File], path: str, text: str, asked: str, length: int) -> str:
        """Return the most lines of a file that fit behind other parts into `length` tokens."""
        lines = text.splitlines(keepends=True)
        low = 0
        high = len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            beginning = "".join(lines[:middle])
            if self.size(shown([*parts, (path, beginning)], asked)) <= length:
                low = middle
            else:
                high = middle - 1
        return "".join(lines[:low])

    def first_requests(self, length: int, count: int) -> list[dict[str, Any]]:
        """Return prompts of one message."""
        files = ordered_files()
        prompts = []
        for place in range(count):
            request = REQUESTS[(place + 1) % len(REQUESTS)]
            parts, asked = self.filled(files, length, request)
            prompts.append({"messages": shown(parts, asked)})
        return prompts

    def follow_ups(self) -> list[dict[str, Any]]:
        """Return conversations of three messages, of which the first two are known."""
        files = ordered_files()
        prompts = []
        for request in FOLLOW_UPS:
            parts, asked = self.filled(files, KNOWN_TOKENS - ANSWER_TOKENS, REQUESTS[0] + " {name}")
            name = asked.rpartition(" ")[2]
            follow_up = request.format(name=name, file=parts[0][0])
            messages = [
                *shown(parts, REQUESTS[0]),
                {"role": "assistant", "content": answer_about(parts, name)},
                {"role": "user", "content": follow_up},
            ]
            prompts.append({"messages": messages, "known": 2})
        return prompts

    def project(self) -> dict[str, str]:
        """Return some whole files by their names, each with functions."""
        least, most = PROJECT_SIZES
        project: dict[str, str] = {}
        for path, text in ordered_files():
            tokens = len(self.tokenizer(text)["input_ids"])
            is_full = len(project) >= PROJECT_FILES
            if not is_full and least <= tokens <= most and first_function(text):
                project.setdefault(Path(path).name, text)
        return project


def answer_about(parts: list[File], name: str) -> str:
    """Return an answer that lists the first functions of the files, or `name` if there are none."""
    lines = []
    for _, text in parts:
        for function, about in functions(text):
            lines.append(f"- `{function}`: {about}" if about else f"- `{function}`")
    return "These are its larger functions:\n\n" + "\n".join(lines[:12] or [f"- `{name}`"])


def main() -> None:
    maker = Maker()
    prompts = {}
    for length, count in LENGTHS.items():
        prompts[f"long-{length}"] = maker.first_requests(length, count)
    prompts["long-known"] = maker.follow_ups()
    facts: dict[str, Any] = {}
    for name, rows in prompts.items():
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
        sizes = [maker.size(row["messages"]) for row in rows]
        facts[name] = {"tokens": sizes, "sha256": hashlib.sha256(text).hexdigest()}
        print(name, facts[name])
    PROJECT.write_text(json.dumps(maker.project(), indent=1) + "\n")
    record = {
        "about": "Files of CPython's standard library, under the PSF's licence, with requests",
        "python": platform.python_version(),
        "prompts": facts,
    }
    (FOLDER / "long.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
