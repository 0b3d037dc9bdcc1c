"""Lines on stderr, for people and log files: what a command says, and progress where there is no terminal."""

from __future__ import annotations

import os
import sys
import time


def say(*lines: str) -> None:
    """Prints lines on stderr and flushes it. If stderr cannot be written (a full disk), neither the answer nor the exit status changes."""
    try:
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # otherwise the interpreter would retry at its exit, and exit with 120


def warn(text: str) -> None:
    """A warning on stderr."""
    say(f"warning: {text}")


class LogLines:
    """Progress for a log file: at most one line on stderr per `seconds`. Nothing on a terminal, which has a progress bar."""

    def __init__(self, terminal: bool, seconds: float = 30.0):
        self._terminal, self._seconds = terminal, seconds
        self._start = self._last = time.monotonic()

    def begin(self, text: str) -> None:
        """Prints what is about to start, without a delay."""
        if not self._terminal:
            say(text)

    def say(self, text: str) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._last >= self._seconds:
            self._last = now
            say(f"{text}, {now - self._start:.0f} s")
