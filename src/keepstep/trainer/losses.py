"""One line per committed step in ``steps/rank<r>.jsonl``: step, epoch, loss as a hexadecimal float, bit for bit.

A step that was rolled back and done again has two lines; the later one counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class LossFile:
    """Appends lines; ``pending`` holds one loss whose value is still being computed on a device."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._pending: tuple[int, int, Callable[[], float]] | None = None
        self._failed = False

    def write(self, step: int, epoch: int, loss: Any) -> None:
        """``loss`` is a number, ``None``, or a callable that gives the number when asked one step later."""
        self.flush()
        if callable(loss):
            self._pending = (step, epoch, loss)
        else:
            self._line(step, epoch, None if loss is None else float(loss))

    def flush(self) -> None:
        if self._pending is not None:
            step, epoch, read = self._pending
            self._pending = None
            self._line(step, epoch, read())

    def drop(self) -> None:
        """Forget a loss that belongs to an aborted epoch."""
        self._pending = None

    def _line(self, step: int, epoch: int, loss: float | None) -> None:
        shown = "null" if loss is None else f'"{loss.hex()}"'
        try:
            os.write(self._fd, f'{{"step":{step},"epoch":{epoch},"loss":{shown}}}\n'.encode())
        except OSError as error:  # a full disk must not end a training run
            if not self._failed:
                self._failed = True
                os.write(2, f"keepstep: losses are no longer written: {error}\n".encode())
