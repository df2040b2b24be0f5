"""kill -9 at random instants, real processes: what was acknowledged is there, and only whole batches are."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from keepstep.model.records import DeadlineSet
from keepstep.store.sqlite import open_log

KILLS = 24
BATCH = 7
SNAPSHOT_EVERY = 5
"""Batches; snapshots also move the WAL into the main file, so kills strike there, too."""

CHILD = f"""
import sys
from keepstep.store.sqlite import open_log
sys.path.insert(0, {str(Path(__file__).parent)!r})
from log_records import batch
log = open_log(sys.argv[1])
last = log.last()
print(last, flush=True)
count = 0
while True:
    last = log.append(batch(last + 1, {BATCH}, padding=300), expected=last)
    print(last, flush=True)
    count += 1
    if count % {SNAPSHOT_EVERY} == 0:
        log.save_snapshot(last, b"%d" % last)
"""


def _one_life(path: Path, wait_s: float) -> int:
    """Let a writer run for a while, kill it, and return the last sequence number that it said was durable."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline()]
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            lines.append(child.stdout.readline())
        time.sleep(random.uniform(0, 0.01))  # not waiting for anything: picks the instant within a commit
    finally:
        child.kill()
        lines += child.stdout.readlines()
        child.stdout.close()
        child.wait()
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(whole[-1])


def test_acknowledged_batches_survive_kill_9(tmp_path: Path) -> None:
    """24 kills: no acknowledged entry is lost, no gap, no half batch, and snapshots never run ahead of the log."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    random.seed(seed)
    path = tmp_path / "log.sqlite"
    acknowledged = 0
    for life in range(KILLS):
        acknowledged = max(acknowledged, _one_life(path, random.uniform(0, 0.15)))
        log = open_log(path)
        entries = list(log.read())
        last = log.last()
        snapshot = log.load_snapshot()
        log.close()
        assert last >= acknowledged, f"life {life}: {acknowledged - last} acknowledged entries are gone"
        assert last % BATCH == 0, f"life {life}: half a batch at the end of {last} entries"
        assert [entry.seq for entry in entries] == list(range(1, last + 1))
        assert all(isinstance(e.record, DeadlineSet) and e.record.due == e.seq for e in entries)
        if snapshot is not None:
            assert snapshot[0] <= last
            assert snapshot[1] == b"%d" % snapshot[0]
    assert acknowledged > KILLS * BATCH
