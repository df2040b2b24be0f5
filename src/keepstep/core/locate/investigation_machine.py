"""The machine of an investigation into silent data corruption: from suspicion to verdict, each step with evidence."""

from __future__ import annotations

from keepstep.core.machine import Machine

INVESTIGATION = Machine(
    "investigation",
    initial="SUSPECTED",
    moves={
        "SUSPECTED": {
            "REPLAY": "the same step is done again with the same input",
            "VOTE": "replicas or other ranks that did the same work are compared",
            "SOAK": "the suspect examines itself",
            "CONFIRMED": "a person has the proof",
            "CLEARED": "a person, or a proof, says that it was something else",
        },
        "REPLAY": {
            "VOTE": "the replay does not tell machine from code",
            "SOAK": "the replay points at a machine",
            "CONFIRMED": "the same rank came to a wrong result again",
            "CLEARED": "data or code: all ranks come to the same result",
        },
        "VOTE": {
            "SOAK": "one rank differs from the majority",
            "CONFIRMED": "one rank differs again and again",
            "CLEARED": "no rank differs",
        },
        "SOAK": {
            "CONFIRMED": "the self-test failed, or a second corruption came from the same machine",
            "CLEARED": "the self-test passed often enough",
        },
        "CONFIRMED": {"CLEARED": "a person took the verdict back"},
        "CLEARED": {},
    },
)
