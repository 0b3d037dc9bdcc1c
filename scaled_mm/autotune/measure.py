"""The parent of the isolated process: sends it cells, and outlives its crashes and hangs.

A request that is not answered in time kills the process; a process that ends without an answer crashed. Both are the outcome of
the cell that was at work, are counted, and the next cell gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from scaled_mm.errors import InternalError

WORKER = (sys.executable, "-m", "scaled_mm.autotune.worker")
ANSWER_TIMEOUT_S = 120.0  # the first request of a product also makes its inputs and its reference
START_TIMEOUT_S = 300.0  # importing torch, creating a context, and the C core if it is not built yet


class Measurer:
    """Times cells in a child process, which it starts when there is one to time. Use as a context: leaving it ends the child.

    setup: what the child is started with (see `worker`). command: the child's; tests have their own.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        command: Sequence[str] = WORKER,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        self._setup, self._command = setup, list(command)
        self._answer_timeout_s, self._start_timeout_s = answer_timeout_s, start_timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the measurer
        self.starts = 0

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_) -> None:
        self._end()
        self._log.close()

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """`{"outcome", "us", "samples", "spread", "message"}` of one request. InternalError when no child can be started."""
        if self._child is None:
            self._start()
        try:
            self._send(request)
        except BrokenPipeError:
            pass  # it has ended: reading its answer says so
        answer = self._answer(self._answer_timeout_s)
        if answer is None and self._child.poll() is None:
            self._end()
            return {"outcome": "hung", "message": f"no answer in {self._answer_timeout_s:g} s; its process was killed"}
        if answer is None:
            message = f"its process ended with {self._status()}{self._last_words()}"
            self._end()
            return {"outcome": "crashed", "message": message}
        if answer.pop("ending", False):  # the GPU is lost to this child: the next cell gets a new one
            self._end()
        return answer

    def _start(self) -> None:
        self.starts += 1
        self._answers = queue.Queue()
        self._log.seek(0)
        self._log.truncate()
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, args=(self._child.stdout, self._answers), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            self._send(self._setup)
        ready = self._answer(self._start_timeout_s)
        if ready is None or "ready" not in ready:
            waited = self._child.poll() is None
            what = f"was not ready in {self._start_timeout_s:g} s" if waited else f"ended with {self._status()}"
            message = f"the process that times kernels {what}{self._last_words()}"
            self._end()
            raise InternalError(message)

    @staticmethod
    def _read(stream: Any, answers: queue.Queue[str | None]) -> None:
        for line in stream:
            answers.put(line)
        answers.put(None)

    def _send(self, value: dict[str, Any]) -> None:
        self._child.stdin.write(json.dumps(value) + "\n")
        self._child.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        """The child's next line; None when it ended or the time is over."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is not None:
            return json.loads(line)
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe is closed: its status is there, or it closed the pipe alone
            self._child.wait(timeout=5)
        return None

    def _status(self) -> str:
        code = self._child.returncode
        return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _end(self) -> None:
        if self._child is None:
            return
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(BrokenPipeError, ValueError):
                stream.close()
        self._child = None
