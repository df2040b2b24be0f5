"""The transition tables themselves."""

from __future__ import annotations

from typing import get_args

import pytest

from keepstep.core.decide.proposal_machine import PROPOSAL
from keepstep.core.exceptions import IllegalMove
from keepstep.core.health.machine import NODE
from keepstep.core.machine import Machine
from keepstep.core.recover.incident import INCIDENT
from keepstep.core.recover.jobrun import JOBRUN
from keepstep.core.standby.machine import STANDBY
from keepstep.model.records import IncidentState, JobState, NodeState, ProposalState, StandbyState

TABLES = [
    (INCIDENT, IncidentState),
    (JOBRUN, JobState),
    (NODE, NodeState),
    (STANDBY, StandbyState),
    (PROPOSAL, ProposalState),
]


@pytest.mark.parametrize(("machine", "words"), TABLES, ids=lambda value: getattr(value, "name", ""))
def test_table_and_words_agree(machine: Machine, words: object) -> None:
    """Every state that a record can carry has a row, and no row is for a state that no record can carry."""
    assert set(machine.moves) == set(get_args(words))


@pytest.mark.parametrize("machine", [table for table, _ in TABLES], ids=lambda machine: machine.name)
def test_every_state_is_reachable_and_has_an_end(machine: Machine) -> None:
    """From the first state each other one can be reached, and the machine has an end."""
    seen, todo = set(), [machine.initial]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += machine.moves[state]
    assert seen == set(machine.moves)
    assert machine.final


def test_illegal_move_names_what_would_be_legal() -> None:
    """A mistake of ours is found at once, with the machine, both states and the legal ones."""
    with pytest.raises(IllegalMove, match=r"incident cannot move from RESOLVED to OPEN; .* none, it is final"):
        INCIDENT.check("RESOLVED", "OPEN")
    with pytest.raises(IllegalMove, match="legal from PENDING: STARTING, FAILED, STOPPED"):
        JOBRUN.check("PENDING", "RUNNING")


def test_diagram_has_every_transition() -> None:
    """The docs draw the same table that the code checks."""
    lines = JOBRUN.mermaid().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> PENDING"]
    arrows = sum(len(row) for row in JOBRUN.moves.values())
    assert sum("-->" in line for line in lines) == arrows + 1 + len(JOBRUN.final)
