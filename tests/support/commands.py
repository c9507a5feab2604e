"""`forerun` as a user runs it, in processes that are forked after torch has been imported.

The imports of torch and transformers take most of a short command's time. Each run has a process,
arguments, standard streams, an environment and an exit status of its own, as with
`python -m forerun`. Some test also runs each command by an interpreter of its own.

Their decoders go by known costs, as those of the tests' own processes do. `forerun bench` measures.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

_IMPORTS = (
    "torch",
    "transformers",
    "forerun.api.load",
    "forerun.bench.measure",
    "forerun.cli.commands",
)


class Running:
    """A command that runs, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, status: Path, stderr: TextIO) -> None:
        self.pid = pid
        self.status = status
        self.stderr = stderr

    def poll(self) -> int | None:
        return int(self.status.read_text()) if self.status.exists() else None

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} runs on"
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends, and its status is not yet written
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def running(
    *arguments: str,
    program: str | None = None,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Iterator[Running]:
    """Yield a command that runs meanwhile, and is killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        errors, status = (Path(folder) / name for name in ("errors", "status"))
        os.mkfifo(errors)
        asked = {
            "arguments": arguments,
            "program": program,
            "streams": [os.devnull, os.devnull, str(errors)],
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "status": str(status),
        }
        pid = int(_ask(asked))
        with errors.open() as stderr:  # waits for the command, which opens it too
            process = Running(pid, status, stderr)
            try:
                yield process
            finally:
                process.kill()
                process.wait(30)


def run(
    *arguments: str,
    stdin: str = "",
    program: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("in", "out", "err")]
        for path, text in zip(streams, (stdin, "", ""), strict=True):
            Path(path).write_text(text)
        asked = {
            "arguments": arguments,
            "program": program,
            "streams": streams,
            "env": dict(env),
            "cwd": str(Path.cwd()),
            "status": None,
        }
        code = int(_ask(asked))
        return subprocess.CompletedProcess(
            arguments, code, *(Path(path).read_text() for path in streams[1:])
        )


def _ask(asked: dict[str, Any]) -> str:
    """Ask for a command. Return what the process that forks says about it."""
    if asked["program"] is not None:
        # benchmarks/ and tests/ are not installed.
        path = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})"
        asked["program"] = f"{path}\n{asked['program']}"
    server = _server(os.getpid())
    try:
        print(json.dumps(asked), file=server.stdin, flush=True)
        line = server.stdout.readline() if server.stdout else ""
    except BaseException:  # a timeout, or Ctrl-C: the next run must not wait for what still runs
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        _server.cache_clear()
        raise
    assert line, f"the process that commands are forked from has ended: {server.poll()}"
    return line


@cache
def _server(pid: int) -> subprocess.Popen[str]:
    """Start the process that forks. It ends when the process `pid`, which holds its stdin, ends."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__], **pipes, start_new_session=True)


def _serve() -> None:
    gc.disable()  # a look for garbage among what is imported finds none
    for name in _IMPORTS:
        importlib.import_module(name)
    # Beside this file, and not from `tests`: a command finds nothing that is not installed.
    known = importlib.import_module("known_costs")
    importlib.import_module("forerun.api.build").measure_costs = known.costs_for  # type: ignore
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        asked = json.loads(line)
        status = asked.pop("status")
        if status is not None and os.fork():
            continue  # the fork starts the command and waits for it
        pid = os.fork()
        if not pid:  # a program goes on to the interpreter's end, as any other process does
            _become(**asked)
            return
        if status is not None:
            print(pid, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status is not None:
            written = Path(f"{status}.tmp")
            written.write_text(str(code))
            written.replace(status)
            os._exit(0)
        print(code, flush=True)


def _become(
    arguments: list[str], program: str | None, streams: list[str], env: dict[str, str], cwd: str
) -> None:
    for number, (path, mode) in enumerate(
        zip(streams, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)
    ):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # what was imported may have asked for it in the other environment
    sys.argv = ["-c" if program is not None else "forerun", *arguments]
    if program is None:
        if "TRANSFORMERS_VERBOSITY" not in env:  # a command sets it before it imports transformers
            importlib.import_module("transformers.utils.logging").set_verbosity_error()
        try:
            importlib.import_module("forerun.cli").main()
        except SystemExit as end:
            _end(end)
    else:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(program, names)


def _end(status: SystemExit) -> None:
    """End the process without the interpreter's own end, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status.code or 0))


if __name__ == "__main__":
    _serve()
