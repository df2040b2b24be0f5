"""The end of a node's part: what is written down for schedulers and people, and what is removed."""

from __future__ import annotations

import shutil
from typing import Any

import msgspec
from msgspec import Struct

from keepstep.agent.files import write_atomic
from keepstep.agent.node import Node
from keepstep.model import exits
from keepstep.model.actions import StopJob
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import IncidentId

FILE = "exit.json"
SCHEMA = "keepstep.v1/Exit"


class Departure(Struct, frozen=True, kw_only=True):
    """Why and how this node leaves."""

    code: int
    why: str
    category: str = "none"
    incident: IncidentId | None = None
    last_step: int = 0

    @classmethod
    def ordered(cls, stop: StopJob) -> Departure:
        return cls(code=stop.code, why=stop.why, category=stop.category, incident=stop.incident, last_step=stop.step)

    @classmethod
    def alone(cls, fault: WorkerExited | None, waited_s: float) -> Departure:
        """Everything here has ended and no controller has said a word for ``waited_s``."""
        if fault is None:
            return cls(code=exits.DONE, why=f"all processes of this node are done; no controller for {waited_s:g} s")
        return cls(
            code=exits.of_worker(fault.code, fault.signal),
            why=f"rank {fault.rank} failed and no controller answered for {waited_s:g} s",
            category="unknown",
        )


def write_exit(node: Node, departure: Departure, fault: WorkerExited | None) -> None:
    """``exit.json`` beside the logs: the authoritative word on how the job ended as this node saw it."""
    path = node.run_dir / FILE
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "code": departure.code,
        "why": departure.why,
        "category": departure.category,
        "incident": departure.incident,
        "last_step": max(departure.last_step, _last_step(node)),
        "node": node.id,
        # A job that was stopped on request has none, even if an earlier fault was recovered from.
        "culprit": _culprit(node, fault) if departure.code and departure.category != "none" else None,
    }
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", durable=True)
    except OSError as error:
        node.say(f"{path} could not be written ({error.strerror}); the exit code is {departure.code}: {departure.why}")


def _last_step(node: Node) -> int:
    """Newest step that every rank of this node has committed, by heartbeat memory.

    The controller hears of steps at the start and the end of a loop only; between them this is the better word.
    """
    seats = node.roster.seats_on(node.id) if node.roster else ()
    return min((node.steps.get(seat.rank, 0) for seat in seats), default=0)


def remove_node_dir(node: Node) -> None:
    """Memory is given back; only the directory of this job and node is touched."""
    shutil.rmtree(node.dir, ignore_errors=True)


def _culprit(node: Node, fault: WorkerExited | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "node": node.id,
        "rank": fault.rank,
        "slot": fault.slot,
        "code": fault.code,
        "signal": fault.signal,
        "error": fault.error,
        "first_error": fault.first_error,
        "stderr_tail": fault.stderr_tail,
    }
