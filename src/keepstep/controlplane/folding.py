"""From a log to a mind: the newest snapshot plus what came after it, or everything."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from keepstep.core.controller import Controller
from keepstep.model.ids import Nanos
from keepstep.model.settings import Policy
from keepstep.ports import EventLog

LOG_FILE = "log.sqlite"

log = structlog.get_logger(__name__)


class Folded(NamedTuple):
    mind: Controller
    seq: int
    newest_at: Nanos
    """Time of the newest record; 0 for an empty log."""
    snapshot_seq: int
    """Where the snapshot ended that the fold began with; 0 without one."""


def fold(event_log: EventLog, policy: Policy) -> Folded:
    """Fold the log. A snapshot that this version cannot read is passed over: the log alone is enough."""
    mind, snapshot_seq = _start(event_log, policy)
    seq, newest_at = snapshot_seq, Nanos(0)
    if seq:
        newest_at = next((entry.record.at for entry in event_log.read(after=seq - 1, limit=1)), newest_at)
    for entry in event_log.read(after=seq):
        mind.evolve(entry.record)
        seq, newest_at = entry.seq, entry.record.at
    return Folded(mind, seq, newest_at, snapshot_seq)


def _start(event_log: EventLog, policy: Policy) -> tuple[Controller, int]:
    snapshot = event_log.load_snapshot()
    if snapshot is None:
        return Controller(policy), 0
    seq, state = snapshot
    try:
        return Controller.load(state, policy), seq
    except Exception as error:  # whatever an older layout leads to
        log.warning("snapshot not usable; folding the whole log", seq=seq, error=f"{type(error).__name__}: {error}")
        return Controller(policy), 0
