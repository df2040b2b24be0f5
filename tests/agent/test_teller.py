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
        while b"were not shown" not in data:
            data += os.read(read, 65536)
        assert b"line 0\n" in data
        teller.say("the last")
        teller.close(LIMIT_S)
        assert not teller.is_alive()
        assert b"the last\n" in os.read(read, 1 << 20)
    os.close(read)
