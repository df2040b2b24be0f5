"""The faults of the demo, one after the other on a living job, and what each of them cost.

A fault strikes when everything is as before: all ranks train, no incident is open, the standbys it needs are parked.
Its cost comes from the event log (phases, processes kept, steps lost) and, as a check on the log, from our own clock:
from the signal to the first new step of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.demo_watch import Incident

READY_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 60.0
BREATH_STEPS = 6
"""Undisturbed steps before each fault, so that a step-time baseline exists and people see the job train."""

Tick = Callable[[], None]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One act: what is done to the cluster, and which standbys have to be parked for it."""

    name: str
    title: str
    strike: Callable[[Cluster], str]
    rank: int
    needs_spare_node: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault. Times in milliseconds; ``total_ms`` by the demo's own clock."""

    fault: str
    title: str
    did: str
    ok: bool
    detected_ms: float = 0.0
    located_ms: float = 0.0
    decided_ms: float = 0.0
    recovered_ms: float = 0.0
    total_ms: float = 0.0
    phases: dict[str, float] = {}
    kept: int = 0
    could_keep: int = 0
    steps_lost: int = 0
    said: str = ""
    decided_by: str = ""
    incident: str = ""


def kill_rank(cluster: Cluster) -> str:
    return cluster.kill_rank(1)


def freeze_rank(cluster: Cluster) -> str:
    return cluster.freeze_rank(3)


def lose_node(cluster: Cluster) -> str:
    return cluster.lose_node(cluster.node_of(2))


def kill_controller_and_rank(cluster: Cluster) -> str:
    first = cluster.kill_controller()
    return f"{first}, then {cluster.kill_rank(1)}"


def kill_store_and_rank(cluster: Cluster) -> str:
    first = cluster.kill_store()
    return f"{first}, then {cluster.kill_rank(0)}"


SCRIPT = (
    Fault(name="kill", title="a rank is killed", strike=kill_rank, rank=1),
    Fault(name="freeze", title="a rank stops moving", strike=freeze_rank, rank=3),
    Fault(name="controller", title="the controller dies, then a rank", strike=kill_controller_and_rank, rank=1),
    Fault(name="store", title="the rendezvous store dies, then a rank", strike=kill_store_and_rank, rank=0),
    Fault(name="node", title="a whole node is lost", strike=lose_node, rank=2, needs_spare_node=True),
)
"""In this order: the node comes last because its replacement is the only spare one."""


def wait_until_ready(cluster: Cluster, fault: Fault, tick: Tick) -> None:
    """Wait until the job trains undisturbed and has what it takes to recover warm."""
    watch = cluster.watch

    def standby_there() -> bool:
        if fault.needs_spare_node:
            members = {m.node for m in watch.roster.members} if watch.roster else set()
            return any(node not in members for node, _ in watch.parked)
        return watch.standbys_on(cluster.node_of(fault.rank)) > 0

    cluster.until(watch.settled, READY_LIMIT_S, "all ranks to train", tick)
    cluster.until(standby_there, READY_LIMIT_S, f"a standby for the fault {fault.name!r}", tick)
    start = cluster.floor()
    cluster.until(lambda: cluster.floor() >= start + BREATH_STEPS, READY_LIMIT_S, f"{BREATH_STEPS} quiet steps", tick)


def play(cluster: Cluster, fault: Fault, tick: Tick) -> Outcome:
    """Let one fault strike and wait until the job has recovered from it.

    Raises:
        TimeoutError: it has not, within ``RECOVERY_LIMIT_S``.
    """
    wait_until_ready(cluster, fault, tick)
    watch = cluster.watch
    known = set(watch.incidents)
    before = cluster.beats()
    struck_ns, struck = time.time_ns(), time.monotonic()
    did = fault.strike(cluster)
    top = max(beat.step for beat in before.values())

    def moved_on() -> bool:
        """Another process holds the victim's seat, and every rank has committed a step that nobody had."""
        beats = cluster.beats()
        return (
            len(beats) == len(before)
            and beats[fault.rank].pid != before[fault.rank].pid
            and all(beat.step > top for beat in beats.values())
        )

    cluster.until(moved_on, RECOVERY_LIMIT_S, f"the job to recover from {fault.name!r}", tick)
    total_ms = (time.monotonic() - struck) * 1000

    def incidents() -> list[Incident]:
        return [incident for name, incident in watch.incidents.items() if name not in known]

    def closed() -> bool:
        return bool(incidents()) and all(i.over and i.measured is not None for i in incidents())

    cluster.until(closed, RECOVERY_LIMIT_S, "the incident to be closed", tick)
    now = cluster.beats()
    kept = sum(1 for rank, beat in before.items() if rank in now and now[rank].pid == beat.pid)
    return _outcome(fault, did, incidents(), struck_ns, total_ms, kept, len(before) - 1)


def _outcome(
    fault: Fault, did: str, incidents: list[Incident], struck_ns: int, total_ms: float, kept: int, could_keep: int
) -> Outcome:
    first = incidents[0]
    measured = [i.measured for i in incidents if i.measured is not None]
    main = measured[0]
    lost = sum(m.steps_lost for m in measured)
    return Outcome(
        fault=fault.name,
        title=fault.title,
        did=did,
        ok=all(i.state == "RESOLVED" for i in incidents) and lost == 0 and kept == could_keep,
        # A deputy's incident is opened when the controller is back; only the deputy's own words time it.
        detected_ms=main.detect_ms if first.deputy else max(0.0, (first.opened - struck_ns) / 1e6),
        located_ms=main.locate_ms,
        decided_ms=main.decide_ms,
        recovered_ms=main.recover_ms,
        total_ms=total_ms,
        phases=dict(main.phases),
        kept=kept,
        could_keep=could_keep,
        steps_lost=lost,
        said=first.plan or first.suspect or first.title,
        decided_by="deputy" if first.deputy else "controller",
        incident=first.id,
    )
