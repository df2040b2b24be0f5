"""The incident machine: from the first evidence to training again.

A job has at most one open incident. A second fault before it closes belongs to it: survivors are in the middle of a
recovery, and only the whole of it can be measured or given up.
"""

from __future__ import annotations

from keepstep.core.machine import Machine

INCIDENT = Machine(
    "incident",
    initial="OPEN",
    moves={
        "OPEN": {
            "LOCATING": "evidence that something is wrong, not yet who",
            "DECIDED": "the evidence names the culprit by itself",
            "ESCALATED": "the job ends first",
        },
        "LOCATING": {
            "DECIDED": "a culprit is named, or the time to find one is over",
            "RESOLVED": "all ranks moved again by themselves",
            "ESCALATED": "the job ends first",
        },
        "DECIDED": {
            "RECOVERING": "the epoch is open and its orders are written",
            "LOCATING": "new indirect evidence while the plan waits",
            "ESCALATED": "the plan is to stop, or to ask for another allocation",
        },
        "RECOVERING": {
            "VERIFYING": "every rank has resumed (without the SDK: every process runs)",
            "DECIDED": "a second fault: a newer epoch",
            "LOCATING": "a second fault, not yet known whose",
            "ESCALATED": "the job ends first",
        },
        "VERIFYING": {
            "RESOLVED": "every rank has done one new step (without the SDK: the processes lived long enough)",
            "DECIDED": "a second fault before the first new step",
            "LOCATING": "a second fault before the first new step, not yet known whose",
            "ESCALATED": "the job ends first",
        },
        "RESOLVED": {},
        "ESCALATED": {},
    },
)
