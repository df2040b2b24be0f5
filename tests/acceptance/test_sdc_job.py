"""A flipped bit in one replica of a real job: found, undone, investigated and told on a page, by all parts together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.guard import TRIAL, WORKER, losses

from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster
from keepstep.controlplane.views import load_mind
from keepstep.core.summary import incident_block
from keepstep.model.actions import SelfTest, TaintCheckpoints
from keepstep.model.facts import ActionFailed, SelfTestDone
from keepstep.model.records import Observed, Ordered

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(280)]

LIMIT_S = 240.0
STEPS = 28


def test_a_machine_that_does_it_again_is_taken_out(tmp_path: Path) -> None:
    """Rank 3's weights flip whenever step 10 is done on its first machine. It is outvoted twice: its node is convicted,
    its ranks move to the spare node, all go back to a clean step, and training comes to its end. Nobody is asked."""
    words = ["--steps", "400", "--guard", json.dumps(TRIAL | {"max_rollbacks": 200}), "--fault", "weight:3:10:17:999"]
    cluster = Cluster(
        tmp_path, job="lm", script=WORKER, args=words, nodes=2, nproc=2, standby_nodes=1,
        flags=("--standbys", "0"), environ=clean_environment(),
    )  # fmt: skip
    cluster.start()
    try:
        codes = cluster.wait(LIMIT_S)
        assert not any(codes.values()), cluster.tail(100)
        assert {len(found) for found in losses(cluster.run_dir).values()} == {400}
        mind, entries = load_mind(cluster.run_dir)
    finally:
        cluster.close()
    (job,) = mind.jobs()
    case = next(iter(job.investigations.values()))
    assert (case.state, case.ranks, case.nodes) == ("CONFIRMED", (3,), ("node-1",))
    (proposal,) = job.proposals.values()
    assert (proposal.kind, proposal.state, proposal.nodes) == ("evict", "CARRIED_OUT", ("node-1",))
    assert job.roster is not None
    assert {member.node for member in job.roster.members} == {"node-0", "spare-0"}
    page = "\n".join(incident_block([e.record for e in entries], str(case.incident)))
    assert "CONFIRMED: outvoted again" in page


def test_a_flipped_bit_becomes_an_investigation_with_a_page(tmp_path: Path) -> None:
    """Two nodes of two ranks; behind step 10 a bit of rank 3's weights flips. Training goes back and on by itself. The
    log holds the investigation up to the self-tests that were ordered, and the incident names rank, node and tensor."""
    words = ["--steps", str(STEPS), "--guard", json.dumps(TRIAL), "--fault", "weight:3:10:17"]
    cluster = Cluster(
        tmp_path, job="lm", script=WORKER, args=words, nodes=2, nproc=2, flags=("--standbys", "0"),
        environ=clean_environment(),
    )  # fmt: skip
    cluster.start()
    try:
        codes = cluster.wait(LIMIT_S)
        assert not any(codes.values()), cluster.tail(100)
        assert {len(found) for found in losses(cluster.run_dir).values()} == {STEPS}
        mind, entries = load_mind(cluster.run_dir)
    finally:
        cluster.close()
    (job,) = mind.jobs()
    (case,) = job.investigations.values()
    node = next(member.node for member in job.roster.members if member.rank == 3) if job.roster else ""
    assert (case.ranks, case.nodes) == ((3,), (node,))
    assert [line.partition(":")[0] for line in case.history][:4] == ["SUSPECTED", "REPLAY", "VOTE", "SOAK"]
    orders = [e.record.action for e in entries if isinstance(e.record, Ordered)]
    assert {order.node for order in orders if isinstance(order, TaintCheckpoints)} == {"node-0", "node-1"}
    assert {order.node for order in orders if isinstance(order, SelfTest)} == {"node-0", "node-1"}
    facts = [e.record.fact for e in entries if isinstance(e.record, Observed)]
    assert not [fact for fact in facts if isinstance(fact, ActionFailed) and "taint" in fact.action]
    assert all(fact.passed for fact in facts if isinstance(fact, SelfTestDone))
    page = "\n".join(incident_block([e.record for e in entries], str(case.incident)))
    for word in ("silent data corruption", "rank 3", case.tensor, "SUSPECTED", "SOAK"):
        assert word in page, page
    assert job.incidents[case.incident].category == "infrastructure" if case.incident else False
