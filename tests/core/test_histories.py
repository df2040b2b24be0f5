"""Truths about every history: any faults, in any order, with any delay of reports and orders."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.core.controller import Controller
from keepstep.model.facts import ActionDone, AgentDisconnected, AgentLeft, StopRequested
from keepstep.model.ids import Nanos, NodeId, Rank
from keepstep.model.records import EpochOpened, Observed, Ordered
from tests.core.fleet import JOB, SECOND, Fleet, replay, spec

RANKS = st.integers(min_value=0, max_value=3)
NODES = st.sampled_from(["n0", "n1", "x0", "x1"])
pytestmark = pytest.mark.timeout(3600)  # the soak profile takes its time

TRIES = 400
"""Deadlines after which every incident must have ended. Far above what the budgets allow, far below for ever."""


class Histories(RuleBasedStateMachine):
    """A job of two nodes and up to two spare ones, and an adversary who decides what happens next."""

    fleet: Fleet

    @initialize(
        sdk=st.booleans(),
        spares=st.integers(min_value=0, max_value=2),
        restarts=st.integers(min_value=0, max_value=2),
        standbys=st.integers(min_value=0, max_value=2),
        min_nodes=st.integers(min_value=1, max_value=2),
        settled=st.booleans(),
    )
    def start(self, sdk: bool, spares: int, restarts: int, standbys: int, min_nodes: int, settled: bool) -> None:
        self.fleet = Fleet(spec(max_restarts=restarts, standbys=standbys, min_nodes=min_nodes), sdk=sdk)
        self.fleet.checked = True
        self.fleet.shadow = replay(self.fleet.log)
        self.fleet.connect("n0")
        self.fleet.connect("n1")
        for index in range(spares):
            self.fleet.connect(f"x{index}", standby=True)
        if settled:
            self.fleet.pump()
        self.fleet.train()

    def _linked(self, name: str) -> bool:
        agent = self.fleet.agents.get(NodeId(name))
        return agent is not None and agent.linked

    # ------------------------------------------------------------ delivery and time

    @rule(name=NODES, count=st.integers(min_value=1, max_value=8))
    def deliver(self, name: str, count: int) -> None:
        if self._linked(name):
            for _ in range(count):
                self.fleet.deliver(NodeId(name))

    @rule(name=NODES)
    def carry_out(self, name: str) -> None:
        if self._linked(name):
            self.fleet.carry_out(NodeId(name))

    @rule()
    def pump(self) -> None:
        self.fleet.pump()

    @rule()
    def deadline(self) -> None:
        self.fleet.next_deadline()

    @rule(ms=st.integers(min_value=1, max_value=3000))
    def moment(self, ms: int) -> None:
        self.fleet.now = Nanos(self.fleet.now + ms * SECOND // 1000)

    @rule()
    def train(self) -> None:
        self.fleet.pump()
        self.fleet.train(1)

    # ------------------------------------------------------------ faults

    @rule(rank=RANKS, signal=st.sampled_from([6, 9, 11]))
    def kill(self, rank: int, signal: int) -> None:
        self.fleet.kill(rank, signal=signal)

    @rule(rank=RANKS, consequence=st.booleans())
    def exception(self, rank: int, consequence: bool) -> None:
        self.fleet.user_error(rank, consequence=consequence)

    @rule(rank=RANKS, code=st.sampled_from([0, 1, 137]))
    def leave(self, rank: int, code: int) -> None:
        self.fleet.kill(rank, code=code)

    @rule(rank=RANKS)
    def freeze(self, rank: int) -> None:
        self.fleet.freeze(rank)

    @rule(ranks=st.sets(RANKS), behind=st.sets(RANKS))
    def stall(self, ranks: set[int], behind: set[int]) -> None:
        for rank in sorted(ranks):
            self.fleet.stall(rank, started=100 - (rank in behind), finished=99)

    @rule(rank=RANKS)
    def broken(self, rank: int) -> None:
        self.fleet.broken(rank)

    @rule(rank=RANKS)
    def done(self, rank: int) -> None:
        self.fleet.done(rank)

    @rule(rank=RANKS)
    def poison(self, rank: int) -> None:
        self.fleet.poisoned.add(Rank(rank))

    @rule(rank=RANKS)
    def never_resumes(self, rank: int) -> None:
        self.fleet.slow.add(Rank(rank))

    @rule(rank=RANKS)
    def never_advances(self, rank: int) -> None:
        self.fleet.stuck.add(Rank(rank))

    @rule(rank=RANKS)
    def cannot_resume(self, rank: int) -> None:
        self.fleet.cannot(rank)

    @rule(name=NODES)
    def standby_dies(self, name: str) -> None:
        self.fleet.kill_standby(name)

    @rule(name=NODES)
    def store_dies(self, name: str) -> None:
        self.fleet.lose_store(name)

    @rule(name=NODES)
    def cut(self, name: str) -> None:
        if self._linked(name):
            self.fleet.cut(name)

    @rule(name=NODES)
    def expire(self, name: str) -> None:
        agent = self.fleet.agents.get(NodeId(name))
        if agent is not None and not agent.linked:
            self.fleet.expire(name)

    @rule(name=NODES)
    def lose(self, name: str) -> None:
        if self._linked(name):
            self.fleet.lose(name)

    @rule(name=NODES, standby=st.booleans())
    def connect(self, name: str, standby: bool) -> None:
        if not self._linked(name):
            self.fleet.connect(name, standby=standby)

    @rule()
    def controller_dies(self) -> None:
        self.fleet.restart_controller()

    @precondition(lambda self: self.fleet.job.roster is not None)
    @rule(rank=RANKS)
    def deputy_acts(self, rank: int) -> None:
        self.fleet.deputy(rank)

    @rule()
    def everybody_finishes(self) -> None:
        self.fleet.finish()

    # ------------------------------------------------------------ repetitions

    @rule(data=st.data())
    def say_it_again(self, data: st.DataObject) -> None:
        """A report that was folded is ignored; a word of the shell that is repeated concludes nothing."""
        facts = [r.fact for r in self.fleet.log if isinstance(r, Observed) and r.fact.seq]
        if facts:
            assert self.fleet.tell(data.draw(st.sampled_from(facts))) == []

    @rule(data=st.data())
    def done_again(self, data: st.DataObject) -> None:
        """An order that is reported done once more, moves nothing."""
        void = [r.action for r in self.fleet.log if isinstance(r, Ordered) and r.action.id not in self.fleet.job.orders]
        if void:
            action = data.draw(st.sampled_from(void))
            fact = ActionDone(job=JOB, at=self.fleet.now, node=action.node, action=action.id)
            assert len(self.fleet.tell(fact)) == 1

    # ------------------------------------------------------------ truths

    @invariant()
    def one_process_per_rank_and_epoch(self) -> None:
        """Two processes may both believe to be rank 3, but never in the same epoch."""
        if not hasattr(self, "fleet"):
            return
        held = [
            (proc.epoch, proc.rank)
            for agent in self.fleet.agents.values()
            for proc in agent.procs.values()
            if proc.role == "worker"
        ]
        assert len(held) == len(set(held)), held

    @invariant()
    def rosters_are_sound(self) -> None:
        """Epochs rise, no store serves twice, seats are unique, and a process that ended is never seated again."""
        if not hasattr(self, "fleet"):
            return
        check_rosters(self.fleet)

    def teardown(self) -> None:
        """When the adversary stops, every incident ends within its budget."""
        if hasattr(self, "fleet"):
            come_to_rest(self.fleet)
            check_rosters(self.fleet)
            loaded = Controller.load(self.fleet.mind.dump())
            assert loaded.dump() == self.fleet.mind.dump()


def check_rosters(fleet: Fleet) -> None:
    rosters = [record.roster for record in fleet.log if isinstance(record, EpochOpened)]
    epochs = [roster.epoch for roster in rosters]
    assert epochs == sorted(set(epochs))
    mine = [f"{roster.store_host}:{roster.store_port}" for roster in rosters if roster.origin == "controller"]
    assert len(mine) == len(set(mine)), mine
    ended: set[tuple[str, str]] = set()
    for record in fleet.log:
        if isinstance(record, Observed) and type(record.fact).__name__ in ("WorkerExited", "StandbyGone"):
            ended.add((record.fact.node, record.fact.slot))  # type: ignore[union-attr]
        if isinstance(record, EpochOpened) and record.roster.origin == "controller":
            seats = [(member.node, member.slot) for member in record.roster.members]
            assert len(seats) == len(set(seats))
            assert [member.rank for member in record.roster.members] == list(range(record.roster.world_size))
            assert not ended & set(seats), f"{ended & set(seats)} had ended"
            assert {member.node for member in record.roster.members} == {p.node for p in record.roster.places}


def come_to_rest(fleet: Fleet) -> None:
    """Deliver everything and let time pass; silent nodes lose their lease."""
    for agent in fleet.agents.values():
        if not agent.linked:
            fleet.expire(agent.name)
    for _ in range(TRIES):
        fleet.pump()
        job = fleet.job
        if job.over or (job.incident is None and job.state in ("RUNNING", "PENDING") and not job.deadlines):
            return
        if not fleet.next_deadline():
            break
    job = fleet.job
    assert job.over or job.incident is None, f"{job.state} {job.incident} {job.deadlines}"
    assert job.over or job.state in ("RUNNING", "PENDING"), f"{job.state}: {job.why}"


TestHistories: Any = Histories.TestCase


@pytest.mark.parametrize("ended", ["stop", "left"])
def test_words_after_the_end_change_nothing(ended: str) -> None:
    """A job that is over stays over, whatever is still reported about it."""
    fleet = Fleet(spec())
    fleet.connect("n0")
    fleet.connect("n1")
    fleet.pump()
    if ended == "stop":
        fleet.tell(StopRequested(job=JOB, at=fleet.now, by="ops", why="maintenance"))
    else:
        for name in ("n0", "n1"):
            fleet.tell(AgentLeft(job=JOB, at=fleet.now, node=NodeId(name), why="interrupted"))
    assert fleet.job.state == "STOPPED"
    assert fleet.job.exit_code == 0
    fleet.kill(0)
    fleet.tell(AgentDisconnected(job=JOB, at=fleet.now, node=NodeId("n0"), why="gone"))
    fleet.pump()
    assert fleet.job.state == "STOPPED"
    assert fleet.job.incident is None
