"""The contract between the mind and its shells, and what it orders when nothing is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from keepstep.core.controller import Controller
from keepstep.core.exceptions import UnreadableState
from keepstep.model.actions import InjectFault, KeepStandbys, StopJob
from keepstep.model.facts import (
    AgentDisconnected,
    AgentLeft,
    CollectiveBroken,
    InjectRequested,
    JobSubmitted,
    LeaseExpired,
    LeaseRenewed,
    StopRequested,
    TimePassed,
    WorkerExited,
)
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import EpochOpened, IncidentOpened, Noted, Observed, Ordered
from keepstep.model.settings import Policy
from tests.core.fleet import JOB, SECOND, Fleet, replay, running, spec

N0, N1 = NodeId("n0"), NodeId("n1")


def orders(fleet: Fleet, kind: type) -> list[Any]:
    return [r.action for r in fleet.log if isinstance(r, Ordered) and isinstance(r.action, kind)]


def test_decide_changes_nothing() -> None:
    """A decision can be made twice, with the same outcome; only folding its records changes the state."""
    fleet = running()
    fact = WorkerExited(
        job=JOB, at=fleet.now, node=N0, seq=99, slot=SlotId("r0e1"), rank=Rank(0), epoch=fleet.job.epoch, signal=9
    )
    before = fleet.mind.dump()
    first, second = fleet.mind.decide(fact, fleet.now), fleet.mind.decide(fact, fleet.now)
    assert first == second
    assert first[0] == Observed(job=JOB, at=fleet.now, fact=fact)
    assert fleet.mind.dump() == before


def test_unknown_job_repeated_report_and_early_wake_up_lead_to_nothing() -> None:
    """The list is empty, so the log does not grow."""
    fleet = running()
    assert fleet.mind.decide(JobSubmitted(job=JOB, at=fleet.now, spec=spec()), fleet.now) == []
    assert fleet.mind.decide(TimePassed(job=JOB, at=fleet.now), fleet.now) == []
    stranger = StopRequested(job=JobId("other"), at=fleet.now, by="me", why="test")
    assert fleet.mind.decide(stranger, fleet.now) == []
    folded = next(r.fact for r in fleet.log if isinstance(r, Observed) and r.fact.seq == 1)
    assert fleet.mind.decide(folded, fleet.now) == []


def test_two_jobs_do_not_touch_each_other() -> None:
    """Each job has its own state; one clock wakes all."""
    fleet = running()
    before = fleet.job.fork()
    other = JobId("other")
    for record in fleet.mind.decide(JobSubmitted(job=other, at=fleet.now, spec=spec(job=other)), fleet.now):
        fleet.mind.evolve(record)
    assert fleet.job == before
    assert fleet.mind.next_deadline() == fleet.now + 600 * SECOND
    fleet.now = Nanos(fleet.now + 601 * SECOND)
    for record in fleet.mind.decide(TimePassed(job=JobId(""), at=fleet.now), fleet.now):
        fleet.mind.evolve(record)
    failed = fleet.mind.job(other)
    assert failed is not None
    assert (failed.state, failed.exit_code) == ("FAILED", 66)
    assert fleet.job.state == "RUNNING"


def test_snapshot_of_another_version_is_refused() -> None:
    """A damaged or foreign snapshot is not half believed; the way out is the log."""
    with pytest.raises(UnreadableState, match="fold the log"):
        Controller.load(b"\x81\xa1x")
    data = running().mind.dump().replace(b"\xacstate_schema\x01", b"\xacstate_schema\x7f")
    with pytest.raises(UnreadableState, match="state schema 127"):
        Controller.load(data)


def test_state_goes_on_from_a_snapshot() -> None:
    """A snapshot and the records after it give the same state as the whole log."""
    fleet = running()
    early, count = Controller.load(fleet.mind.dump()), len(fleet.log)
    fleet.kill(1)
    fleet.pump()
    for record in fleet.log[count:]:
        early.evolve(record)
    assert early.dump() == fleet.mind.dump() == replay(fleet.log).dump()


def test_nodes_are_numbered_as_asked_else_as_they_came() -> None:
    """Ranks of a node are contiguous; --node-rank decides where it is given."""
    fleet = Fleet(spec(min_nodes=3, max_nodes=3))
    fleet.connect("late", node_rank=1)
    fleet.connect("b")
    fleet.connect("first", node_rank=0)
    fleet.pump()
    assert fleet.job.roster is not None
    assert [m.node for m in fleet.job.roster.members] == ["first", "first", "late", "late", "b", "b"]
    assert [p.buddy for p in fleet.job.roster.places] == ["late", "b", "first"]


def test_last_call() -> None:
    """With the minimum there, the job waits for the others only so long; late ones become standby nodes."""
    fleet = Fleet(spec(min_nodes=1, max_nodes=2))
    fleet.connect("n0")
    fleet.pump()
    assert fleet.job.state == "PENDING"
    fleet.later(31.0)
    assert fleet.job.roster is not None
    assert fleet.job.roster.world_size == 2
    fleet.connect("n1")
    fleet.pump()
    assert fleet.job.roster.world_size == 2
    assert fleet.job.standby_orders == {"n0": 1, "n1": 2}


def test_start_waits_for_a_store() -> None:
    """Without any rendezvous store there is nothing to join under; and that wait ends too."""
    fleet = Fleet(spec())
    fleet.connect("n0", store=False)
    fleet.connect("n1", store=False)
    fleet.pump()
    assert fleet.job.state == "PENDING"
    fleet.new_store("n1")
    fleet.pump()
    assert fleet.job.state == "RUNNING"
    assert fleet.job.store_node == "n1"

    dry = Fleet(spec())
    dry.connect("n0", store=False)
    dry.connect("n1", store=False)
    dry.pump()
    dry.later(61.0)
    assert (dry.job.state, dry.job.exit_code) == ("FAILED", 138)


def test_standbys_only_after_the_sdk_has_attached() -> None:
    """A level 0 script would run to its end as a standby, so it is never given one."""
    assert orders(running(sdk=False, standby_nodes=1), KeepStandbys) == []
    fleet = running(standby_nodes=1)
    assert {(order.node, order.count) for order in orders(fleet, KeepStandbys)} == {("n0", 1), ("n1", 1), ("x0", 2)}


def test_level_0_finishes_when_all_left_with_0() -> None:
    """Without the SDK, code 0 of every process is the end; every node is told, standby nodes too."""
    fleet = running(sdk=False, standby_nodes=1)
    fleet.finish()
    fleet.pump()
    assert (fleet.job.state, fleet.job.exit_code) == ("FINISHED", 0)
    assert {agent.name for agent in fleet.agents.values() if agent.stopped == 0} == {"n0", "n1", "x0"}


def test_leaving_the_loop_early_together_is_an_end() -> None:
    """A script that breaks out of its loop on all ranks has finished."""
    fleet = running()
    for rank in range(4):
        fleet.kill(rank, code=0)
    fleet.pump()
    assert fleet.job.state == "FINISHED"


def test_leaving_the_loop_early_alone_is_a_fault_of_the_code() -> None:
    """One rank leaves with code 0 while the others train on: it is replaced, no node is blamed."""
    fleet = running()
    fleet.kill(2, code=0)
    fleet.broken(0)
    fleet.pump()
    assert fleet.job.incident is not None
    fleet.later(3.0)
    (incident,) = fleet.job.incidents.values()
    assert (incident.category, incident.node, incident.suspects) == ("user_code", None, (2,))
    assert incident.state == "RESOLVED"


def test_injection_is_refused_unless_the_job_allows_it() -> None:
    """The refusal is in the log, with the sentence that says why; nothing is ordered."""
    fleet = running()
    ask = InjectRequested(job=JOB, at=fleet.now, fault="kill", by="ops", rank=Rank(1))
    records = fleet.tell(ask)
    assert isinstance(records[1], Noted)
    assert "--allow-inject" in records[1].text
    assert orders(fleet, InjectFault) == []


@pytest.mark.parametrize(
    ("words", "node", "refusal"),
    [
        ({"fault": "kill", "rank": 3}, "n1", ""),
        ({"fault": "node-loss", "target": "n0"}, "n0", ""),
        ({"fault": "store-loss"}, "n0", ""),
        ({"fault": "kill"}, None, "needs a rank"),
        ({"fault": "kill", "rank": 9}, None, "there is no rank 9; the world has 4 ranks"),
        ({"fault": "node-loss", "target": "n7"}, None, "there is no node n7; the nodes are n0, n1"),
        ({"fault": "node-loss"}, None, "needs a rank .* or a node"),
        ({"fault": "controller-loss"}, None, "asked for the loss of the controller"),
    ],
)
def test_injection_goes_to_the_right_node(words: dict[str, Any], node: str | None, refusal: str) -> None:
    """Where the job allows it; what cannot be meant is refused with what could be."""
    fleet = running(allow_inject=True)
    fleet.tell(InjectRequested(job=JOB, at=fleet.now, by="ops", **words))
    assert [order.node for order in orders(fleet, InjectFault)] == ([node] if node else [])
    if refusal:
        note = fleet.log[-1]
        assert isinstance(note, Noted)
        assert re.search(refusal, note.text)


@pytest.mark.parametrize(("why", "code"), [("lunch", 0), ("preemption notice", 138)])
def test_stop(why: str, code: int) -> None:
    """A person's stop is code 0; a preemption asks for another allocation. A node that comes later is told as well."""
    fleet = running()
    fleet.kill(0)
    fleet.deliver(N0)
    fleet.tell(StopRequested(job=JOB, at=fleet.now, by="ops", why=why))
    fleet.pump()
    assert (fleet.job.state, fleet.job.exit_code) == ("STOPPED", code)
    assert fleet.job.deadlines == {}
    assert fleet.job.incident is None
    fleet.connect("late")
    fleet.pump()
    assert {order.node for order in orders(fleet, StopJob)} == {"n0", "n1", "late"}
    assert {order.code for order in orders(fleet, StopJob)} == {code}


def test_pending_orders_are_those_of_the_newest_epoch() -> None:
    """What a node has not answered is sent again after a reconnect; an older epoch's orders are void."""
    fleet = running()
    fleet.kill(0)
    fleet.deliver(N0)
    assert [type(a).__name__ for a in fleet.mind.pending_orders(N1)] == ["Join"]
    fleet.kill(1)
    fleet.deliver(N0)
    (pending,) = fleet.mind.pending_orders(N1)
    assert pending.epoch == fleet.job.epoch
    fleet.pump()
    assert fleet.mind.pending_orders(N1) == []


def test_exit_of_a_fenced_process_concludes_nothing() -> None:
    """Its seat belongs to another process: a late report about the old one changes nobody's mind."""
    fleet = running()
    old = fleet.job.seat_of(Rank(1)).slot
    fleet.kill(1)
    fleet.pump()
    seq = fleet.mind.acked(JOB, N0) + 1
    late = WorkerExited(job=JOB, at=fleet.now, node=N0, seq=seq, slot=old, rank=Rank(1), epoch=Epoch(1 << 16), signal=9)
    assert len(fleet.tell(late)) == 1


def test_survivor_that_dies_before_it_heard_of_the_epoch_counts() -> None:
    """Its report carries the old epoch, but its seat is in the new roster: rank and seat count, not the number."""
    fleet = running()
    fleet.kill(1)
    fleet.deliver(N0)  # epoch 2 is open; n1 has not heard of it
    fleet.kill(2)
    fleet.deliver(N1)
    assert fleet.job.roster is not None
    assert [m.rank for m in fleet.job.roster.members if m.newcomer] == [1, 2]
    assert fleet.job.incident_count == 1


def test_controller_away_does_not_make_nodes_lost() -> None:
    """After its own restart the controller has no connection to anybody: broken collectives convict no node then."""
    fleet = running()
    fleet.broken(0)
    fleet.deliver(N0)
    fleet.restart_controller()
    fleet.connect("n0")
    fleet.pump()
    fleet.later(5.0)
    assert {node.health for node in fleet.job.nodes.values()} == {"HEALTHY"}
    assert fleet.job.state == "RUNNING"
    fleet.connect("n1")
    fleet.pump()
    fleet.later(5.0)
    (incident,) = fleet.job.incidents.values()
    assert incident.state == "RESOLVED"
    assert incident.replaced == ()


def test_overslept_deadline_gives_reports_time_to_come() -> None:
    """The controller was away when the rebuild deadline passed: nobody is killed for reports that wait in an outbox."""
    fleet = running()
    fleet.kill(1)
    fleet.deliver(N0)
    fleet.carry_out(N0)
    fleet.carry_out(N1)
    fleet.restart_controller()
    fleet.now = Nanos(fleet.now + 90 * SECOND)
    assert fleet.next_deadline()
    fleet.connect("n0")
    fleet.connect("n1")
    fleet.pump()
    (incident,) = fleet.job.incidents.values()
    assert (incident.state, incident.attempts) == ("RESOLVED", 1)


def test_silent_node_comes_back_on_probation_and_its_processes_are_fenced() -> None:
    """A node that was replaced returns: its workers end, it serves as a spare, and is healthy once it has trained."""
    fleet = running(standby_nodes=1)
    fleet.cut("n1")
    fleet.expire("n1")
    fleet.pump()
    assert fleet.job.nodes[N1].health == "QUARANTINED"
    assert not fleet.job.in_roster(N1)
    fleet.connect("n1")
    fleet.pump()
    assert fleet.job.nodes[N1].health == "PROBATION"
    assert not [proc for proc in fleet.agents[N1].procs.values() if proc.role == "worker"]
    fleet.lose("x0")
    fleet.broken(0)
    fleet.pump()
    fleet.later(1.0)
    assert fleet.job.in_roster(N1)
    assert fleet.job.nodes[N1].health == "HEALTHY"


def test_lease_renewed_while_waiting_takes_the_node_back() -> None:
    """The network was gone for longer than a lease, and no other node is there: the same processes go on."""
    fleet = running()
    fleet.tell(LeaseExpired(job=JOB, at=fleet.now, node=N1, silent_s=10.0))
    assert fleet.job.state == "WAITING"
    fleet.tell(LeaseRenewed(job=JOB, at=fleet.now, node=N1))
    fleet.pump()
    (incident,) = fleet.job.incidents.values()
    assert incident.state == "RESOLVED"
    assert incident.measured is not None
    assert incident.measured.replaced == ()
    assert fleet.job.state == "RUNNING"


@pytest.mark.parametrize("renewed_first", [True, False])
def test_power_cycled_node_comes_back_empty(renewed_first: bool) -> None:
    """The job waits for a node and the lost one itself returns, with none of its processes: they start anew there."""
    fleet = running()
    fleet.lose("n1")
    fleet.broken(0)
    fleet.pump()
    fleet.later(20.0)
    assert fleet.job.state == "WAITING"
    if renewed_first:
        fleet.tell(LeaseRenewed(job=JOB, at=fleet.now, node=N1))
        assert fleet.job.state == "WAITING", "what it has is still to be heard"
    fleet.connect("n1")
    fleet.pump()
    fleet.later(3.0)
    (incident,) = fleet.job.incidents.values()
    assert (incident.state, incident.replaced) == ("RESOLVED", (2, 3))
    assert fleet.job.roster is not None
    assert [(m.node, m.newcomer) for m in fleet.job.roster.members[2:]] == [("n1", True)] * 2
    assert fleet.job.nodes[N1].health == "HEALTHY"


def test_agent_returns_without_a_process() -> None:
    """Nobody reported its exit, and the agent does not have it: it is replaced once reports had time to follow."""
    fleet = running()
    fleet.cut("n1")
    held = fleet.holder(3)
    assert held is not None
    del held[0].procs[held[1].slot]
    fleet.connect("n1")
    fleet.pump()
    assert fleet.job.incident is None
    fleet.later(3.0)
    (incident,) = fleet.job.incidents.values()
    assert (incident.suspects, incident.state) == ((3,), "RESOLVED")


def test_stale_facts_of_an_older_epoch_open_no_incident() -> None:
    """A collective of the epoch before the present one says nothing about it."""
    fleet = running()
    fleet.kill(1)
    fleet.pump()
    seq = fleet.mind.acked(JOB, N1) + 1
    old = CollectiveBroken(
        job=JOB, at=fleet.now, node=N1, seq=seq, rank=Rank(2), epoch=Epoch(1 << 16), step=6, error="closed"
    )
    assert len(fleet.tell(old)) == 1
    assert fleet.job.incident is None


def test_in_process_again_and_again_with_progress_is_no_escalation() -> None:
    """Budgets count attempts without a new step; a job that goes on may lose a rank many times."""
    fleet = running(policy=Policy(node_faults_to_suspect=100))
    for _ in range(8):
        fleet.kill(3)
        fleet.pump()
        fleet.train()
    assert {incident.rung for incident in fleet.job.incidents.values()} == {"in_process"}
    assert fleet.job.incident_count == 8
    assert fleet.job.attempt == 0


def test_node_whose_processes_fail_often_is_replaced() -> None:
    """The third process fault of one node within ten minutes is the node's, when a spare is there."""
    fleet = running(standby_nodes=1)
    for rank in (2, 3, 2):
        fleet.kill(rank)
        fleet.pump()
    assert [incident.rung for incident in fleet.job.incidents.values()] == ["in_process", "in_process", "replace_node"]
    assert fleet.job.nodes[N1].health == "QUARANTINED"
    fleet.connect("n1")
    fleet.pump()
    assert fleet.job.nodes[N1].health == "QUARANTINED", "coming back proves nothing about a bad device"


def test_left_node_is_lost_when_no_other_follows_and_the_last_one_ends_the_job() -> None:
    """ctrl-C on one node: its ranks are gone by will. On all nodes: the job is over."""
    fleet = running()
    fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=N1, why="SIGINT"))
    assert fleet.job.state == "RUNNING"
    fleet.later(1.0)
    assert fleet.job.state == "WAITING"
    fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=N0, why="SIGINT"))
    assert fleet.job.state == "STOPPED"


def test_the_end_of_the_whole_job_is_no_incident() -> None:
    """A scheduler's SIGTERM to all launchers: nodes leave one after the other, collectives of those that are still
    there break and their ranks die of it. Nothing of that is a fault, and nobody is to be replaced."""
    fleet = running()
    fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=N1, why="stopped by SIGTERM"))
    fleet.kill(2)
    fleet.broken(0)
    fleet.pump()
    fleet.later(0.9)
    fleet.kill(1, signal=15)
    fleet.pump()
    fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=N0, why="stopped by SIGTERM"))
    assert fleet.job.state == "STOPPED"
    assert not fleet.job.incidents
    assert not [record for record in fleet.log if isinstance(record, IncidentOpened)]


def test_a_node_that_left_alone_is_replaced_with_all_that_broke_meanwhile() -> None:
    """What was held back while others might have followed is one incident then, with the node as its cause."""
    fleet = running(standby_nodes=1)
    fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=N1, why="stopped by SIGTERM"))
    fleet.broken(0)
    fleet.pump()
    assert not fleet.job.incidents
    fleet.later(1.0)
    (incident,) = fleet.job.incidents.values()
    assert (incident.rung, incident.node) == ("replace_node", N1)


def test_set_up_fault_restarts_all() -> None:
    """Before every rank has reached its first step there is no state to return to."""
    fleet = Fleet(spec())
    fleet.slow = {Rank(3)}
    fleet.connect("n0")
    fleet.connect("n1")
    fleet.pump()
    fleet.slow = set()
    fleet.kill(3)
    fleet.pump()
    opened = [r.roster.mode for r in fleet.log if isinstance(r, EpochOpened)]
    assert opened == ["fresh", "restart"]
    assert fleet.job.attempt == 1
    assert fleet.job.state == "RUNNING"


def test_incident_says_when_it_began() -> None:
    """Onset is the first evidence, not the moment of detection: a frozen process stopped a second ago."""
    fleet = running()
    fleet.later(5.0)
    fleet.freeze(1)
    fleet.pump()
    opened = next(r for r in fleet.log if isinstance(r, IncidentOpened))
    assert opened.at - opened.onset == SECOND


def test_disconnected_word_repeated_concludes_nothing() -> None:
    """The shell may say twice that a connection broke."""
    fleet = running()
    fleet.cut("n1")
    again = fleet.tell(AgentDisconnected(job=JOB, at=fleet.now, node=N1, why="reset"))
    assert len(again) == 1
