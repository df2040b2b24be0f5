"""The standby machine: a warm process from its start to the rank it takes.

``COLD`` and ``CHECKING`` happen inside the agent; the mind hears of a standby when it is parked.
"""

from __future__ import annotations

from keepstep.core.machine import Machine

STANDBY = Machine(
    "standby",
    initial="COLD",
    moves={
        "COLD": {
            "CHECKING": "the agent starts its process",
            "SLEEPING": "the agent reports it parked",
            "GONE": "ended",
        },
        "CHECKING": {"SLEEPING": "imports done, parked in init", "GONE": "ended"},
        "SLEEPING": {"WAKING": "it is given a rank", "GONE": "ended, or its node is out of reach"},
        "WAKING": {"ACTIVE": "its rank has resumed", "GONE": "ended, or its seat went to another process"},
        "ACTIVE": {},
        "GONE": {},
    },
)
