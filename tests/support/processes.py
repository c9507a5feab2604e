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
    *options: str, port: int | None = None, folder: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    env = os.environ | ({} if folder is None else {"TMPDIR": str(folder)})
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
    command = [*COMMAND, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def health(url: str) -> int | None:
    try:
        return httpx.get(url + "/health", timeout=60, **LOCAL).status_code
    except httpx.HTTPError:
        return None
