"""A reader who does not read must not hold the agent."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from keepstep.agent.teller import WAITING_LINES, Teller

F_GETPIPE_SZ = 1032
LIMIT_S = 10.0


def test_nobody_waits_for_a_reader_who_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is a full pipe: saying returns at once, and what fits is read once somebody reads again."""
    read, write = os.pipe()
    full = fcntl.fcntl(write, F_GETPIPE_SZ)
    os.write(write, b"x" * full)
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        teller = Teller()
        teller.start()
        said = threading.Event()

        def say_much() -> None:
            for number in range(WAITING_LINES + 100):
                teller.say(f"line {number}")
            said.set()

        threading.Thread(target=say_much, daemon=True).start()
        assert said.wait(LIMIT_S), "saying has waited for the reader"
        data = bytearray()
        while b"were not shown" not in data or b"line 2\n" not in data:
            data += os.read(read, 65536)
        assert b"line 0\n" in data
        teller.say("the last")
        teller.close(LIMIT_S)
        assert not teller.is_alive()
        assert b"the last\n" in os.read(read, 1 << 20)
    os.close(read)


def test_close_is_heard_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for its place behind the lines: the thread ends once a reader has taken them."""
    read, write = os.pipe()
    os.write(write, b"x" * fcntl.fcntl(write, F_GETPIPE_SZ))
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        teller = Teller()
        teller.start()
        for number in range(WAITING_LINES + 100):
            teller.say(f"line {number}")
        closing = threading.Thread(target=teller.close, args=(LIMIT_S,))
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "close has not waited for room"
        while b"were not shown" not in os.read(read, 65536):
            pass
        closing.join(LIMIT_S)
        assert not teller.is_alive()
    os.close(read)
