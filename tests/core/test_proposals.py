"""Living nodes go only within the limits, or when a person says so; and they come back."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import mode_of
from keepstep.core.decide.proposals import propose
from keepstep.core.draft import Draft
from keepstep.model.facts import CheckpointNoted, OperatorSaid, StopRequested, StoreLost
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import AnyRecord, EpochOpened, Noted, ProposalMoved
from keepstep.model.settings import Policy
from tests.core.fleet import JOB, Fleet, replay, running

ASSIST = Policy(mode="assist")
OBSERVE = Policy(mode="observe")


def suspect(fleet: Fleet, *nodes: str, **words: Any) -> None:
    """Whoever suspects living nodes says so; what follows goes the way of the shell."""
    draft = Draft(fleet.job, fleet.now, fleet.mind.policy)
    seats = [
        seat.rank for name in nodes for seat in (fleet.job.roster.seats_on(NodeId(name)) if fleet.job.roster else ())
    ]
    propose(
        draft,
        kind=words.get("kind", "swap"),
        nodes=[NodeId(name) for name in nodes],
        ranks=seats,
        reason=f"node {', '.join(nodes)} is slow",
        evidence=("1.3 x the median over 5 windows",),
        probability=0.9,
    )
    fold(fleet, draft.records)
    fleet.tell(OperatorSaid(job=JOB, at=fleet.now, verb="thaw", by="nobody"))  # any fact: what is approved is looked at


def fold(fleet: Fleet, records: list[AnyRecord]) -> None:
    for record in records:
        fleet.mind.evolve(record)
        fleet.shadow.evolve(record)
        fleet.log.append(record)


def said(fleet: Fleet, verb: Any, subject: str = "", other: str = "", by: str = "ann") -> list[AnyRecord]:
    records = fleet.tell(OperatorSaid(job=JOB, at=fleet.now, verb=verb, by=by, subject=subject, other=other))
    fleet.pump()
    return records


def answer(records: list[AnyRecord]) -> str:
    return " ".join(record.text for record in records if isinstance(record, Noted))


def only(fleet: Fleet) -> Proposal:
    (one,) = fleet.job.proposals.values()
    return one


def seated(fleet: Fleet) -> set[str]:
    assert fleet.job.roster is not None
    return {str(place.node) for place in fleet.job.roster.places}


def calm(fleet: Fleet) -> None:
    """Deliver all; the job trains, and the log alone rebuilds its state."""
    fleet.pump()
    assert fleet.job.state == "RUNNING", fleet.job.why
    assert fleet.job.incident is None
    assert replay(fleet.log, fleet.mind.policy).dump() == fleet.mind.dump()


def test_auto_swaps_within_the_limits_at_once() -> None:
    """The node goes to quarantine, a spare takes its ranks, survivors keep their processes; an incident tells of it."""
    fleet = running(standby_nodes=1)
    before = {(m.node, m.slot) for m in fleet.job.roster.members if m.node == "n0"} if fleet.job.roster else set()
    suspect(fleet, "n1")
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert only(fleet).state == "CARRIED_OUT"
    assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED"
    (incident,) = fleet.job.incidents.values()
    assert incident.title == "planned swap of node n1"
    assert (incident.state, incident.rung, incident.node) == ("RESOLVED", "replace_node", "n1")
    assert only(fleet).incident == incident.id
    assert fleet.job.roster is not None
    assert before == {(m.node, m.slot) for m in fleet.job.roster.members if m.node == "n0"}
    assert incident.measured is not None
    assert (incident.measured.survivors_kept, incident.measured.survivors_possible) == (2, 2)


def test_without_a_spare_it_waits_and_goes_when_one_comes() -> None:
    """Approved, and carried out by the very report that brings the spare; nobody waits for it meanwhile."""
    fleet = running()
    suspect(fleet, "n1")
    calm(fleet)
    assert only(fleet).state == "APPROVED"
    assert seated(fleet) == {"n0", "n1"}
    fleet.later(60.0)
    fleet.connect("x0", standby=True)
    calm(fleet)
    assert only(fleet).state == "CARRIED_OUT"
    assert seated(fleet) == {"n0", "x0"}


def test_an_approval_ends_when_no_spare_comes() -> None:
    """Old evidence does not hang over a node for ever."""
    fleet = running()
    suspect(fleet, "n1")
    fleet.later(301.0)
    assert only(fleet).state == "EXPIRED"
    fleet.connect("x0", standby=True)
    calm(fleet)
    assert seated(fleet) == {"n0", "n1"}


@pytest.mark.parametrize("policy", [ASSIST, OBSERVE], ids=["assist", "observe"])
def test_nothing_is_done_until_a_person_says_so(policy: Policy) -> None:
    """Said and held; a person's yes carries it out in either mode; a second yes is a quiet success."""
    fleet = running(standby_nodes=1, policy=policy)
    suspect(fleet, "n1")
    calm(fleet)
    assert only(fleet).state == "PROPOSED"
    assert f"mode {policy.mode}" in only(fleet).held
    assert seated(fleet) == {"n0", "n1"}
    said(fleet, "approve", only(fleet).id)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert (only(fleet).state, only(fleet).by) == ("CARRIED_OUT", "ann")
    assert answer(said(fleet, "approve", only(fleet).id)).endswith("it is CARRIED_OUT already")


def test_a_proposal_ends_when_nobody_decides() -> None:
    """``approve_s``, then it is over; the same reason may be proposed again."""
    fleet = running(standby_nodes=1, policy=Policy(mode="assist", approve_s=60.0))
    suspect(fleet, "n1")
    fleet.later(61.0)
    assert only(fleet).state == "EXPIRED"
    suspect(fleet, "n1")
    assert [one.state for one in fleet.job.proposals.values()] == ["EXPIRED", "PROPOSED"]


def test_the_same_is_not_proposed_twice_nor_after_a_no() -> None:
    """While one is open nothing is added; who has said no is left in peace for an hour."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    suspect(fleet, "n1")
    suspect(fleet, "n1")
    assert len(fleet.job.proposals) == 1
    said(fleet, "reject", only(fleet).id)
    assert only(fleet).state == "REJECTED"
    suspect(fleet, "n1")
    assert len(fleet.job.proposals) == 1
    fleet.later(3601.0)
    suspect(fleet, "n1")
    assert len(fleet.job.proposals) == 2
    assert "REJECTED" in answer(said(fleet, "approve", "lm-p1"))


def test_protected_nodes_wait_for_a_person() -> None:
    """Automation never takes them; a person may."""
    fleet = running(standby_nodes=1, policy=Policy(protected=("n1",)))
    suspect(fleet, "n1")
    calm(fleet)
    assert "n1 is protected" in only(fleet).held
    said(fleet, "approve", only(fleet).id)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}


def test_the_breaker_opens() -> None:
    """After ``evictions_per_hour`` the next one waits for a person; an hour later automation goes on."""
    fleet = running(standby_nodes=3, policy=Policy(evictions_per_hour=1))
    suspect(fleet, "n1")
    calm(fleet)
    suspect(fleet, "n0")
    calm(fleet)
    assert "the breaker is open" in fleet.job.proposals["lm-p2"].held
    assert seated(fleet) == {"n0", "x0"}
    fleet.later(3601.0)
    suspect(fleet, "n0")
    calm(fleet)
    assert fleet.job.proposals["lm-p2"].state == "CARRIED_OUT"
    assert seated(fleet) == {"x1", "x0"}


def test_many_suspects_of_a_rack_make_the_rack_the_suspect() -> None:
    """The domain guard names the rack and its nodes, and stops after ``evictions_per_domain`` of them."""
    fleet = running(
        standby_nodes=3, min_nodes=4, max_nodes=4, policy=Policy(evictions_per_domain=2),
        racks={f"n{i}": "r1" for i in range(4)},
    )  # fmt: skip
    for name in ("n1", "n2", "n3"):
        suspect(fleet, name)
        calm(fleet)
    assert [one.state for one in fleet.job.proposals.values()] == ["CARRIED_OUT", "CARRIED_OUT", "PROPOSED"]
    assert (
        "3 nodes of rack r1 are suspect at the same time (n1, n2, n3): the rack is" in fleet.job.proposals["lm-p3"].held
    )


@pytest.mark.parametrize(
    ("asked", "allowed", "mode"),
    [
        (None, "auto", "auto"),
        (None, "observe", "observe"),
        ("auto", "observe", "observe"),
        ("assist", "auto", "assist"),
    ],
)
def test_the_stricter_of_two_modes_counts_until_a_person_speaks(asked: Any, allowed: Any, mode: str) -> None:
    """What the job's owner asks for, and what the controller of many jobs allows."""
    fleet = running(policy=Policy(mode=allowed), mode=asked)
    assert mode_of(fleet.job, fleet.mind.policy) == mode
    said(fleet, "mode", other="auto")
    assert mode_of(fleet.job, fleet.mind.policy) == "auto"


def test_a_job_chooses_its_breaker_and_its_protected_nodes() -> None:
    """Both come with the job; the controller's own count as well."""
    fleet = running(standby_nodes=2, policy=Policy(protected=("n0",)), protected=("n1",), evictions_per_hour=0)
    suspect(fleet, "n0")
    suspect(fleet, "n1")
    suspect(fleet, "x0")
    held = [one.held for one in fleet.job.proposals.values()]
    assert "n0 is protected" in held[0]
    assert "n1 is protected" in held[1]
    assert "evictions_per_hour 0" in held[2]


def test_the_only_node_stays() -> None:
    """Its state in memory is nowhere else."""
    fleet = running(standby_nodes=1, min_nodes=1, max_nodes=1)
    suspect(fleet, "n0")
    calm(fleet)
    assert "no other node" in only(fleet).held
    assert seated(fleet) == {"n0"}


def test_a_node_and_the_holder_of_its_copies_go_one_after_the_other() -> None:
    """Both nodes of a job are suspect: the second one goes when the first one's state is somewhere else."""
    fleet = running(standby_nodes=2, min_nodes=2, max_nodes=2, policy=ASSIST)
    suspect(fleet, "n0", "n1", kind="evict")
    said(fleet, "approve", only(fleet).id)
    calm(fleet)
    fleet.later(1.0)
    fleet.tell(OperatorSaid(job=JOB, at=fleet.now, verb="thaw", by="nobody"))
    calm(fleet)
    assert seated(fleet) == {"x0", "x1"}
    assert only(fleet).state == "CARRIED_OUT"
    assert [incident.title for incident in fleet.job.incidents.values()] == [
        "planned eviction of node n0",
        "planned eviction of node n1",
    ]


def test_frozen_stops_even_what_is_approved() -> None:
    """Nothing is carried out until somebody thaws; then the mode is what it was before."""
    fleet = running(policy=Policy(mode="observe"))
    said(fleet, "mode", other="auto")
    suspect(fleet, "n1")
    assert only(fleet).state == "APPROVED"
    said(fleet, "freeze")
    assert fleet.job.automation == "frozen"
    fleet.connect("x0", standby=True)
    calm(fleet)
    assert seated(fleet) == {"n0", "n1"}
    assert "thaw" in answer(said(fleet, "mode", other="assist"))
    said(fleet, "thaw")
    calm(fleet)
    assert fleet.job.automation == "auto"
    assert seated(fleet) == {"n0", "x0"}
    assert answer(said(fleet, "thaw")).endswith("automation is not frozen")


def test_frozen_stops_what_a_person_has_approved() -> None:
    """Whoever approved it: while the job is frozen a spare that comes changes nothing."""
    fleet = running(policy=ASSIST)
    suspect(fleet, "n1")
    said(fleet, "approve", only(fleet).id)
    said(fleet, "freeze")
    fleet.connect("x0", standby=True)
    calm(fleet)
    assert seated(fleet) == {"n0", "n1"}
    said(fleet, "thaw")
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}


def test_a_swap_waits_until_the_state_is_somewhere_else() -> None:
    """A rank without a copy would lose its state with its node; the note that it has one again starts the swap."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    words = {"what": "gap", "tier": "peer", "step": 5, "rank": Rank(3), "why": "the buddy is slow"}
    fleet.say(NodeId("n1"), CheckpointNoted, **words)
    fleet.pump()
    suspect(fleet, "n1")
    said(fleet, "approve", only(fleet).id)
    calm(fleet)
    assert seated(fleet) == {"n0", "n1"}
    fleet.say(NodeId("n1"), CheckpointNoted, **{**words, "what": "closed"})
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}


def test_a_loss_does_not_take_the_only_copies_along() -> None:
    """The node that is to go holds the copies of a node that is lost: it stays until they are somewhere else."""
    fleet = running(standby_nodes=0, policy=ASSIST)
    suspect(fleet, "n1")
    said(fleet, "approve", only(fleet).id)
    fleet.lose("n0")
    fleet.broken(2)
    fleet.pump()
    fleet.later(1.0)
    assert fleet.job.state == "WAITING"
    fleet.connect("x0", standby=True)
    fleet.connect("x1", standby=True)
    fleet.pump()
    replacements = [r.roster for r in fleet.log if isinstance(r, EpochOpened)][1:]
    assert [sorted({str(at.node) for at in roster.places}) for roster in replacements] == [["n1", "x0"], ["x0", "x1"]]
    calm(fleet)
    assert only(fleet).state == "CARRIED_OUT"


def test_a_swap_waits_for_a_calm_job() -> None:
    """Not while a node of the job is unreachable, not when the training is about to end, not without a store."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    suspect(fleet, "n1")
    fleet.cut("n0")
    said(fleet, "approve", only(fleet).id)
    assert (only(fleet).state, fleet.job.incident) == ("APPROVED", None)
    fleet.connect("n0")
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}

    ending = running(standby_nodes=1, policy=ASSIST)
    suspect(ending, "n1")
    ending.done(0)
    ending.pump()
    said(ending, "approve", only(ending).id)
    assert (only(ending).state, ending.job.incident) == ("APPROVED", None)

    dry = running(policy=ASSIST)
    suspect(dry, "n1")
    for name in ("n0", "n1"):
        dry.say(NodeId(name), StoreLost, why="the store process ended")
    dry.connect("x0", standby=True, store=False)
    dry.pump()
    said(dry, "approve", only(dry).id)
    assert (dry.job.state, only(dry).state) == ("RUNNING", "APPROVED"), "a job that trains must not wait for a swap"
    dry.new_store("x0")
    calm(dry)
    assert seated(dry) == {"n0", "x0"}


def test_the_dead_are_replaced_in_a_frozen_job() -> None:
    """Freeze protects the living; a frozen job must not hang on the dead."""
    fleet = running(standby_nodes=1)
    said(fleet, "freeze")
    fleet.kill(1)
    calm(fleet)
    fleet.lose("n1")
    fleet.broken(0)
    fleet.pump()
    fleet.later(1.0)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert not fleet.job.proposals


@pytest.mark.parametrize("mode", ["observe", "assist", "frozen"])
def test_a_repeat_offender_stays_where_the_limits_hold_it(mode: str) -> None:
    """Its processes fail again and again: the rung that keeps the node is taken, and a person sees the proposal."""
    fleet = running(standby_nodes=1)
    said(fleet, *(("freeze",) if mode == "frozen" else ("mode", "", mode)))
    for _ in range(4):
        fleet.kill(3)
        calm(fleet)
    assert seated(fleet) == {"n0", "n1"}
    assert only(fleet).state == "PROPOSED"
    assert "3 processes failed on node n1" in only(fleet).reason
    if mode == "frozen":
        assert "thaw" in answer(said(fleet, "approve", only(fleet).id))
        said(fleet, "thaw")
    said(fleet, "approve", only(fleet).id)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}


def test_a_repeat_offender_goes_in_mode_auto() -> None:
    """The third fault of the node within the window moves its ranks; the proposal tells why."""
    fleet = running(standby_nodes=1)
    for _ in range(3):
        assert seated(fleet) == {"n0", "n1"}
        fleet.kill(3)
        calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert only(fleet).state == "CARRIED_OUT"


def test_undo_by_node_proposal_or_incident() -> None:
    """The node is on probation, a spare again; automation leaves it alone for an hour; a second undo is quiet."""
    for subject in ("n1", "lm-p1", "lm-i1"):
        fleet = running(standby_nodes=1)
        suspect(fleet, "n1")
        calm(fleet)
        said(fleet, "undo", subject)
        calm(fleet)
        assert only(fleet).state == "UNDONE"
        assert fleet.job.nodes[NodeId("n1")].health == "PROBATION"
        assert not fleet.job.evicted
        assert answer(said(fleet, "undo", subject)).endswith("node n1 may be used already")
        suspect(fleet, "x0")
        calm(fleet)
        assert seated(fleet) == {"n0", "n1"}
        assert fleet.job.nodes[NodeId("n1")].health == "HEALTHY"
        fleet.connect("x1", standby=True)
        suspect(fleet, "n1")
        calm(fleet)
        assert "ann has just taken lm-p1 back" in fleet.job.proposals["lm-p3"].held


def test_undo_needs_a_node_that_lives() -> None:
    """A machine that is out of reach returns by its own report only."""
    fleet = running(standby_nodes=1)
    suspect(fleet, "n1")
    calm(fleet)
    fleet.cut("n1")
    fleet.expire("n1")
    assert "out of reach" in answer(said(fleet, "undo", "n1"))
    assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED"
    fleet.connect("n1", standby=True)
    calm(fleet)
    assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED", "coming back proves nothing about its fault"
    said(fleet, "undo", "n1")
    assert fleet.job.nodes[NodeId("n1")].health == "PROBATION"


def test_words_that_cannot_be_meant() -> None:
    """Each refusal names the thing and the way out, and changes nothing."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    suspect(fleet, "n1")
    fleet.kill(0)
    calm(fleet)
    for verb, subject, other, words in (
        ("approve", "lm-p9", "", "keepstep proposals lm"),
        ("reject", "p9", "", "keepstep proposals lm"),
        ("undo", "lm-p1", "", "keepstep reject lm-p1"),
        ("undo", "lm-i1", "", "no living node"),
        ("undo", "n7", "", "no proposal, incident or node n7"),
        ("ack", "lm-i7", "", "keepstep incidents lm"),
        ("merge", "lm-i1", "lm-i1", "part of itself"),
        ("merge", "lm-i1", "lm-i2", "no incident lm-i2"),
        ("mode", "", "wild", "observe, assist, auto"),
    ):
        before = fleet.mind.dump()
        assert words in answer(said(fleet, verb, subject, other)), verb
        assert fleet.mind.dump() == before, verb


def test_ack_and_merge() -> None:
    """Marks of people on incidents; said again they are quiet, and a circle is refused."""
    fleet = running()
    for _ in range(2):
        fleet.kill(0)
        calm(fleet)
    said(fleet, "ack", "lm-i1")
    said(fleet, "merge", "lm-i2", "lm-i1")
    one, two = fleet.job.incidents.values()
    assert (one.acked, two.merged) == ("ann", "lm-i1")
    assert "ann has seen it" in answer(said(fleet, "ack", "lm-i1", by="bob"))
    assert "part of lm-i1 already" in answer(said(fleet, "merge", "lm-i2", "lm-i1"))
    assert "merge lm-i1 into another one" in answer(said(fleet, "merge", "lm-i1", "lm-i2"))


def test_a_job_that_ends_leaves_no_proposal_open() -> None:
    """Nothing hangs over a job that is over."""
    fleet = running(policy=ASSIST)
    suspect(fleet, "n1")
    fleet.tell(StopRequested(job=JOB, at=fleet.now, by="ops", why="maintenance"))
    assert only(fleet).state == "REJECTED"
    assert "over" in answer(said(fleet, "freeze"))


def test_a_lost_node_needs_no_verdict() -> None:
    """It died before anybody decided: it is replaced as what is dead, and its proposal is closed."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    suspect(fleet, "n1")
    fleet.lose("n1")
    fleet.broken(0)
    fleet.pump()
    fleet.later(1.0)
    calm(fleet)
    assert only(fleet).state == "REJECTED"
    assert seated(fleet) == {"n0", "x0"}


def test_a_spare_goes_without_an_epoch() -> None:
    """A node without ranks is quarantined; the job does not notice."""
    fleet = running(standby_nodes=1)
    epoch = fleet.job.epoch
    suspect(fleet, "x0")
    calm(fleet)
    assert fleet.job.nodes[NodeId("x0")].health == "QUARANTINED"
    assert only(fleet).state == "CARRIED_OUT"
    assert fleet.job.epoch == epoch


def test_a_swap_waits_for_the_end_of_an_incident_and_rides_on_a_rebuild() -> None:
    """While ranks are looked for nothing is swapped; an epoch that opens anyway takes the approved node out, too."""
    fleet = running(standby_nodes=0, policy=ASSIST)
    suspect(fleet, "n1")
    said(fleet, "approve", only(fleet).id)
    fleet.connect("x0", standby=True, store=False)
    fleet.kill(0)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert only(fleet).state == "CARRIED_OUT"


def test_a_script_without_the_sdk_is_asked_about() -> None:
    """A swap would start every process anew: not by automation; with a person's yes as a restart of the job."""
    fleet = running(standby_nodes=1, sdk=False)
    suspect(fleet, "n1")
    calm(fleet)
    assert "keepstep.init" in only(fleet).held
    said(fleet, "approve", only(fleet).id)
    fleet.pump()
    fleet.later(11.0)
    calm(fleet)
    assert seated(fleet) == {"n0", "x0"}
    assert fleet.job.attempt == 1


def test_every_move_has_its_record() -> None:
    """What the log tells of one proposal, in order."""
    fleet = running(standby_nodes=1, policy=ASSIST)
    suspect(fleet, "n1")
    said(fleet, "approve", only(fleet).id)
    fleet.later(1.0)
    said(fleet, "undo", only(fleet).id)
    moves = [(record.to, record.by) for record in fleet.log if isinstance(record, ProposalMoved)]
    assert moves == [("PROPOSED", "auto"), ("APPROVED", "ann"), ("CARRIED_OUT", "ann"), ("UNDONE", "ann")]
