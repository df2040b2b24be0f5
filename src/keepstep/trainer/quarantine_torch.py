"""Quarantine: samples that make the numbers go wrong are left out from now on, on all ranks alike.

Registered data that can (``leave_out``) passes over every step that would use one of them: all ranks move on by the
same number of places, so that they stay together and every other sample still comes once per pass. The list travels
with the data's saved position, and a line per verdict stands in ``quarantine.jsonl`` beside the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.model import env
from keepstep.trainer.exchange_torch import gather

FILE = "quarantine.jsonl"


class Quarantine:
    """One process's view.

    Args:
        data: registered objects that know their samples, by name.
        run_dir: of the job; ``None`` where there is none, then nothing is written.
    """

    def __init__(self, data: Mapping[str, Any], rank: int, run_dir: Path | None = None) -> None:
        self._data = {name: item for name, item in data.items() if hasattr(item, "leave_out")}
        self._rank = rank
        place = os.environ.get(env.RUN_DIR, "")
        self._file = (run_dir or Path(place)) / FILE if run_dir or place else None

    def come_together(self) -> None:
        """All ranks leave out what any of them does: a newcomer, or a job that is started again. Collective."""
        if not self._data:
            return
        mine = {name: sorted(item.left_out) for name, item in self._data.items()}
        for name, samples in self._read().items():
            mine[name] = sorted({*mine.get(name, ()), *samples})
        for row in gather(mine):
            for name, samples in row.items():
                if name in self._data:
                    self._data[name].leave_out(samples)

    def leave_out(self, step: int, samples: Mapping[str, list[int]], why: str) -> list[str]:
        """Leave these samples out from now on; the names of data that cannot do so. All ranks call it alike."""
        cannot = [name for name in samples if name not in self._data]
        for name, numbers in samples.items():
            if name in self._data:
                self._data[name].leave_out(numbers)
        if self._rank == 0 and self._file is not None and len(cannot) < len(samples):
            line = {"step": step, "why": why, "samples": {n: s for n, s in samples.items() if n not in cannot}}
            try:
                with open(self._file, "ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                print(f"keepstep: guard: {self._file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return cannot

    def _read(self) -> dict[str, list[int]]:
        """What the run has left out so far; a line that cannot be read is passed over."""
        found: dict[str, list[int]] = {}
        if self._rank != 0 or self._file is None:
            return found
        with contextlib.suppress(OSError):
            for line in self._file.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError, KeyError):
                    said = msgspec.json.decode(line, type=dict[str, Any])
                    for name, samples in said["samples"].items():
                        found.setdefault(name, []).extend(int(one) for one in samples)
        return found
