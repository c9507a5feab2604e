"""Requests for code, made of the documented functions of Python's standard library.

    python benchmarks/training/code_requests.py COUNT > requests.jsonl

`benchmarks.training.gpu.heads --requests` reads them. Each line has the "text" and what it is
"about": the docstring, about which there are several requests. The docstring is the request, and
the function's body is never shown. None of them is a problem of HumanEval.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from forerun.train.corpus import source_files
from forerun.train.texts import SPLITS

OF_A_FILE = 24  # functions of one file
REQUESTS = 4  # about a function
FORMS = (
    "Write a Python function `{name}({arguments})`. {summary}",
    "Complete this function:\n\n```python\n{signature}\n```",
    "{signature}",
    "Implement this in Python, with a short example of its use:\n\n{doc}",
    "Write unit tests for a Python function `{name}({arguments})`. {summary}",
)


class Function(NamedTuple):
    name: str
    arguments: str
    doc: str


def requests(count: int) -> Iterator[tuple[str, str]]:
    """Yield (docstring, request) about `count` functions, in the order of their files' hashes."""
    files = [file for split in SPLITS for file in source_files(split) if "test" not in file[0]]
    seen: set[str] = set()
    for _, text in sorted(files, key=lambda file: _digest(file[0])):
        functions = sorted(_functions(text), key=lambda function: _digest("\n".join(function)))
        for function in functions[:OF_A_FILE]:
            if len(seen) == count:
                return
            if function.doc not in seen:
                seen.add(function.doc)
                for request in _requests_about(function):
                    yield function.doc, request


def _requests_about(function: Function) -> Iterator[str]:
    """Yield the requests about one function."""
    name, arguments, doc = function
    quoted = doc.replace("\n", "\n    ")
    first = int(_digest(doc)[:8], 16)
    for number in range(first, first + REQUESTS):
        yield FORMS[number % len(FORMS)].format(
            name=name,
            arguments=arguments,
            doc=doc,
            summary=doc.partition("\n\n")[0].replace("\n", " "),
            signature=f'def {name}({arguments}):\n    """{quoted}\n    """',
        )


def _functions(text: str) -> Iterator[Function]:
    """Yield a source file's documented functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node) or ""
            arguments = re.sub(r"^(self|cls|mcs)(, |$)", "", ast.unparse(node.args))
            if doc[:1].isalpha() and 60 <= len(doc) <= 600 and len(arguments) <= 100:
                yield Function(node.name.strip("_") or node.name, arguments, doc)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for doc, request in requests(int(sys.argv[1])):
        print(json.dumps({"text": request, "about": doc}))
