"""The node machine. Only this controller's own verdicts move a node; nothing here knows a scheduler's opinion yet."""

from __future__ import annotations

from keepstep.core.machine import Machine

_LOST = "its agent is gone for good"

NODE = Machine(
    "node",
    initial="HEALTHY",
    moves={
        "HEALTHY": {
            "SUSPECT": "its connection broke",
            "TAINTED": "too many of its processes failed",
            "QUARANTINED": _LOST,
        },
        "SUSPECT": {
            "HEALTHY": "its agent spoke again in time",
            "TAINTED": "too many of its processes failed",
            "QUARANTINED": _LOST,
        },
        "TAINTED": {
            "DRAINING": "its ranks move to another node",
            "QUARANTINED": _LOST,
        },
        "DRAINING": {"QUARANTINED": "none of its ranks is left there"},
        "QUARANTINED": {
            "PROBATION": "a report proves that it had only been out of reach, or a person takes it back",
            "REPAIRING": "somebody works on it",
            "RETIRED": "it will not come back",
        },
        "REPAIRING": {"VERIFYING": "the repair is done"},
        "VERIFYING": {"PROBATION": "its tests passed", "QUARANTINED": "its tests failed"},
        "PROBATION": {
            "HEALTHY": "ranks on it have trained since",
            "SUSPECT": "its connection broke",
            "TAINTED": "too many of its processes failed",
            "QUARANTINED": _LOST,
        },
        "RETIRED": {},
    },
)

USABLE = frozenset({"HEALTHY", "PROBATION"})
"""States in which a node may be given new ranks."""
