"""Two nodes that do not reach each other: the first answer keeps both, the second one needs only one of them."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.core.locate.faults import Fault
from keepstep.core.recover.act import answer
from keepstep.model.ids import NodeId, Rank
from keepstep.model.settings import Policy
from tests.core.fleet import Fleet, replay, running

PAIR = (NodeId("n1"), NodeId("n2"))


def cut(policy: Policy | None = None, standby_nodes: int = 1) -> Fleet:
    """A hang is blamed on the connection of n1 and n2, and no rank resumes in the epoch that follows."""
    fleet = running(min_nodes=3, max_nodes=3, standby_nodes=standby_nodes, policy=policy)
    fleet.slow = {Rank(rank) for rank in range(6)}
    fault = Fault(
        key=f"stall:{fleet.job.epoch}",
        title="no progress since step 3",
        category="infrastructure",
        node=None,
        ranks=tuple(Rank(rank) for rank in (2, 3, 4, 5)),
        probability=0.5,
        reason="nodes n1 and n2 do not reach each other: their connections get no answer",
        evidence=("96 bytes to n2 were sent 3 times again without an answer",),
        onset=fleet.now,
        pair=PAIR,
    )
    draft = Draft(fleet.job, fleet.now, fleet.mind.policy)
    answer(draft, [fault])
    for record in draft.records:
        fleet.mind.evolve(record)
        fleet.shadow.evolve(record)
        fleet.log.append(record)
    for order in [o for name in list(fleet.agents) for o in fleet.mind.pending_orders(name)]:
        fleet.agents[order.node].inbox.append(order)
    fleet.pump()
    return fleet


def seated(fleet: Fleet) -> set[str]:
    assert fleet.job.roster is not None
    return {str(place.node) for place in fleet.job.roster.places}


def test_a_cut_that_stays_costs_one_of_the_pair() -> None:
    """Both are tried once more; then a spare takes the ranks of one, and whichever was at fault the job goes on."""
    fleet = cut()
    assert not fleet.job.proposals, "the first attempt keeps everybody"
    fleet.slow = set()
    fleet.later(61.0)
    fleet.pump()
    assert fleet.job.state == "RUNNING", fleet.job.why
    (one,) = fleet.job.proposals.values()
    assert one.state == "CARRIED_OUT"
    assert set(one.nodes) < set(PAIR)
    assert seated(fleet) == {"n0", "n1", "n2", "x0"} - set(one.nodes)
    assert "do not reach each other after attempt 1" in one.reason
    assert replay(fleet.log, fleet.mind.policy).dump() == fleet.mind.dump()


def test_nobody_goes_without_a_person_or_a_spare() -> None:
    """In mode assist the proposal waits; without a spare node the next rung is taken with both."""
    for fleet in (cut(Policy(mode="assist")), cut(standby_nodes=0)):
        fleet.slow = set()
        fleet.later(61.0)
        fleet.pump()
        assert {"n1", "n2"} <= seated(fleet)
        assert all(one.state in ("PROPOSED", "APPROVED") for one in fleet.job.proposals.values())
