"""The job-run machine: from submission to an exit code."""

from __future__ import annotations

from keepstep.core.machine import Machine

_ENDS = {
    "FINISHED": "every rank left with code 0",
    "FAILED": "the ladder has no rung left",
    "STOPPED": "a person or a scheduler ended it",
}

JOBRUN = Machine(
    "job",
    initial="PENDING",
    moves={
        "PENDING": {
            "STARTING": "enough nodes and a store",
            "FAILED": "too few nodes in time",
            "STOPPED": "a person or a scheduler ended it",
        },
        "STARTING": {
            "RUNNING": "every rank trains (without the SDK: every process runs)",
            "RECOVERING": "a fault during set-up",
            "WAITING": "a fault during set-up, and a store, a node or a pause is waited for",
            **_ENDS,
        },
        "RUNNING": {
            "RECOVERING": "a newer epoch is open",
            "WAITING": "a plan is made, and a store, a node or a pause is waited for",
            **_ENDS,
        },
        "RECOVERING": {
            "RUNNING": "the incident is resolved",
            "WAITING": "a second fault, and a store, a node or a pause is waited for",
            **_ENDS,
        },
        "WAITING": {
            "RECOVERING": "what was waited for has come, or the pause is over",
            **_ENDS,
        },
        "FINISHED": {},
        "FAILED": {},
        "STOPPED": {},
    },
)
