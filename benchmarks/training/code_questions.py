"""Questions about functions of Python's standard library, for a chat model to answer.

python benchmarks/training/code_questions.py COUNT > questions.jsonl
python -m benchmarks.training.chats --questions questions.jsonl --out chats
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator

from forerun.train.corpus import source_files
from forerun.train.texts import SPLITS

OF_A_FILE = 8  # questions about one file's functions
FORMS = (
    "What does this Python function do?\n\n{}",
    "Explain this code in two sentences.\n\n{}",
    "How would I test this function?\n\n{}",
    "Write a docstring for this function.\n\n{}",
    "Can this Python code be made simpler?\n\n{}",
    "What are the parameters of `{name}` in Python's `{module}`, and what does it return?\n\n{}",
)


def questions(count: int) -> Iterator[str]:
    """Yield questions about functions, in the order of their files' hashes."""
    files = [file for split in SPLITS for file in source_files(split)]
    seen: set[str] = set()
    for relative, text in sorted(files, key=lambda file: _digest(file[0])):
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if module.startswith("test."):
            continue
        functions = sorted(_functions(text), key=lambda function: _digest(function[1]))
        for name, code in functions[:OF_A_FILE]:
            if len(seen) == count:
                return
            if code not in seen:
                seen.add(code)
                form = FORMS[int(_digest(code)[:8], 16) % len(FORMS)]
                yield form.format(f"```python\n{code}\n```", name=name, module=module)


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the short functions of a source file, with their names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            indent = len(code) - len(code.lstrip())
            code = re.sub(rf"^ {{{indent}}}", "", code, flags=re.MULTILINE)
            if 120 <= len(code) <= 500:
                yield node.name, code


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for question in questions(int(sys.argv[1])):
        print(json.dumps({"text": question}))
