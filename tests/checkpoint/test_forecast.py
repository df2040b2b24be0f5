"""The forecast is arithmetic: checked by hand where a person would, and by what must hold for all numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.forecast import Cluster, Loss, losses, memory, tiers
from keepstep.model.ids import NodeId
from keepstep.model.placement import Host, domains, place
from keepstep.model.topology import Layout

GB = 10**9


def cluster(**changes: object) -> Cluster:
    words = {
        "nodes": 4,
        "ranks_per_node": 2,
        "rank_bytes": 10 * GB,
        "step_s": 10.0,
        "rates": {"memory": 20 * GB, "peer": 2 * GB, "local": GB, "remote": GB / 10},
    }
    return Cluster(**{**words, **changes})  # type: ignore[arg-type]


def lost(found: Cluster, layout: Layout, racks: str = "abab") -> dict[str, Loss]:
    size = found.ranks_per_node
    hosts = [Host(NodeId(f"n{i}"), tuple(range(i * size, i * size + size)), racks[i]) for i in range(found.nodes)]
    placed, kinds = place(hosts, layout), domains(hosts, layout)
    return {loss.kind: loss for loss in losses(found, hosts, layout, placed, kinds, tiers(found))}


def test_memory_line_by_line() -> None:
    """Two versions of its own, two of another's, one that is being written, one to take differences from."""
    assert memory(cluster(rates={"memory": GB})).total == 40 * GB
    assert memory(cluster(rates={"memory": GB, "peer": GB})).total == 80 * GB
    assert memory(cluster()).total == 100 * GB
    assert memory(cluster(full_every=4)).total == 120 * GB


def test_intervals_that_the_bandwidth_allows() -> None:
    """Half a second is too much for 1 % of ten, so it is copied beside the step; 20 GB take 10, 20 and 200 seconds."""
    found = {tier.tier: tier for tier in tiers(cluster())}
    assert (found["memory"].mode, found["memory"].every, found["memory"].rpo_steps) == ("beside the next step", 1, 1)
    assert (found["peer"].every, found["local"].every, found["remote"].every) == (1, 2, 20)
    assert found["remote"].rpo_steps == 40, "struck just before the next one is complete"
    calm = {tier.tier: tier for tier in tiers(cluster(overhead=0.05))}
    assert (calm["memory"].mode, calm["memory"].stall_s, calm["memory"].rpo_steps) == ("blocking", 0.5, 0)


def test_an_interval_that_cannot_be_kept() -> None:
    found = {tier.tier: tier for tier in tiers(cluster(every=5))}
    assert found["local"].keeps_up
    assert not found["remote"].keeps_up


def test_differences_are_promised_only_where_they_pay() -> None:
    """Packing 20 GB takes as long as writing them to the disk, and a tenth of what the slow store takes."""
    fast, slow = tiers(cluster(full_every=4, rates={"memory": 20 * GB, "local": 2 * GB, "remote": GB / 10}))[1:]
    assert (fast.deltas, fast.bytes) == (False, 20 * GB)
    assert slow.deltas
    assert (slow.save_s, slow.bytes) == ((200 + 3 * 150) / 4, int(20 * GB * 3.25 / 4))
    assert slow.restore_s == 200 + 3 * 150, "the full one and all that rest on it"
    patient = tiers(cluster(full_every=4, every=10, rates={"memory": 20 * GB, "local": 2 * GB}))[1]
    assert patient.deltas, "there is time enough: the disk fills more slowly"


def test_daly() -> None:
    """Against the figures of the formula: 200 s per write and three hours between faults."""
    found = {tier.tier: tier for tier in tiers(cluster(mtbf_s=10800.0))}
    first = math.sqrt(2 * 200 * 10800)
    assert found["remote"].young_daly_every is not None
    assert abs(found["remote"].young_daly_every * 10 - (first * 1.0335 - 200)) < 20
    assert tiers(cluster())[0].young_daly_every is None


def test_losses_come_back_from_the_newest_holder() -> None:
    """Pairs of nodes in two racks, two stages of two: everything but both buddies at once is in the peer's memory."""
    found = lost(cluster(), Layout(tp=2, pp=2, dp=2))
    assert {kind: loss.source for kind, loss in found.items()} == {
        "process": "memory",
        "node": "peer",
        "dp": "peer",
        "pp": "peer",
        "rack": "peer",
        "two buddies": "remote",
        "all memory": "local",
    }
    crossed = lost(cluster(), Layout(tp=2, pp=2, dp=2), racks="abba")["rack"]
    assert (crossed.source, crossed.without_copy) == ("remote", 2), "the rack was given up for both groups"
    assert found["node"].seconds == 1 * 10 + 10
    assert lost(cluster(rates={"memory": 20 * GB}), Layout())["node"].source is None


def test_a_live_replica_is_better_than_any_copy() -> None:
    """Plain data parallelism: as long as one replica trains on, no step is done again."""
    found = lost(cluster(copies=8), Layout(dp=8))
    assert (found["node"].source, found["node"].steps) == ("live", 0)
    assert found["rack"].source == "live"
    assert found["all memory"].source == "local"
    inside = lost(cluster(copies=2), Layout(pp=4, dp=2))
    assert inside["node"].source == "peer", "both replicas of a stage are on one node"


@given(st.integers(1, 10**12), st.floats(0.01, 1e3), st.floats(1e6, 1e12), st.floats(0, 0.5), st.integers(1, 9))
def test_no_tier_is_promised_more_than_its_bandwidth(
    size: int, step_s: float, rate: float, overhead: float, full_every: int
) -> None:
    """In the time between two generations at least one can be carried, and nothing is lost that the interval hides."""
    asked = cluster(
        rank_bytes=size, step_s=step_s, overhead=overhead, full_every=full_every,
        rates=dict.fromkeys(("memory", "peer", "local", "remote"), rate),
    )  # fmt: skip
    for tier in tiers(asked):
        assert tier.every * step_s >= tier.save_s * (1 - 1e-6)
        assert tier.rpo_steps >= tier.every or tier.stall_s
        assert tier.stall_s <= overhead * step_s
