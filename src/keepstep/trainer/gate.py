"""Gate: a step changes parameters everywhere only when the step before it is safe on another node.

People at the terminal hear from here that a copy is missing, and that it is there again. The log hears it from the
node's keeper, which knows the cause; from here only where there is no keeper to say it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

from keepstep.checkpoint.notes import Note, Teller
from keepstep.trainer.budget import ENOUGH, REMEMBERED

REPLICA_WAIT_S = 2.0
"""How long the first reduction of a step waits for the previous step's copy on the other node."""
REPLICA_AGAIN_S = 30.0
"""After a wait in vain no step waits for so long: a keeper that is away must not cost every step the whole wait."""
REPLICA_POLL_S = 0.0002
GAP_S = 2.0
"""How long no newer copy may reach another node before that is told, where no step waits for it."""


class Copies(Protocol):
    """What the gate asks of ``Snapshots``."""

    notes: Teller
    waited_s: float
    keeper_away: bool

    def replicated(self) -> bool: ...

    def lag(self) -> tuple[int, int]: ...


def needs_replica(snapshot_every: int, replicated: bool) -> bool:
    """Whether a step must wait until the step before it is safe on another node.

    Replicated parameters could be had from any rank, but the buffers and random state of a rank whose node is lost are
    nowhere else: with a copy that lags, the job would go on with other numbers. Where replicated state is copied only
    every few steps that is so by choice, and waiting would bring nothing.
    """
    return snapshot_every == 1 or (snapshot_every > 0 and not replicated)


class Gate:
    """One rank's gate.

    Args:
        stop: true when a newer epoch waits; nothing is waited for then.
    """

    def __init__(self, copies: Copies, rank: int, stop: Callable[[], bool]) -> None:
        self._copies, self._rank, self._stop = copies, rank, stop
        self._open_until = 0.0
        self._gap = self._noted = False
        self._acked, self._since = -1, time.monotonic()
        self._waits: deque[float] = deque(maxlen=REMEMBERED)

    def restart(self) -> None:
        """After a recovery the copies may be elsewhere."""
        self._open_until = 0.0
        self._acked, self._since = -1, time.monotonic()
        self._waits.clear()

    def wait(self, step: int) -> None:
        """Until another node holds the newest version, for at most ``REPLICA_WAIT_S``."""
        if self._copies.replicated():
            self._close(step)
            self._waits.append(0.0)
            return
        began = time.monotonic()
        if began < self._open_until:
            return
        while not self._copies.replicated():
            now = time.monotonic()
            if self._stop() or now - began > REPLICA_WAIT_S:
                if not self._stop():
                    self._open_until = now + REPLICA_AGAIN_S
                    self._tell_gap(step, f"no copy on another node after {REPLICA_WAIT_S:g} s")
                break
            time.sleep(REPLICA_POLL_S)
        else:
            self._close(step)
        waited = time.monotonic() - began
        self._waits.append(waited)
        self._copies.waited_s += waited

    def look(self, step: int) -> None:
        """Where no step waits: notice that copies do not get through, and that they do again."""
        newest, acked = self._copies.lag()
        now = time.monotonic()
        if acked > self._acked or newest <= acked:
            self._acked, self._since = acked, now
            self._close(step)
        elif now - self._since > GAP_S:
            self._tell_gap(step, f"the newest copy on another node is of step {acked}" if acked >= 0 else "no copy yet")

    def too_dear(self, step_s: float, share: float) -> bool:
        """Whether waiting takes more than this share of a step."""
        return len(self._waits) >= ENOUGH and step_s > 0 and median(self._waits) > share * step_s

    def _tell_gap(self, step: int, why: str) -> None:
        if self._gap:
            return
        self._gap = True
        self._say(f"step {step}: {why}; training goes on, losing this node now would lose the step")
        if self._copies.keeper_away:
            self._noted = True
            why = f"{why}: this node's keeper is not there"
            self._copies.notes.tell(Note(what="gap", tier="peer", step=step, rank=self._rank, why=why))

    def _close(self, step: int) -> None:
        self._open_until = 0.0
        if not self._gap:
            return
        self._gap = False
        self._say(f"step {step}: another node has copies again")
        if self._noted:
            self._noted = False
            self._copies.notes.tell(Note(what="closed", tier="peer", step=step, rank=self._rank))

    def _say(self, words: str) -> None:
        print(f"keepstep: rank {self._rank} {words}", file=sys.stderr, flush=True)
