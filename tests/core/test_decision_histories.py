"""Truths about living nodes in every history: suspicions, people, limits and real losses in any order."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepstep.core.controller import Controller
from keepstep.core.decide.proposals import propose
from keepstep.core.draft import Draft
from keepstep.model.facts import OperatorSaid
from keepstep.model.ids import Nanos, NodeId
from keepstep.model.records import AutomationMoved, NodeMoved, ProposalMoved, decode_record, encode_record
from keepstep.model.settings import Policy
from tests.core.fleet import JOB, SECOND, Fleet, replay, spec
from tests.core.test_histories import check_rosters, come_to_rest

RACKS = {"n0": "r0", "n1": "r0", "n2": "r1", "n3": "r1", "x0": "r0", "x1": "r1", "x2": ""}
NAMES = st.sampled_from(sorted(RACKS))
RANKS = st.integers(min_value=0, max_value=3)
NUMBERS = st.integers(min_value=1, max_value=12)
pytestmark = pytest.mark.timeout(3600)  # the soak profile takes its time


class Decisions(RuleBasedStateMachine):
    """A job of four nodes in two racks with up to three spare ones, somebody who suspects, and people who decide."""

    fleet: Fleet

    @initialize(
        mode=st.sampled_from(["observe", "assist", "auto", "auto"]),
        spares=st.integers(min_value=0, max_value=3),
        per_hour=st.integers(min_value=0, max_value=3),
        per_domain=st.integers(min_value=0, max_value=2),
        protected=st.sets(st.sampled_from(["n0", "n2"]), max_size=1),
        sdk=st.sampled_from([True, True, True, False]),
    )
    def start(self, mode: Any, spares: int, per_hour: int, per_domain: int, protected: set[str], sdk: bool) -> None:
        policy = Policy(
            mode=mode, evictions_per_hour=per_hour, evictions_per_domain=per_domain, protected=tuple(sorted(protected))
        )
        self.fleet = Fleet(spec(min_nodes=4, max_nodes=4, nproc_per_node=1), policy, sdk=sdk)
        self.fleet.racks = RACKS
        self.fleet.checked = True
        self.fleet.shadow = replay(self.fleet.log)
        for index in range(4):
            self.fleet.connect(f"n{index}")
        for index in range(spares):
            self.fleet.connect(f"x{index}", standby=True)
        self.fleet.pump()
        self.fleet.train()
        self.read = 0
        self.mode: str = mode
        self.approved: dict[str, ProposalMoved] = {}
        self.nodes_of: dict[str, tuple[NodeId, ...]] = {}
        self.by: dict[str, str] = {}
        self.carried: list[tuple[int, str, tuple[NodeId, ...]]] = []
        self.tainted: set[NodeId] = set()

    # ------------------------------------------------------------ suspicion and people

    @rule(names=st.sets(NAMES, min_size=1, max_size=2), kind=st.sampled_from(["swap", "evict"]))
    def suspect(self, names: set[str], kind: Any) -> None:
        job = self.fleet.job
        draft = Draft(job, self.fleet.now, self.fleet.mind.policy)
        nodes = [NodeId(name) for name in sorted(names)]
        propose(draft, kind=kind, nodes=nodes, ranks=(), reason="slow", evidence=("seen",), probability=0.8)
        for record in draft.records:
            self.fleet.mind.evolve(record)
            self.fleet.shadow.evolve(decode_record(encode_record(record)))
            self.fleet.log.append(record)

    @rule(verb=st.sampled_from(["approve", "approve", "reject", "undo"]), number=NUMBERS)
    def verdict(self, verb: Any, number: int) -> None:
        self._say(verb, f"lm-p{number}")

    @rule(name=NAMES)
    def undo_node(self, name: str) -> None:
        self._say("undo", name)

    @rule(number=NUMBERS, verb=st.sampled_from(["ack", "undo"]))
    def about_incident(self, number: int, verb: Any) -> None:
        self._say(verb, f"lm-i{number}")

    @rule(verb=st.sampled_from(["freeze", "thaw", "thaw"]))
    def freeze_or_thaw(self, verb: Any) -> None:
        self._say(verb)

    @rule(mode=st.sampled_from(["observe", "assist", "auto", "auto"]))
    def set_mode(self, mode: str) -> None:
        self._say("mode", other=mode)

    def _say(self, verb: Any, subject: str = "", other: str = "") -> None:
        self.fleet.tell(
            OperatorSaid(job=JOB, at=self.fleet.now, verb=verb, by="ann", subject=subject, other=other, number=1)
        )

    # ------------------------------------------------------------ time, losses, returns

    @rule()
    def pump(self) -> None:
        self.fleet.pump()

    @rule()
    def train(self) -> None:
        self.fleet.pump()
        self.fleet.train(1)

    @rule(name=NAMES, count=st.integers(min_value=1, max_value=6))
    def deliver(self, name: str, count: int) -> None:
        for _ in range(count if self._linked(name) else 0):
            self.fleet.deliver(NodeId(name))
            self.fleet.carry_out(NodeId(name))

    @rule()
    def deadline(self) -> None:
        self.fleet.next_deadline()

    @rule(seconds=st.sampled_from([1, 60, 1800, 3700]))
    def later(self, seconds: int) -> None:
        self.fleet.later(seconds)

    @rule(rank=RANKS, signal=st.sampled_from([9, 11]))
    def kill(self, rank: int, signal: int) -> None:
        self.fleet.kill(rank, signal=signal)

    @rule(rank=RANKS)
    def poison(self, rank: int) -> None:
        held = self.fleet.holder(rank)
        if held is not None:
            self.fleet.poison_on(held[0].name, rank)
            self.fleet.kill(rank, signal=11)

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        if self._linked(name):
            self.fleet.lose(name)

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        if self._linked(name):
            self.fleet.cut(name)

    @rule(name=NAMES)
    def expire(self, name: str) -> None:
        agent = self.fleet.agents.get(NodeId(name))
        if agent is not None and not agent.linked:
            self.fleet.expire(name)

    @rule(name=NAMES)
    def connect(self, name: str) -> None:
        if not self._linked(name):
            self.fleet.connect(name, standby=name.startswith("x"))

    @rule()
    def controller_dies(self) -> None:
        self.fleet.restart_controller()

    def _linked(self, name: str) -> bool:
        agent = self.fleet.agents.get(NodeId(name))
        return agent is not None and agent.linked

    # ------------------------------------------------------------ truths

    @invariant()
    def living_nodes_go_only_as_they_may(self) -> None:
        """Read each new record as a person who trusts nobody would, with books of one's own."""
        if not hasattr(self, "fleet"):
            return
        policy = self.fleet.mind.policy
        for record in self.fleet.log[self.read :]:
            match record:
                case AutomationMoved():
                    self.mode = record.to
                case ProposalMoved(to="PROPOSED"):
                    self.nodes_of[record.proposal] = record.nodes
                case ProposalMoved(to="APPROVED"):
                    assert self.mode != "frozen"
                    assert record.by == "ann" or self.mode == "auto"
                    self.by[record.proposal] = record.by
                case ProposalMoved(to="CARRIED_OUT"):
                    nodes = self.nodes_of[record.proposal]
                    self.carried.append((record.at, record.proposal, nodes))
                    if record.by == "auto":
                        hour = [n for at, _, ns in self.carried if at > record.at - 3600 * SECOND for n in ns]
                        assert len(hour) <= policy.evictions_per_hour, hour
                        assert not set(nodes) & set(policy.protected)
                case NodeMoved(to="TAINTED"):
                    because = [p for p, nodes in self.nodes_of.items() if record.node in nodes and p in self.by]
                    assert because, f"{record.node} is taken out, and nobody approved of it"
                    assert self.mode != "frozen"
                    if all(self.by[name] == "auto" for name in because):
                        assert self.mode == "auto"
                        rack = RACKS[record.node]
                        out = {name for name in self.tainted if RACKS[name] == rack} | {record.node}
                        assert not rack or len(out) <= policy.evictions_per_domain, out
                    self.tainted.add(record.node)
                case NodeMoved(to="PROBATION"):
                    self.tainted.discard(record.node)
                case _:
                    pass
        self.read = len(self.fleet.log)

    @invariant()
    def a_swap_never_leaves_a_rank_without_a_node(self) -> None:
        if hasattr(self, "fleet"):
            check_rosters(self.fleet)
            roster = self.fleet.job.roster
            assert roster is not None
            assert roster.world_size == 4 or not self.fleet.sdk

    def teardown(self) -> None:
        """When everybody leaves it alone the job comes to rest, and a snapshot is as good as the log."""
        if hasattr(self, "fleet"):
            come_to_rest(self.fleet)
            self.living_nodes_go_only_as_they_may()
            assert not any(one.open for one in self.fleet.job.proposals.values()) or not self.fleet.job.over
            loaded = Controller.load(self.fleet.mind.dump())
            assert loaded.dump() == self.fleet.mind.dump()
            assert Nanos(0) < self.fleet.now


TestDecisions: Any = Decisions.TestCase
