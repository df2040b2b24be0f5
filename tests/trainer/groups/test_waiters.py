"""Waiters: a few threads for native waits, left behind rather than joined."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading

from keepstep.trainer.waiters import Waiters


def test_calls_beyond_the_limit_queue_up() -> None:
    """With two threads blocked, a third call waits for one of them and then runs; no third thread is started."""
    waiters, gate, done = Waiters("test", 2), threading.Event(), queue.SimpleQueue[int]()

    def block(number: int) -> None:
        gate.wait(10)
        done.put(number)

    before = threading.active_count()
    for number in range(3):
        waiters.submit(lambda number=number: block(number))  # type: ignore[misc]
    assert threading.active_count() == before + 2
    assert done.empty()
    gate.set()
    assert sorted(done.get(timeout=10) for _ in range(3)) == [0, 1, 2]
    waiters.close()


def test_a_free_thread_is_used_again() -> None:
    """One call after another needs one thread."""
    waiters, ready = Waiters("test-again", 8), threading.Semaphore(0)
    for _ in range(20):
        waiters.submit(ready.release)
        assert ready.acquire(timeout=10)
        while waiters._free == 0:  # the thread reports itself free just after the call
            threading.Event().wait(0.001)
    assert waiters._threads == 1
    waiters.close()


def test_a_stuck_call_does_not_keep_the_process() -> None:
    """The interpreter ends although a call never returns, as one stuck in a broken communicator would not."""
    program = (
        "import threading; from keepstep.trainer.waiters import Waiters; "
        "Waiters('stuck', 1).submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
