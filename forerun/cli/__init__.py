"""The command line. What is slow to import comes after the handler of interrupts."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130  # the exit status, as of a shell
SPINS = "100000"  # turns that torch's threads wait after each product; with the usual 300,000 they keep their cores


def main() -> None:
    """Run the command line.

    A user's mistake is one line on stderr and exit status 2. Ctrl-C, once or many times, is one line and 130.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    gc.set_threshold(
        100_000
    )  # what imports make stays: looking for garbage in it took half a second
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = _run()
        gc.freeze()  # likewise at the end of Python
        if status == INTERRUPTED:  # typer has caught it
            raise KeyboardInterrupt
        sys.exit(status)
    except BaseException as error:
        # An interrupt inside a library may come out as another error.
        if not is_interrupt(error):
            raise
        _leave()


def _run() -> int:
    import typer

    from forerun.cli.commands import UsageError, app

    try:
        status = app(standalone_mode=False)
        return status if isinstance(status, int) else 0
    except typer.Abort:
        return INTERRUPTED
    except UsageError as error:
        message = error.format_message()
        if not message:  # help was shown, as there is no command
            return 0
    except (ValueError, FileExistsError, PermissionError) as error:
        if is_interrupt(error):
            raise
        message = str(error)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        return 0
    print(f"forerun: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not while one is being handled: that has to come to its end."""
    if is_interrupt(sys.exception()):
        return
    while (
        frame is not None
    ):  # inside an import nothing is to be cleaned up, and torch's aborts at an exception
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "_frozen_importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an exception is a KeyboardInterrupt or was raised while one was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _leave() -> None:
    """End the process; further interrupts are ignored.

    Not by sys.exit: after an interrupt inside an exec(), Python would then end itself by the signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, RuntimeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"forerun: interrupted\n")
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)
