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

from tests.support.commands import Running, running
from tests.support.local import LOCAL

COMMAND = [sys.executable, "-m", "forerun", "serve"]


@contextmanager
def started(
    *options: str, port: int | None = None, folder: Path | None = None, program: str | None = None
) -> Iterator[tuple[Running, str]]:
    """Yield a server's process and its address. It runs `program` in place of `forerun`.

    The process is forked after the imports, which take longer than most tests of servers.
    """
    env = os.environ | ({} if folder is None else {"TMPDIR": str(folder)})
    port = port or free_port()
    command = ["serve", "--port", str(port), *options]
    with running(*command, program=program, env=env, cwd=folder) as process:
        yield process, f"http://127.0.0.1:{port}"


@contextmanager
def started_apart(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server as `started` does, by an interpreter that imports all it needs."""
    port = free_port()
    command = [*COMMAND, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def until_said(process: Running, words: str) -> None:
    """Read what a process says, up to a line with these words."""
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
