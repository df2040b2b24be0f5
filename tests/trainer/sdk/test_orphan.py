"""A worker that has lost everybody who would end it ends itself, and nobody else does."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.trainer.orphan import Orphan, listens

WORKER = """
import pathlib, sys, time
from keepstep.trainer.control import Control
from keepstep.trainer.orphan import Orphan
folder = pathlib.Path(sys.argv[1])
orphan = Orphan(folder / "shim.sock", 0.1)
Control(folder / "agent.sock", "s", "t", lambda why: None, orphan).start()
(folder / "ready").touch()
time.sleep(60)
"""

PARENT = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
err = open(folder / "err", "w")
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(folder)], stderr=err, start_new_session=True)
while not (folder / "ready").exists():
    time.sleep(0.01)
print(worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _ended(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


def test_worker_without_agent_shim_and_parent_ends_itself(folder: Path) -> None:
    """While its parent lives it stays, far beyond the limit; when that is killed, too, it ends with a sentence."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    worker = os.pidfd_open(pid)
    try:
        assert not _ended(worker, 1.5), "its parent lives"
        parent.kill()
        parent.wait()
        assert _ended(worker, 20)
        assert "none has come back within 0.2 s; this process ends" in (folder / "err").read_text()
    finally:
        parent.kill()
        parent.communicate()
        if not _ended(worker, 0):
            os.kill(pid, signal.SIGKILL)
        os.close(worker)


def test_a_shim_that_listens_or_an_agent_that_was_just_there_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three have to be true at once; each restart of agent, shim or launcher leaves at least one false."""
    path = folder / "shim.sock"
    orphan = Orphan(path, 1.0)
    assert not orphan.is_one(100.0), "the parent is the same"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert orphan.is_one(2.1)
    assert not orphan.is_one(1.9), "an agent was there within the limit"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not listens(path)
        listener.listen()
        assert listens(path)
        assert not orphan.is_one(100.0), "the shim is there, and ends its programs itself"
    assert orphan.is_one(100.0), "the file alone is nobody"
