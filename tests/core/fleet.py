"""A small model of agents and ranks around the real mind: it carries out orders and answers with facts.

It is the agents' side of ``docs/explanation/protocol.md`` with everything left out that the mind cannot see. Facts
wait in each agent's outbox and orders in its inbox until somebody delivers them, so a test decides what crosses what.
Time is a number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from keepstep.core.controller import Controller
from keepstep.core.state import Job
from keepstep.model.actions import AnyAction, InjectFault, Join, KeepStandbys, KillProcess, StopJob, TakeStacks
from keepstep.model.facts import (
    ActionDone,
    ActionFailed,
    AgentDisconnected,
    AgentJoined,
    AnyFact,
    CollectiveBroken,
    JobSubmitted,
    LeaseExpired,
    RankAdvanced,
    RankDone,
    RankJoined,
    RankResumed,
    RankStalled,
    RecoveredLocally,
    ResumeFailed,
    SdkAttached,
    SlotState,
    StacksTaken,
    StallEnded,
    StandbyGone,
    StandbyReady,
    StoreLost,
    StoreReady,
    TimePassed,
    UserError,
    WorkerExited,
    WorkerFrozen,
)
from keepstep.model.ids import NO_EPOCH, Epoch, JobId, Nanos, NodeId, Rank, SlotId, next_minor
from keepstep.model.position import RankPosition
from keepstep.model.records import AnyRecord, Ordered, decode_record, encode_record
from keepstep.model.settings import Policy
from keepstep.model.stacks import Frame, ProcessStacks, ThreadStack
from keepstep.model.topology import JobSpec, Roster

JOB = JobId("lm")
SECOND = 1_000_000_000
START = Nanos(1_000_000 * SECOND)


@dataclass
class Proc:
    slot: SlotId
    role: str
    rank: Rank | None = None
    epoch: Epoch = NO_EPOCH
    frozen: bool = False


@dataclass
class Agent:
    name: NodeId
    boot: int = 1
    node_rank: int | None = None
    wants_standby: bool = False
    alive: bool = True
    linked: bool = False
    epoch: Epoch = NO_EPOCH
    procs: dict[SlotId, Proc] = field(default_factory=dict)
    seq: int = 0
    outbox: deque[AnyFact] = field(default_factory=deque)
    inbox: deque[AnyAction] = field(default_factory=deque)
    done: set[str] = field(default_factory=set)
    standbys: int = 0
    spawned: int = 0
    store: int = 0
    store_up: bool = False
    stopped: int | None = None


class Fleet:
    """Agents, their processes, and the one mind that they talk to."""

    def __init__(self, spec: JobSpec, policy: Policy | None = None, *, sdk: bool = True) -> None:
        self.spec = spec
        self.sdk = sdk
        self.mind = Controller(policy)
        self.now = START
        self.log: list[AnyRecord] = []
        self.agents: dict[NodeId, Agent] = {}
        self.step = 0
        self.deaf = False
        self.slow: set[Rank] = set()
        """Ranks that never resume, whatever they are told."""
        self.stuck: set[Rank] = set()
        """Ranks that resume and then do no step."""
        self.poisoned: set[Rank] = set()
        """Ranks whose every new process dies at once."""
        self.bad_seats: set[tuple[NodeId, Rank]] = set()
        self.entered: set[str] = set()
        self.places: dict[Rank, tuple[Frame, ...]] = {}
        """Where ranks stand, innermost call first, for whoever looks; nothing is seen of the others."""
        self.positions: dict[Rank, RankPosition] = {}
        """Which collectives ranks have come to; those that ended, too."""
        self.blind: set[NodeId] = set()
        """Nodes whose agents do not come to an end when they look into their processes."""
        self.racks: dict[str, str] = {}
        """Racks by node; what is not here is not known."""
        self.checked = False
        """Check at every fact that deciding changes nothing and that the log alone rebuilds the state."""
        self.shadow = Controller(policy)
        self.rosters: list[Roster] = []
        self.tell(JobSubmitted(job=JOB, at=self.now, spec=spec))

    # ---------------------------------------------------------------- the shell

    def tell(self, fact: AnyFact) -> list[AnyRecord]:
        """Decide, log, fold, dispatch: the order of the real shell."""
        before = self.mind.dump() if self.checked else b""
        records = self.mind.decide(fact, self.now)
        if self.checked:
            assert self.mind.dump() == before, "decide changed the state"
        for record in records:
            self.mind.evolve(record)
            self.log.append(record)
            if self.checked:
                self.shadow.evolve(decode_record(encode_record(record)))
            if isinstance(record, Ordered):
                self.agents[record.action.node].inbox.append(record.action)
        if self.checked:
            assert self.shadow.dump() == self.mind.dump(), "the log does not rebuild the state"
        return records

    @property
    def job(self) -> Job:
        job = self.mind.job(JOB)
        assert job is not None
        return job

    def later(self, seconds: float) -> None:
        """Time passes; deadlines fire when they are due, not at the end of the span."""
        until = self.now + int(seconds * SECOND)
        while (due := self.mind.next_deadline()) is not None and due <= until:
            self.now = Nanos(max(self.now, due))
            self.tell(TimePassed(job=JOB, at=self.now))
            self.pump()
        self.now = Nanos(until)

    def next_deadline(self) -> bool:
        """Jump to the next deadline, if there is one."""
        due = self.mind.next_deadline()
        if due is None:
            return False
        self.now = Nanos(max(self.now, due))
        self.tell(TimePassed(job=JOB, at=self.now))
        return True

    def restart_controller(self) -> None:
        """The mind is lost and folded again from the log; connections break, unsent orders are sent again."""
        policy = self.mind.policy
        self.mind = replay(self.log, policy)
        if self.checked:
            assert self.shadow.dump() == self.mind.dump(), "a fold of the whole log differs"
        for agent in self.agents.values():
            agent.inbox.clear()
            if agent.linked:
                agent.linked = False
                self.tell(AgentDisconnected(job=JOB, at=self.now, node=agent.name, why="controller started", ours=True))

    # ---------------------------------------------------------------- delivery

    def pump(self, limit: int = 10_000) -> None:
        """Deliver everything that can be delivered, round robin, until nothing moves."""
        for _ in range(limit):
            moved = [self.deliver(name) | self.carry_out(name) for name in list(self.agents)]
            if not any(moved):
                return
        raise AssertionError("the fleet never comes to rest")

    def deliver(self, name: NodeId) -> bool:
        """The oldest fact in the agent's outbox reaches the mind; it stays there while the link is down."""
        agent = self.agents[name]
        if not agent.linked or not agent.outbox:
            return False
        self.tell(agent.outbox.popleft())
        return True

    def carry_out(self, name: NodeId) -> bool:
        """The agent carries out the oldest order that has reached it."""
        agent = self.agents[name]
        if not agent.linked or not agent.alive or not agent.inbox:
            return False
        action = agent.inbox.popleft()
        if isinstance(action, TakeStacks) and name in self.blind:
            return True  # and looks, and looks
        if action.id in agent.done:
            self.say(name, ActionDone, action=action.id)
        elif action.epoch < agent.epoch:
            self.say(name, ActionFailed, action=action.id, why=f"epoch {action.epoch} is older than {agent.epoch}")
        else:
            agent.done.add(action.id)
            self._do(agent, action)
            self.say(name, ActionDone, action=action.id)
            self._enter()
        return True

    def say(self, name: NodeId, kind: Any, **words: Any) -> AnyFact:
        agent = self.agents[name]
        agent.seq += 1
        fact: AnyFact = kind(job=JOB, at=self.now, node=name, seq=agent.seq, **words)
        if not self.deaf:
            agent.outbox.append(fact)
        return fact

    # ---------------------------------------------------------------- agents

    def connect(self, name: str, *, node_rank: int | None = None, standby: bool = False, store: bool = True) -> None:
        """A node's agent connects for the first time, or again."""
        node = NodeId(name)
        agent = self.agents.get(node)
        if agent is None:
            agent = self.agents[node] = Agent(name=node, node_rank=node_rank, wants_standby=standby)
        agent.alive = agent.linked = True
        slots = tuple(
            SlotState(
                slot=p.slot,
                pid=1,
                role="standby" if p.role == "standby" else "worker",
                rank=p.rank,
                epoch=p.epoch,
                parked=p.role == "standby",
            )
            for p in agent.procs.values()
        )
        joined = AgentJoined(
            job=JOB,
            at=self.now,
            node=node,
            host=f"host-{name}",
            boot=str(agent.boot),
            peer_port=7000,
            keeper_port=7001,
            node_rank=agent.node_rank,
            rack=self.racks.get(name, ""),
            wants_standby=agent.wants_standby,
            epoch=agent.epoch,
            slots=slots,
        )
        agent.outbox = deque(fact for fact in agent.outbox if not isinstance(fact, AgentJoined))
        agent.outbox.appendleft(joined)  # without a number: it is said anew on each connection
        agent.inbox.extend(self.mind.pending_orders(node))
        if store and not agent.store_up:
            self.new_store(name)

    def new_store(self, name: str) -> None:
        agent = self.agents[NodeId(name)]
        agent.store += 1
        agent.store_up = True
        self.say(agent.name, StoreReady, host=f"host-{name}", port=29500 + agent.store)

    def lose_store(self, name: str) -> None:
        """The node's store process dies; its agent starts another."""
        agent = self.agents.get(NodeId(name))
        if agent is not None and agent.alive and agent.store_up:
            self.say(agent.name, StoreLost, why="the store process ended")
            self.new_store(name)

    def cut(self, name: str, why: str = "connection reset") -> None:
        """The connection breaks; nothing else happens to the node."""
        agent = self.agents[NodeId(name)]
        agent.linked = False
        agent.inbox.clear()
        self.tell(AgentDisconnected(job=JOB, at=self.now, node=agent.name, why=why))

    def expire(self, name: str, silent_s: float = 10.0) -> None:
        self.tell(LeaseExpired(job=JOB, at=self.now, node=NodeId(name), silent_s=silent_s))

    def lose(self, name: str) -> None:
        """Everything on the node is gone; the survivors' collectives break."""
        agent = self.agents[NodeId(name)]
        agent.alive = False
        agent.procs.clear()
        agent.outbox.clear()
        agent.boot += 1
        agent.store_up = False
        agent.standbys = 0
        agent.epoch = Epoch(0)
        agent.done.clear()
        self.cut(name)

    def _do(self, agent: Agent, action: AnyAction) -> None:
        match action:
            case Join():
                self._join(agent, action.roster)
            case KillProcess():
                self._end(agent, action.slot, signal=9, killed_by_us=True)
            case KeepStandbys():
                agent.standbys = action.count
                self._refill(agent)
            case StopJob():
                agent.stopped = action.code
                agent.procs.clear()
            case InjectFault():
                pass
            case TakeStacks():
                self._show(agent, action)

    def _show(self, agent: Agent, action: TakeStacks) -> None:
        processes = tuple(
            ProcessStacks(
                rank=proc.rank, slot=proc.slot, pid=1, role="trainer", name="python", state="T" if proc.frozen else "S",
                how="py-spy", threads=(ThreadStack(name="MainThread", frames=self.places[proc.rank], main=True),),
            )
            for proc in agent.procs.values()
            if proc.role == "worker" and proc.rank in action.ranks and proc.rank in self.places
        )  # fmt: skip
        positions = tuple(self.positions[rank] for rank in action.ranks if rank in self.positions)
        self.say(
            agent.name,
            StacksTaken,
            epoch=action.epoch,
            request=action.request,
            processes=processes,
            positions=positions,
        )

    def _join(self, agent: Agent, roster: Roster) -> None:
        agent.epoch = roster.epoch
        seats = {seat.slot: seat for seat in roster.seats_on(agent.name)}
        for proc in list(agent.procs.values()):
            if proc.role == "worker" and proc.slot not in seats:
                self._end(agent, proc.slot, signal=9, killed_by_us=True)
        for slot, seat in seats.items():
            proc = agent.procs.get(slot)
            if proc is None:
                proc = agent.procs[slot] = Proc(slot=slot, role="worker")
                if self.sdk:
                    self.say(agent.name, SdkAttached, slot=slot, version="0")
            fresh = proc.rank is None
            proc.role, proc.rank, proc.epoch = "worker", seat.rank, roster.epoch
            if fresh and (seat.rank in self.poisoned or (agent.name, seat.rank) in self.bad_seats):
                self._end(agent, slot, signal=11)
        if (roster.store_host, roster.store_port) == (f"host-{agent.name}", 29500 + agent.store):
            self.new_store(agent.name)
        if roster not in self.rosters:
            self.rosters.append(roster)
        self._refill(agent)

    def _refill(self, agent: Agent) -> None:
        parked = [proc.slot for proc in agent.procs.values() if proc.role == "standby"]
        for slot in parked[agent.standbys :]:
            self._end(agent, slot)
        for _ in range(agent.standbys - len(parked)):
            slot = SlotId(f"s{agent.spawned}")
            agent.spawned += 1
            agent.procs[slot] = Proc(slot=slot, role="standby")
            self.say(agent.name, StandbyReady, slot=slot)

    def _end(self, agent: Agent, slot: SlotId, **how: Any) -> None:
        proc = agent.procs.pop(slot, None)
        if proc is None:
            return
        if proc.role == "standby":
            self.say(agent.name, StandbyGone, slot=slot, why="killed")
        else:
            assert proc.rank is not None
            self.say(agent.name, WorkerExited, slot=slot, rank=proc.rank, epoch=proc.epoch, **how)

    # ---------------------------------------------------------------- ranks

    def holder(self, rank: int) -> tuple[Agent, Proc] | None:
        """The process that holds ``rank`` by its node's newest word."""
        held = [
            (agent, proc)
            for agent in self.agents.values()
            if agent.alive
            for proc in agent.procs.values()
            if proc.rank == rank and proc.role == "worker"
        ]
        return max(held, key=lambda pair: pair[1].epoch, default=None)

    def _enter(self) -> None:
        """When every seat of the newest roster is taken, its ranks resume and do a step."""
        if not self.rosters or not self.sdk:
            return
        roster = max(self.rosters, key=lambda r: r.epoch)
        if roster.key in self.entered:
            return
        for seat in roster.members:
            agent = self.agents[seat.node]
            proc = agent.procs.get(seat.slot)
            if not agent.alive or proc is None or proc.frozen or proc.epoch != roster.epoch:
                return
        self.entered.add(roster.key)
        moving = not self.slow
        for seat in roster.members:
            words = {"rank": seat.rank, "epoch": roster.epoch}
            self.say(seat.node, RankJoined, ms=40.0, **words)
            if seat.rank in self.slow:
                continue
            source = "initial" if roster.mode == "fresh" else ("local" if seat.newcomer else "live")
            phases = {"abort": 3.0, "swap": 50.0 + seat.rank, "restore": 8.0}
            self.say(
                seat.node, RankResumed, step=self.step, newest=self.step + (self.step > 0), source=source,
                phases=phases, **words,
            )  # fmt: skip
            if moving and seat.rank not in self.stuck:
                self.say(seat.node, RankAdvanced, step=self.step + 1, **words)
        if moving and not self.stuck:
            self.step += 1

    def poison_on(self, name: str, rank: int) -> None:
        """Every new process of ``rank`` on this node dies at once."""
        self.bad_seats.add((NodeId(name), Rank(rank)))

    def train(self, steps: int = 5) -> None:
        self.step += steps

    def kill(self, rank: int, **how: Any) -> None:
        """The rank's process ends; SIGKILL unless told otherwise."""
        held = self.holder(rank)
        if held is not None:
            self._end(held[0], held[1].slot, **(how or {"signal": 9}))

    def user_error(self, rank: int, *, step: int | None = None, consequence: bool = False, line: int = 41) -> None:
        error = UserError(
            type="ValueError", message="bad batch", file="train.py", line=line, function="train_one",
            step=self.step if step is None else step, consequence=consequence,
        )  # fmt: skip
        self.kill(rank, code=1, error=error)

    def freeze(self, rank: int) -> None:
        held = self.holder(rank)
        if held is not None and not held[1].frozen:
            agent, proc = held
            proc.frozen = True
            self.say(
                agent.name, WorkerFrozen, slot=proc.slot, rank=Rank(rank), epoch=proc.epoch, state="T", for_s=1.0
            )  # fmt: skip

    def cannot(self, rank: int, why: str = "no step has a holder for every rank") -> None:
        held = self.holder(rank)
        if held is not None:
            self.say(held[0].name, ResumeFailed, rank=Rank(rank), epoch=held[1].epoch, why=why)

    def kill_standby(self, name: str) -> None:
        """A parked process on this node ends; its agent parks another one."""
        agent = self.agents.get(NodeId(name))
        parked = [proc for proc in agent.procs.values() if proc.role == "standby"] if agent else []
        if agent is not None and agent.alive and parked:
            self._end(agent, parked[0].slot)
            self._refill(agent)

    def deputy(self, rank: int) -> bool:
        """While no link is up: the rank dies and the first node gives its seat to a standby of the same node."""
        held = self.holder(rank)
        if held is None or any(agent.linked for agent in self.agents.values()) or not self.rosters:
            return False
        agent, proc = held
        newest = max(self.rosters, key=lambda r: r.epoch)
        members = [member for member in newest.members if self.agents[member.node].alive]
        parked = [p for p in agent.procs.values() if p.role == "standby"]
        if proc.epoch != newest.epoch or not parked or len(members) < newest.world_size:
            return False
        if any(m.slot not in self.agents[m.node].procs for m in members):
            return False
        self._end(agent, proc.slot, signal=9)
        cause = agent.outbox[-1]
        assert isinstance(cause, WorkerExited)
        seats = [
            replace(m, slot=parked[0].slot, newcomer=True) if m.rank == rank else replace(m, newcomer=False)
            for m in newest.members
        ]
        origin = members[0].node
        roster = replace(
            newest, epoch=next_minor(newest.epoch), origin=origin, mode="in_process", members=tuple(seats),
            store_host=f"host-{origin}", store_port=40000 + next_minor(newest.epoch) % 1000,
        )  # fmt: skip
        self.recovered_locally(origin, cause, roster)
        return True

    def stall(self, rank: int, *, started: int = 100, finished: int = 99) -> None:
        held = self.holder(rank)
        if held is not None:
            agent, proc = held
            self.say(
                agent.name, RankStalled, slot=proc.slot, rank=Rank(rank), epoch=proc.epoch, step=self.step,
                phase="STEP", started=started, finished=finished, proc_state="S", busy=0.0, idle_s=12.0, limit_s=12.0,
            )  # fmt: skip

    def unstall(self, rank: int) -> None:
        held = self.holder(rank)
        if held is not None:
            self.say(held[0].name, StallEnded, slot=held[1].slot, rank=Rank(rank), epoch=held[1].epoch)

    def broken(self, rank: int, error: str = "Connection closed by peer") -> None:
        held = self.holder(rank)
        if held is not None:
            agent, proc = held
            self.say(agent.name, CollectiveBroken, rank=Rank(rank), epoch=proc.epoch, step=self.step, error=error)

    def done(self, rank: int) -> None:
        held = self.holder(rank)
        if held is not None:
            agent, proc = held
            self.say(agent.name, RankDone, rank=Rank(rank), epoch=proc.epoch, step=self.step)

    def finish(self) -> None:
        """Every rank completes its loop and leaves."""
        for rank in range(self.job.roster.world_size if self.job.roster else 0):
            if self.sdk:
                self.done(rank)
            self.kill(rank, code=0)

    def recovered_locally(self, deputy: str, cause: WorkerExited, roster: Roster) -> None:
        """The deputy's roster is what the nodes have accepted; its report waits in the outbox."""
        for seat in roster.members:
            agent = self.agents[seat.node]
            agent.epoch = roster.epoch
            proc = agent.procs.setdefault(seat.slot, Proc(slot=seat.slot, role="worker"))
            proc.role, proc.rank, proc.epoch = "worker", seat.rank, roster.epoch
        self.rosters.append(roster)
        self.say(NodeId(deputy), RecoveredLocally, roster=roster, cause=cause, why="the controller did not answer")
        self._enter()


def replay(log: list[AnyRecord], policy: Policy | None = None) -> Controller:
    """A mind folded from nothing but the log."""
    mind = Controller(policy)
    for record in log:
        mind.evolve(record)
    return mind


def spec(**changes: Any) -> JobSpec:
    words: dict[str, Any] = {"job": JOB, "min_nodes": 2, "max_nodes": 2, "nproc_per_node": 2, "standbys": 1}
    return JobSpec(**{**words, **changes})


def running(
    *, standby_nodes: int = 0, sdk: bool = True, policy: Policy | None = None, racks: dict[str, str] | None = None,
    **changes: Any,
) -> Fleet:  # fmt: skip
    """A job of two nodes with two ranks each, training."""
    fleet = Fleet(spec(**changes), policy, sdk=sdk)
    fleet.racks = racks or {}
    for index in range(fleet.spec.max_nodes):
        fleet.connect(f"n{index}")
    for index in range(standby_nodes):
        fleet.connect(f"x{index}", standby=True)
    fleet.pump()
    assert fleet.job.state == "RUNNING", fleet.job.state
    fleet.train()
    return fleet
