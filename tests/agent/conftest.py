"""Fixtures: short directories for sockets, and the promise that no test leaves a process behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def processes_under(marker: str) -> list[int]:
    """Pids whose command line or environment names ``marker``."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            text = Path(f"/proc/{name}/cmdline").read_bytes() + Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rsplit(") ", 1)[1][0]
        except OSError:
            continue
        if marker.encode() in text and state != "Z":
            found.append(int(name))
    return found


@pytest.fixture
def node_dir() -> Iterator[Path]:
    """A short directory in memory; afterwards whatever still names it is an orphan, is killed, and fails the test."""
    path = Path(tempfile.mkdtemp(prefix="ks", dir="/dev/shm"))
    yield path
    deadline = time.monotonic() + 5
    while (left := processes_under(str(path))) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)
    assert not names, f"processes left behind: {names}"
