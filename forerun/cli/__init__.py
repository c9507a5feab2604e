"""The command line's entry point: `main`.

Everything that is slow to import is imported after the handler of interrupts is set, so that Ctrl-C
during an import is also answered with one line.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit status that shells give for Ctrl-C
TERMINATED = 143  # and for SIGTERM
# Errors of writing to a disk, which a user can mend.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# How often a thread of torch looks for new work, after each product, before it goes to sleep. With
# the usual 300,000 the waiting threads keep their cores from other work.
SPIN_COUNT = "100000"
# Python looks for garbage whenever this many objects more were made than freed. Imports make many
# objects that stay, and looking for garbage among them took half a second.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line.

    A user's mistake gives one line on stderr and the exit status 2. Ctrl-C, pressed once or many
    times, gives one line and the exit status 130. SIGTERM gives one line and the exit status 143,
    or 0 for the server, which is ended that way.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    gc.set_threshold(GC_THRESHOLD)
    _print_what_consoles_lack()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        status = _run()
        gc.freeze()  # Python looks for garbage once more when it ends
        if status == INTERRUPTED:  # typer caught the interrupt
            raise KeyboardInterrupt
        if _has_daemons():
            _leave(status)
        sys.exit(status)
    except BaseException as error:
        # An interrupt inside a library may come out as another error.
        if is_interrupt(error):
            _leave(INTERRUPTED, "interrupted")
        if isinstance(error, SystemExit) or not _has_daemons():
            raise
        traceback.print_exc()
        _leave(1)


def _has_daemons() -> bool:
    """Return whether threads run that may be in a long step of the models.

    Python would end under them, and the process abort when that step ends.
    """
    return any(thread.daemon for thread in threading.enumerate())


def _print_what_consoles_lack() -> None:
    """Print "?" for characters that the output's encoding lacks, instead of ending with an error.

    This is for Windows, where it may have an old code page, without the lines of tables.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


def _run() -> int:
    """Run the command that the arguments name. Returns the exit status."""
    import typer

    from forerun.cli.commands import UsageError, app

    try:
        status = app(standalone_mode=False)
        if sys.stdout is not None:  # as it is where it is closed
            sys.stdout.flush()  # a full disk is noticed here, and not when Python ends
        return status if isinstance(status, int) else 0
    except typer.Abort:
        return INTERRUPTED
    except UsageError as error:
        message = error.format_message()
        if not message:  # no command was given, so typer has printed the help
            return 0
    except (ValueError, FileExistsError, PermissionError) as error:
        if is_interrupt(error):
            raise
        message = str(error)
    except BrokenPipeError:  # the reader of our output has ended, for example `| head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        message = f"cannot write to {error.filename or 'the output'}: {error.strerror}"
        with suppress(OSError):
            sys.stdout.close()  # else Python tries to write the rest when it ends
    with suppress(OSError):  # where stderr is on the same disk
        print(f"forerun: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the process. While a server runs, it handles the signal itself."""
    is_server = sys.argv[1:2] == ["serve"]
    _leave(0 if is_server else TERMINATED, "terminated")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless one is being handled: its handler must come to its end.

    During an import the process ends at once, because nothing has to be cleaned up then, and an
    exception inside torch's import aborts the process.
    """
    if is_interrupt(sys.exception()):
        return
    while frame is not None:
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "_frozen_importlib"):
            _leave(INTERRUPTED, "interrupted")
        frame = frame.f_back
    raise KeyboardInterrupt


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an exception is a KeyboardInterrupt or was raised while one was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _leave(status: int, reason: str = "") -> NoReturn:
    """End the process at once, with a line that gives the reason; further interrupts are ignored.

    `sys.exit` does not do: after an interrupt inside an `exec()`, Python would then end the process
    by the signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # it was closed before Python began
            continue
        with suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    if reason:
        with suppress(OSError):
            os.write(2, f"forerun: {reason}\n".encode())
    atexit._run_exitfuncs()
    os._exit(status)
