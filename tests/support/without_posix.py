"""Use forerun in a process that lacks what only POSIX systems have, as one of Windows does.

python -m tests.support.without_posix FOLDER
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import pkgutil
import signal
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# What forerun stands on has its own answers, so it is imported as it is.
for library in ("torch", "transformers", "ray.serve", "fastapi", "uvicorn", "typer.rich_utils"):
    importlib.import_module(library)

MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
NAMES = {
    os: (
        *("fork", "getuid", "geteuid", "O_CLOEXEC", "sched_getaffinity", "sysconf", "killpg"),
        *("getpgid", "setsid", "uname"),
    ),
    signal: ("pause", "SIGHUP", "SIGUSR1", "SIGALRM", "pthread_sigmask", "sigwait"),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTNEED"),
}
for name in MODULES:
    sys.modules[name] = None  # importing it raises ImportError
for module, names in NAMES.items():
    for name in names:
        delattr(module, name)


def main(folder: Path) -> None:
    """Import all of forerun, and use what depends on the system."""
    import forerun

    for module in pkgutil.walk_packages(forerun.__path__, "forerun."):
        # One runs the command line, and the library in C is no module.
        if module.name not in ("forerun.__main__", "forerun.csrc._forerun"):
            importlib.import_module(module.name)

    import torch

    from forerun.api.load import Decoder
    from forerun.backends import prepare
    from forerun.backends.stored import store
    from forerun.csrc.cores import physical_cores
    from forerun.files import private_folder, take_lock, write_text
    from forerun.methods import AR
    from forerun.model import buffers
    from forerun.server.memory import free_memory
    from tests.support.families import tiny

    private = private_folder(folder / "private")
    write_text(private / "text", "whole")
    with (private / "lock").open("w") as lock:
        assert take_lock(lock.fileno())
    buffers.sys = SimpleNamespace(platform="win32")  # what we stand on must not see it
    shape = (1, 1, buffers.MAPPED, 1)
    buffer = buffers.new_buffer(torch.zeros(1), shape, (1, 1, 2 * buffers.MAPPED, 1))
    assert not buffer.is_releasable
    free_memory(torch.device("cpu"))
    assert physical_cores() is None
    model = prepare(store(tiny("llama"), "int4"))
    decoder = Decoder(model, method=AR(), prompt_cache=str(private / "prompts"))
    assert len(decoder.generate([3] * 600, max_new_tokens=4, ignore_eos=True).tokens) == 4
    use_commands(folder)


def use_commands(folder: Path) -> None:
    """Run commands of the command line, the last of them a server, which ends the process."""
    from tests.support.serving import make_decoder, models
    from tests.support.toys import save_lines, save_models

    os.environ["FORERUN_HOME"] = str(folder)
    target = str(save_models(folder, make_decoder().tokenizer, target=models()[0]) / "target")
    requests = save_lines(folder / "requests.jsonl", [{"prompt": "return", "max_tokens": 2}])
    assert json.loads(printed("info", "--json"))["threads"] > 0
    assert "kernels" in printed("doctor", status=None)
    assert printed("generate", "return", "--target", target, "--max-new-tokens", "3")
    for _ in range(2):  # the second finds all of it done
        printed("batch", str(requests), str(folder / "answers"), "--target", target)
    lines = (folder / "answers" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 1
    use_cache(folder)
    serve(target)


def use_cache(folder: Path) -> None:
    """Remove a model that another process was downloading."""
    from forerun.files import take_lock

    model = folder / "models" / "smollm2"
    model.mkdir(parents=True)
    (model / "part").write_text("part")
    with (model / ".lock").open("w") as lock:
        assert take_lock(lock.fileno())
    assert "smollm2" in printed("cache", "ls")
    assert "removed smollm2" in printed("cache", "rm", "smollm2")
    assert not model.exists()


def serve(target: str) -> None:
    """Serve until a request was answered and an interrupt came."""
    from forerun.server.listening import listen

    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    client = threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}",), daemon=True)
    client.start()
    command("serve", "--target", target, "--port", str(port), "--log-level", "error")


def ask(url: str) -> None:
    """Ask a server for a completion once it is ready, and interrupt it."""
    import httpx

    from tests.support.processes import health
    from tests.support.serving import until

    until(lambda: health(url) == 200, 250)
    body = {"prompt": "return", "max_tokens": 2, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60, trust_env=False)
    if answer.json()["usage"]["completion_tokens"] == 2:
        print("done", flush=True)
    signal.raise_signal(signal.SIGINT)


def command(*arguments: str) -> Any:
    """Run `forerun` with arguments in this process, and return its exit status.

    Where a command would leave the process, because threads of it run, it ends here too.
    """
    from forerun import cli

    sys.argv = ["forerun", *arguments]
    try:
        with mock.patch.object(cli, "_leave", sys.exit):
            cli.main()
    except SystemExit as end:
        return end.code
    return 0


def printed(*arguments: str, status: int | None = 0) -> str:
    """Return what a command prints. It must end with a status; None: with any."""
    text = io.StringIO()
    with redirect_stdout(text):
        ended = command(*arguments)
    assert status is None or ended == status, (arguments, ended, text.getvalue())
    return text.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
