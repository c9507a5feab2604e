"""A command in a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time


class Terminal:
    """`python -m forerun` with arguments, and what it has written so far."""

    def __init__(self, *arguments: str, term: str = "dumb") -> None:
        command = [sys.executable, "-m", "forerun", *arguments]
        self.pid, self.file = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ |= {"TERM": term, "INPUTRC": "/dev/null"}
            os.execv(command[0], command)
        self.seen = b""

    def wait(self, text: bytes) -> bytes:
        """Waits for a text; returns what came before it."""
        end = time.monotonic() + 250
        while text not in self.seen:
            assert time.monotonic() < end, (text, self.seen)
            if select.select([self.file], [], [], 1)[0]:
                self.seen += os.read(self.file, 4096)
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: bytes) -> None:
        os.write(self.file, text)

    def end(self) -> int:
        """Its exit status, once it has ended."""
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.file)
        return os.waitstatus_to_exitcode(status)
