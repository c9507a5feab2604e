"""Requests for code, made of the functions of Python's standard library that have a docstring:
python benchmarks/training/code_requests.py COUNT > requests.jsonl

`benchmarks.training.gpu.heads --requests` reads them. Each line has the "text" and what it is "about": the docstring, about
which there are several requests.

The docstring is the request; the function's body is never shown. HumanEval's problems are of neither.
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

OF_A_FILE = 24  # functions of one file
FORMS = 4  # requests about a function
ASKED = (
    "Write a Python function `{name}({arguments})`. {summary}",
    "Complete this function:\n\n```python\n{signature}\n```",
    "{signature}",
    "Implement this in Python, with a short example of its use:\n\n{doc}",
    "Write unit tests for a Python function `{name}({arguments})`. {summary}",
)


def requests(count: int) -> Iterator[tuple[str, str]]:
    """Yield (docstring, request) about `count` functions, in the order of their files' hashes."""
    files = [each for split in SPLITS for each in source_files(split) if "test" not in each[0]]
    seen: set[str] = set()
    for _, text in sorted(files, key=lambda each: _digest(each[0])):
        functions = sorted(_functions(text), key=lambda each: _digest("\n".join(each)))
        for name, arguments, doc in functions[:OF_A_FILE]:
            if len(seen) == count:
                return
            if doc in seen:
                continue
            seen.add(doc)
            quoted = doc.replace("\n", "\n    ")
            first = int(_digest(doc)[:8], 16)
            for form in range(first, first + FORMS):
                yield (
                    doc,
                    ASKED[form % len(ASKED)].format(
                        name=name,
                        arguments=arguments,
                        doc=doc,
                        summary=doc.partition("\n\n")[0].replace("\n", " "),
                        signature=f'def {name}({arguments}):\n    """{quoted}\n    """',
                    ),
                )


def _functions(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, arguments and docstring of a source file's documented functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            doc, arguments = ast.get_docstring(node) or "", ast.unparse(node.args)
            arguments = re.sub(r"^(self|cls|mcs)(, |$)", "", arguments)
            if doc[:1].isalpha() and 60 <= len(doc) <= 600 and len(arguments) <= 100:
                yield node.name.strip("_") or node.name, arguments, doc


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for doc, request in requests(int(sys.argv[1])):
        print(json.dumps({"text": request, "about": doc}))
