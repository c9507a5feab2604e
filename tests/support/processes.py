"""Servers in processes of their own, as a user starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.local import LOCAL

COMMAND = [sys.executable, "-m", "forerun", "serve"]


@contextmanager
def started(
    *options: str, port: int | None = None, folder: Path | None = None, program: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server's process and its address. It runs `program` in place of `forerun`."""
    env = os.environ | ({} if folder is None else {"TMPDIR": str(folder)})
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
    start = [sys.executable, "-c", program, "serve"] if program else COMMAND
    command = [*start, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def until_said(process: subprocess.Popen[str], words: str) -> None:
    """Read what a process says, up to a line with these words."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return
    raise AssertionError("".join(lines))


def health(url: str) -> int | None:
    try:
        return httpx.get(url + "/health", timeout=60, **LOCAL).status_code
    except httpx.HTTPError:
        return None
