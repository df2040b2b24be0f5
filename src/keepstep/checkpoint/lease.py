"""Lease: who writes generations into a durable tier now, so that another run leaves it in peace.

Two running jobs in one place never mix their generations, as parts bear job and run, but they take each other's away.
One small object says whose the place is. The node with rank 0 renews it while its archiver lives, and removes it at the
end. It protects from a mistake and guards nothing: what a generation is made of is decided by its parts alone. So a
lease that cannot be read counts for none, and two runs that start at the same instant part ways one renewal later: the
later name stays.

The dead hold nobody up: on the same host the process is asked for, a later run of the same job takes the place over at
once, and anything else waits for ``LEASE_S`` at most. Between hosts that takes clocks which differ by less than that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from keepstep.checkpoint.exceptions import CheckpointError, TierDenied, TierFull, TierHeld, TierMissing
from keepstep.checkpoint.process import place, started
from keepstep.ports.tier import Tier

LEASE = "writer.json"
"""The object, in the root of the tier."""
RENEW_S = 20.0
"""How often a living writer renews its lease, also while one generation takes long."""
LEASE_S = 90.0
"""A lease that has not been renewed for so long is over: four renewals were missed."""
CHECK_S = 5.0
"""How long an answer of the tier is gone by; an object store is asked no more often than that."""
_NS = 1_000_000_000


class Lease(Struct, frozen=True, kw_only=True):
    """What the object says.

    Attributes:
        place: the host's boot and its name space of processes: where these are ours, ``pid`` means the same to us.
        start: of the process, in ticks since boot; process numbers are used again.
        since_ns: when the process began to write for this run; of two runs of one job the later one is meant.
    """

    job: str
    run: str
    host: str
    place: str
    pid: int
    start: str
    since_ns: int
    at_ns: int

    @property
    def writer(self) -> tuple[str, int, str]:
        return self.place, self.pid, self.start


def mine(job: str, run: str, now_ns: int, since_ns: int = 0) -> Lease:
    """A lease of this process."""
    pid = os.getpid()
    return Lease(
        job=job,
        run=run,
        host=socket.gethostname(),
        place=place(),
        pid=pid,
        start=started(pid),
        since_ns=since_ns,
        at_ns=now_ns,
    )


def read(tier: Tier) -> Lease | None:
    """The lease; ``None`` where there is none that can be read.

    Raises:
        TierError: other troubles of the tier.
    """
    try:
        return msgspec.json.decode(tier.get(LEASE), type=Lease)
    except (TierMissing, msgspec.DecodeError, UnicodeDecodeError):
        return None


def living(lease: Lease, now_ns: int) -> bool:
    """Whether its writer may still be at work. A clock that has jumped, either way, ends a lease."""
    if abs(now_ns - lease.at_ns) >= LEASE_S * _NS:
        return False
    return lease.place != place() or (lease.start != "" and started(lease.pid) == lease.start)


def explain(lease: Lease, where: str, now_ns: int) -> str:
    """Who has the place, and the way out."""
    age_s = max(0.0, (now_ns - lease.at_ns) / _NS)
    return (
        f"{where} is being written by job {lease.job} (host {lease.host}, pid {lease.pid}, {age_s:.0f} s ago): give "
        f"each job a directory of its own, or end that job; a writer that has died is waited for {LEASE_S:g} s at most"
    )


class Claim:
    """This process's claim on one tier. Safe to use from two threads.

    Attributes:
        leads: whether this process is the one that writes its run's lease; the others only look.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], int] = time.time_ns) -> None:
        self.leads = False
        self._clock, self._now = clock, now
        self._job, self._run = "", ""
        self._lock = threading.Lock()
        self._checked_at: float | None = None
        self._refusal = ""
        self._written_at: float | None = None
        self._since_ns = 0

    def belongs(self, job: str, run: str) -> None:
        """Whose generations this process writes; may change with the node's settings."""
        with self._lock:
            if (job, run) != (self._job, self._run):
                self._job, self._run, self._since_ns = job, run, self._now()
                self._checked_at = self._written_at = None

    @property
    def due(self) -> bool:
        """Whether a lease that this process has written is to be renewed."""
        return self._written_at is not None and self._clock() - self._written_at >= RENEW_S

    def admit(self, tier: Tier) -> None:
        """Look whether the tier is free for this run, and say that it writes here where that is due.

        Raises:
            TierHeld: another run is at work there.
            TierError: the tier's own troubles.
        """
        with self._lock:
            clock = self._clock()
            if self._checked_at is None or clock - self._checked_at >= CHECK_S:
                found, now_ns = read(tier), self._now()
                self._refusal = (
                    "" if found is None or self._yields(found, now_ns) else explain(found, tier.where, now_ns)
                )
                self._checked_at = clock
            if self._refusal:
                self._written_at = None
                raise TierHeld(self._refusal)
            if self.leads and (self._written_at is None or self.due):
                self._written_at = clock
                fresh = mine(self._job, self._run, self._now(), self._since_ns)
                with contextlib.suppress(TierFull, TierDenied):  # what is written for its own sake will say so
                    tier.put(LEASE, [msgspec.json.encode(fresh) + b"\n"])

    def release(self, tier: Tier) -> None:
        """Remove the lease if it is this process's."""
        with self._lock:
            if self._written_at is None:
                return
            found = read(tier)
            if found is not None and found.writer == mine("", "", 0).writer:
                tier.remove(LEASE)
            self._written_at = None

    def _yields(self, found: Lease, now_ns: int) -> bool:
        """Whether this run may write although that lease is there."""
        if found.writer == mine("", "", 0).writer or (found.job, found.run) == (self._job, self._run):
            return True
        return not living(found, now_ns) or (found.job == self._job and found.since_ns < self._since_ns)


@contextlib.contextmanager
def held(tier: Tier, who: str) -> Iterator[Callable[[], None]]:
    """A command's claim on a tier for as long as the block lasts: jobs that start meanwhile wait as for another job.

    Yields:
        What raises ``TierHeld`` when another run has taken the place over all the same.

    Raises:
        TierHeld: a run is at work there.
        TierError: the tier's own troubles.
    """
    claim, ending = Claim(), threading.Event()
    claim.leads = True
    claim.belongs(who, f"{socket.gethostname()} {os.getpid()} {time.time_ns()}")
    claim.admit(tier)

    def renew() -> None:
        while not ending.wait(CHECK_S):
            if claim.due:
                with contextlib.suppress(CheckpointError):
                    claim.admit(tier)

    renewing = threading.Thread(target=renew, name="lease", daemon=True)
    renewing.start()
    try:
        yield lambda: claim.admit(tier)
    finally:
        ending.set()
        renewing.join(CHECK_S)
        with contextlib.suppress(CheckpointError):
            claim.release(tier)
