"""A proposal lives as long as its reason, gives way to a stronger one, and listens to people above limits."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.cases import Proposal
from keepstep.core.decide.proposals import propose
from keepstep.core.draft import Draft
from keepstep.model.facts import OperatorSaid
from keepstep.model.ids import NodeId
from keepstep.model.records import AnyRecord, Noted
from keepstep.model.settings import Policy
from tests.core.fleet import JOB, Fleet, replay, running


def suspect(fleet: Fleet, node: str, **words: Any) -> None:
    draft = Draft(fleet.job, fleet.now, fleet.mind.policy)
    said = {"kind": "swap", "reason": f"node {node} is odd", "evidence": ("seen",), "probability": 0.9, **words}
    propose(draft, nodes=[NodeId(node)], ranks=(), **said)
    for record in draft.records:
        fleet.mind.evolve(record)
        fleet.shadow.evolve(record)
        fleet.log.append(record)


def said(fleet: Fleet, verb: Any, subject: str = "", other: str = "", by: str = "ann") -> list[AnyRecord]:
    records = fleet.tell(OperatorSaid(job=JOB, at=fleet.now, verb=verb, by=by, subject=subject, other=other))
    fleet.pump()
    return records


def proposals(fleet: Fleet) -> list[Proposal]:
    assert replay(fleet.log, fleet.mind.policy).dump() == fleet.mind.dump()
    return list(fleet.job.proposals.values())


def seated(fleet: Fleet) -> set[str]:
    assert fleet.job.roster is not None
    return {str(place.node) for place in fleet.job.roster.places}


def test_slowness_is_forgotten_with_the_windows_that_showed_it() -> None:
    """A rank is replaced: steps are measured anew, so nobody can say yes to a swap that rests on the old ones."""
    fleet = running(standby_nodes=1, policy=Policy(mode="assist"))
    suspect(fleet, "n1", origin="straggler")
    fleet.kill(0)
    fleet.pump()
    (one,) = proposals(fleet)
    assert (one.state, one.by) == ("REJECTED", "auto")
    assert "measured anew" in one.why
    said(fleet, "approve", one.id)
    assert seated(fleet) == {"n0", "n1"}


def test_failures_are_not_forgotten_with_an_epoch() -> None:
    fleet = running(standby_nodes=1, policy=Policy(mode="assist"))
    suspect(fleet, "n1")
    fleet.kill(0)
    fleet.pump()
    assert [one.state for one in proposals(fleet)] == ["PROPOSED"]


def test_proof_takes_the_place_of_slowness() -> None:
    """The page shows the stronger reason; what a person has approved stays approved."""
    fleet = running(policy=Policy(mode="assist"))  # no spare node: nothing is carried out
    suspect(fleet, "n1", origin="straggler")
    said(fleet, "approve", "lm-p1")
    suspect(fleet, "n1", kind="evict", reason="corruption seen twice", probability=0.99)
    first, second = proposals(fleet)
    assert (first.state, second.state, second.by) == ("REJECTED", "APPROVED", "ann")
    assert (second.kind, second.probability) == ("evict", 0.99)
    suspect(fleet, "n1", origin="straggler")
    assert len(proposals(fleet)) == 2, "a weaker reason changes nothing"


def test_a_held_eviction_goes_when_the_limits_let_it() -> None:
    """Its reason stays, so setting the mode is enough; a swap has to be seen again."""
    for kind, expected in (("evict", {"n0", "x0"}), ("swap", {"n0", "n1"})):
        fleet = running(standby_nodes=1, policy=Policy(mode="assist"))
        suspect(fleet, "n1", kind=kind)
        said(fleet, "mode", "", "auto")
        assert seated(fleet) == expected


def test_a_person_takes_over_what_the_limits_hold_back_by_now() -> None:
    """Approved by itself while no spare node was there; then the mode became stricter. A yes goes beyond it."""
    fleet = running()
    suspect(fleet, "n1", kind="evict")
    said(fleet, "mode", "", "assist")
    fleet.connect("x0", standby=True)
    fleet.pump()
    assert seated(fleet) == {"n0", "n1"}
    said(fleet, "approve", "lm-p1")
    assert seated(fleet) == {"n0", "x0"}
    assert proposals(fleet)[0].by == "ann"


@pytest.mark.parametrize("by", ["auto", ""])
def test_nobody_speaks_in_the_name_of_automation(by: str) -> None:
    fleet = running(standby_nodes=1, policy=Policy(mode="assist"))
    suspect(fleet, "n1")
    records = said(fleet, "reject", "lm-p1", by=by)
    assert any(isinstance(record, Noted) and "by whom" in record.text for record in records)
    assert [one.state for one in proposals(fleet)] == ["PROPOSED"]
