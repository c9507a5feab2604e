"""aider, without a terminal: one message that changes a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tries

AIDER = Path(sys.executable).with_name("aider")
OPTIONS = (
    "--yes-always --no-auto-commits --no-check-update --no-show-model-warnings --no-gitignore "
    "--no-show-release-notes --analytics-disable --no-detect-urls --no-suggest-shell-commands "
    "--no-pretty --timeout 300"
)
ORDER = "Rename the function add to plus. Answer with the whole new file."


def edited(*more: str) -> str:
    """Return the file that aider has changed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sums.py"
        file.write_text("def add(a, b):\n    return a + b\n")
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        env = os.environ | {
            "OPENAI_API_BASE": tries.URL,
            "OPENAI_API_KEY": tries.KEY,
            "HOME": folder,
        }
        command = [AIDER, *OPTIONS.split(), "--model", f"openai/{tries.MODEL}", *more]
        done = subprocess.run(
            [*command, "--message", ORDER, "sums.py"],
            cwd=folder, env=env, capture_output=True, text=True, timeout=600,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        print(done.stdout, done.stderr, file=sys.stderr)
        assert done.returncode == 0, done.stderr[-800:]
        text = file.read_text()
        assert "def plus(" in text, done.stdout[-800:]
        return text


def whole() -> None:
    edited("--edit-format", "whole")


def not_streamed() -> None:
    edited("--edit-format", "whole", "--no-stream")


def diff() -> None:
    edited("--edit-format", "diff")


tries.run(
    ["aider-chat"],
    {
        "`--message`": whole,
        "`--no-stream`": not_streamed,
        "`--edit-format diff`": diff,
    },
)
