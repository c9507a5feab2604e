"""Use forerun in a process that lacks what only POSIX systems have, as one of Windows does.

python -m tests.support.without_posix FOLDER
"""

from __future__ import annotations

import importlib
import mmap
import os
import pkgutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

# What forerun stands on has its own answers, so it is imported as it is.
for library in ("torch", "transformers", "ray.serve", "fastapi", "uvicorn", "typer.rich_utils"):
    importlib.import_module(library)

MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
NAMES = {
    os: ("fork", "getuid", "geteuid", "O_CLOEXEC", "sched_getaffinity", "sysconf", "killpg"),
    signal: ("pause", "SIGHUP", "SIGUSR1", "SIGALRM", "pthread_sigmask"),
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

    for found in pkgutil.walk_packages(forerun.__path__, "forerun."):
        # One runs the command line, and the library in C is no module.
        if found.name not in ("forerun.__main__", "forerun.csrc._forerun"):
            importlib.import_module(found.name)

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
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
