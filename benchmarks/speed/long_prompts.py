"""Makes the long prompts of qwen-coder/long: python benchmarks/speed/long_prompts.py

Files of the standard library with a request, in three lengths, and follow-ups in conversations of which all but the
last message is known. Files are of the split that nothing was trained on (`forerun.train.corpus`), as this Python has
them. So the prompts are kept here, and long.json has what made them and their hashes.
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # so that it runs as a file

from forerun.api.loading import load_tokenizer  # noqa: E402
from forerun.text.chat import chat_prompt  # noqa: E402
from forerun.train.corpus import source_files  # noqa: E402

LENGTHS = {1000: 4, 4000: 4, 16000: 2}  # tokens of a prompt, and number of prompts
KNOWN = 4000  # tokens of a conversation before its follow-up
PROJECT, SIZES = (
    5,
    (450, 900),
)  # files of the agent's project (`serving/agent.py`), and their tokens
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


def ordered_files() -> list[tuple[str, str]]:
    """Return paths and texts of files that are no tests, in an order by hash, so that topics are mixed."""
    files = [(path, text) for path, text in source_files("test") if "test/" not in path]
    return sorted(files, key=lambda each: hashlib.sha256(each[0].encode()).hexdigest())


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a text's functions of 8 to 60 lines, with the first line of what they say of themselves."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno <= 60:
            yield node.name, (ast.get_docstring(node) or "").split("\n")[0]


class Maker:
    """Fills prompts with files, each file once in a length."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer("qwen-coder")

    def size(self, messages: list[dict[str, str]]) -> int:
        return len(chat_prompt(self.tokenizer, messages))

    def shown(self, parts: list[tuple[str, str]], request: str) -> list[dict[str, str]]:
        files = "\n\n".join(f"`{path}`:\n\n```python\n{text.rstrip()}\n```" for path, text in parts)
        return [{"role": "user", "content": f"{files}\n\n{request}"}]

    def filled(
        self, files: list[tuple[str, str]], length: int, request: str
    ) -> tuple[list[tuple[str, str]], str]:
        """Take files from the list until a prompt has `length` tokens; the last is cut behind a line."""
        parts, name = list[tuple[str, str]](), ""
        while True:
            path, text = files.pop(0)
            name = name or next((own for own, _ in functions(text)), "")
            if not name:
                continue  # nothing to ask for in it
            asked = request.format(name=name, file=parts[0][0] if parts else path)
            if self.size(self.shown([*parts, (path, text)], asked)) <= length:
                parts.append((path, text))
                continue
            lines = text.splitlines(keepends=True)
            low, high = 0, len(lines)
            while low < high:  # the most lines that fit
                middle = (low + high + 1) // 2
                fits = (
                    self.size(self.shown([*parts, (path, "".join(lines[:middle]))], asked))
                    <= length
                )
                low, high = (middle, high) if fits else (low, middle - 1)
            part = "".join(lines[:low])
            if not parts:
                kept = [
                    own
                    for own, _ in functions(text)
                    if f"def {own}(" in part and part.count(f"def {own}(") == 1
                ]
                name = kept[0] if kept else ""
                if not name:
                    continue
                asked = request.format(name=name, file=path)
            return [*parts, (path, part)] if low else parts, asked

    def first_requests(self, length: int, count: int) -> list[dict[str, Any]]:
        files = ordered_files()
        prompts = []
        for place in range(count):
            parts, asked = self.filled(files, length, REQUESTS[(place + 1) % len(REQUESTS)])
            prompts.append({"messages": self.shown(parts, asked)})
        return prompts

    def follow_ups(self) -> list[dict[str, Any]]:
        files, prompts = ordered_files(), []
        for request in FOLLOW_UPS:
            parts, asked = self.filled(files, KNOWN - 300, REQUESTS[0] + " {name}")
            name = asked.rpartition(" ")[2]
            told = [(own, about) for _, text in parts for own, about in functions(text)][:12]
            lines = [f"- `{own}`: {about}" if about else f"- `{own}`" for own, about in told]
            answer = "These are its larger functions:\n\n" + "\n".join(lines or [f"- `{name}`"])
            messages = self.shown(parts, REQUESTS[0])
            messages += [{"role": "assistant", "content": answer}]
            messages += [{"role": "user", "content": request.format(name=name, file=parts[0][0])}]
            prompts.append({"messages": messages, "known": 2})
        return prompts

    def project(self) -> dict[str, str]:
        """Return some whole files by their names, each with functions."""
        found = dict[str, str]()
        for path, text in ordered_files():
            tokens = len(self.tokenizer(text)["input_ids"])
            if len(found) < PROJECT and SIZES[0] <= tokens <= SIZES[1] and any(functions(text)):
                found.setdefault(Path(path).name, text)
        return found


def main() -> None:
    maker, told = Maker(), dict[str, Any]()
    made = {
        f"long-{length}": maker.first_requests(length, count) for length, count in LENGTHS.items()
    }
    made["long-known"] = maker.follow_ups()
    for name, prompts in made.items():
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
        (HERE / f"{name}.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
        sizes = [maker.size(prompt["messages"]) for prompt in prompts]
        told[name] = {"tokens": sizes, "sha256": hashlib.sha256(text).hexdigest()}
        print(name, told[name])
    (HERE.parent / "serving" / "project.json").write_text(
        json.dumps(maker.project(), indent=1) + "\n"
    )
    about = "Files of CPython's standard library, under the PSF's licence, with requests"
    whole = {"about": about, "python": platform.python_version(), "prompts": told}
    (HERE / "long.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
