"""The machine of a proposal: taking a living node out is proposed first, and decided by the limits or by a person."""

from __future__ import annotations

from keepstep.core.machine import Machine

PROPOSAL = Machine(
    "proposal",
    initial="PROPOSED",
    moves={
        "PROPOSED": {
            "APPROVED": "the limits allow it, or a person has said yes",
            "REJECTED": "a person has said no, or its reason is gone",
            "EXPIRED": "nobody has decided in time",
        },
        "APPROVED": {
            "APPROVED": "a person has said yes to what the limits had let pass, and may hold back by now",
            "CARRIED_OUT": "the epoch without these nodes is open",
            "REJECTED": "its reason is gone, or a node of it was lost before",
            "EXPIRED": "no spare node has come in time",
        },
        "CARRIED_OUT": {"UNDONE": "a person has taken it back: the nodes may be used again"},
        "REJECTED": {},
        "EXPIRED": {},
        "UNDONE": {},
    },
)
