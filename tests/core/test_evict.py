"""Outliers and what explains them: the smallest domain, never more than the limit, nobody where all are alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.locate.domains import FaultDomain, domains_of
from keepstep.core.locate.evict import (
    Limit,
    most_voted,
    smallest_domain,
)
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Layout, Member, Place, Roster

WIDE = Limit(nodes=8, share=0.5)


def roster(nodes: int, per_node: int, rack_of: int = 0) -> Roster:
    members = tuple(
        Member(
            rank=Rank(rank), node=NodeId(f"n{rank // per_node}"), slot=SlotId(f"s{rank}"), local_rank=rank % per_node
        )
        for rank in range(nodes * per_node)
    )
    places = tuple(
        Place(
            node=NodeId(f"n{node}"), host="h", keeper_port=1, peer_port=2, rack=f"r{node // rack_of}" if rack_of else ""
        )
        for node in range(nodes)
    )
    return Roster(
        job=JobId("j"),
        epoch=Epoch(1),
        origin="controller",
        mode="fresh",
        world_size=len(members),
        members=members,
        places=places,
        store_host="h",
        store_port=1,
    )


def paper() -> tuple[FaultDomain, ...]:
    """TP 2, PP 4, DP 4 on 16 nodes of two ranks: each tensor-parallel pair is a node."""
    return domains_of(roster(16, 2), Layout(tp=2, pp=4, dp=4))


def test_domains_follow_the_layout() -> None:
    """Every group of a 2 x 4 x 4 layout, every node and device; pipeline groups go through four nodes."""
    kinds: dict[str, int] = {}
    for domain in paper():
        kinds[domain.kind] = kinds.get(domain.kind, 0) + 1
    assert kinds == {"device": 32, "node": 16, "tp": 16, "dp": 8, "pp": 8}
    pipeline = next(d for d in paper() if d.kind == "pp" and 5 in d.ranks)
    assert pipeline.ranks == {5, 13, 21, 29}
    assert pipeline.nodes == ("n2", "n6", "n10", "n14")


def test_layout_of_another_world_is_not_used() -> None:
    """A layout that does not multiply to the ranks that are there says nothing about them."""
    assert {d.kind for d in domains_of(roster(3, 2), Layout(tp=2, pp=2, dp=2))} == {"device", "node"}


def test_one_rank_is_its_device_and_one_node_goes() -> None:
    verdict = smallest_domain([5], paper(), limit=WIDE)
    assert (verdict.action, verdict.nodes) == ("evict", ("n2",))
    assert verdict.domain is not None
    assert verdict.domain.words == "the device of rank 5"
    assert verdict.probability > 0.9


def test_all_ranks_of_a_node_are_the_node() -> None:
    """The tensor-parallel group has the same ranks; the smaller repair gives the name."""
    verdict = smallest_domain([4, 5], paper(), limit=WIDE)
    assert verdict.domain is not None
    assert (verdict.domain.words, verdict.action) == ("node n2", "evict")
    assert "explains 2 of 2 outliers" in verdict.reason


def test_pipeline_group_is_evicted_and_examined() -> None:
    """One stage holds up its pipeline: four nodes go, three of them innocent, and that is said."""
    verdict = smallest_domain([5, 13, 21, 29], paper(), limit=WIDE)
    assert verdict.domain is not None
    assert (verdict.domain.kind, verdict.action) == ("pp", "evict_and_examine")
    assert verdict.nodes == ("n2", "n6", "n10", "n14")
    assert verdict.innocent == pytest.approx(3, abs=0.1)
    assert "4 healthy nodes are out for 10 min" in verdict.cost_if_wrong


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_domain_that_shows_fully_is_named(data: st.DataObject) -> None:
    """Whichever domain of at most half of the job shows in all its ranks, it or the same set of ranks is the answer."""
    domains = domains_of(roster(16, 2, rack_of=4), Layout(tp=2, pp=4, dp=4), links=[(NodeId("n1"), NodeId("n7"))])
    guilty = data.draw(st.sampled_from([d for d in domains if len(d.ranks) <= 16]))
    verdict = smallest_domain(guilty.ranks, domains, limit=WIDE)
    assert verdict.domain is not None
    assert verdict.domain.ranks == guilty.ranks
    assert verdict.unexplained == ()


def test_one_member_that_looks_healthy_and_one_stray_outlier() -> None:
    """Seven of eight ranks of a node and one elsewhere: still the node, the stray is named."""
    domains = domains_of(roster(8, 8), Layout())
    verdict = smallest_domain([16, 17, 18, 19, 20, 21, 22, 50], domains)
    assert verdict.domain is not None
    assert (verdict.domain.words, verdict.unexplained) == ("node n2", (50,))
    assert verdict.action == "evict"


def test_two_nodes_with_a_doubtful_link_are_the_link() -> None:
    nodes = (NodeId("n1"), NodeId("n6"))
    both = [8, 9, 10, 11, 12, 13, 14, 15, *range(48, 56)]
    verdict = smallest_domain(both, domains_of(roster(16, 8), Layout(), links=[nodes]), limit=WIDE)
    assert verdict.domain is not None
    assert verdict.domain.kind == "link"
    assert verdict.nodes == nodes


@pytest.mark.parametrize("count", [32, 17])
def test_if_most_are_outliers_nobody_is_guilty(count: int) -> None:
    """All ranks wait on storage, or more than half: the odd ones are not those."""
    verdict = smallest_domain(range(count), paper(), limit=WIDE)
    assert (verdict.action, verdict.nodes) == ("leave", ())
    assert "no node is" in verdict.reason


def test_storage_of_some_nodes_is_not_mended_by_eviction() -> None:
    """Six of 16 nodes use one mount and hang on it: that is said, and all of them stay."""
    users = [NodeId(f"n{index}") for index in (0, 3, 5, 8, 9, 14)]
    domains = domains_of(roster(16, 2), Layout(), storage={"/data2": users})
    odd = [rank for rank in range(32) if NodeId(f"n{rank // 2}") in users]
    verdict = smallest_domain(odd, domains, limit=WIDE)
    assert (verdict.action, verdict.nodes) == ("leave", ())
    assert "storage of /data2 explains 12 of 12 outliers" in verdict.reason


def test_scattered_outliers_have_nothing_in_common() -> None:
    """Twelve ranks here and there: no domain, no eviction, all of them unexplained."""
    domains = domains_of(roster(16, 2), Layout())
    odd = [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 31]
    verdict = smallest_domain(odd, domains, limit=WIDE)
    assert (verdict.action, verdict.domain, verdict.nodes) == ("leave", None, ())
    assert verdict.unexplained == tuple(odd)


def test_size_of_the_job_does_not_hide_a_domain() -> None:
    """9,600 ranks on 1,200 nodes: one outlier is its node, a pipeline group of eight nodes is that group."""
    domains = domains_of(roster(1200, 8), Layout(tp=8, pp=8, dp=150))
    one = smallest_domain([4711], domains)
    assert (one.action, one.nodes) == ("evict", ("n588",))
    group = next(domain for domain in domains if domain.kind == "pp" and 4711 in domain.ranks)
    eight = smallest_domain(group.ranks, domains)
    assert (eight.action, eight.domain) == ("evict_and_examine", group)
    assert len(eight.nodes) == 8


def test_no_outlier_no_verdict() -> None:
    assert smallest_domain([], paper()).action == "leave"


def test_ambiguous_outliers_are_examined_first() -> None:
    """Two ranks of different nodes and groups: neither is evicted, both nodes are looked at, as far as may be."""
    verdict = smallest_domain([4, 13], paper(), limit=WIDE)
    assert (verdict.action, verdict.nodes) == ("examine", ("n2", "n6"))
    assert verdict.probability > 0.8
    assert "is below 0.8, so it is examined first" in verdict.reason
    assert len(smallest_domain([4, 13], paper(), limit=Limit(nodes=1)).nodes) == 1


def test_blast_radius_asks() -> None:
    """A rack of four where two nodes may go: a person decides. What is out already counts."""
    domains = domains_of(roster(16, 2, rack_of=4), Layout())
    rack = list(range(8))
    verdict = smallest_domain(rack, domains, limit=Limit(nodes=2, share=0.5))
    assert verdict.action == "ask"
    assert "its 4 nodes are more than the 2 that may go without consent" in verdict.reason
    assert smallest_domain(rack, domains, limit=Limit(nodes=4, share=0.5)).action == "evict_and_examine"
    others = [NodeId("n9"), NodeId("n10")]
    assert smallest_domain(rack, domains, limit=Limit(nodes=4, share=0.5), out=others).action == "ask"


def test_nodes_that_are_out_already_are_not_evicted_again() -> None:
    verdict = smallest_domain([4, 5], paper(), limit=WIDE, out=[NodeId("n2")])
    assert (verdict.action, verdict.nodes) == ("leave", ())
    assert "out already" in verdict.reason


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 31), max_size=32), st.integers(1, 8), st.floats(0.0, 1.0))
def test_no_outliers_evict_more_than_the_limit(odd: set[int], nodes: int, share: float) -> None:
    """Whatever the ranks look like: never beyond the limit, never the whole fleet, always with reason and cost."""
    limit = Limit(nodes=nodes, share=share)
    verdict = smallest_domain(odd, paper(), limit=limit)
    if verdict.action in ("evict", "evict_and_examine"):
        assert 1 <= len(verdict.nodes) <= limit.allowed(16) <= 15
        assert verdict.probability >= limit.confidence
    assert verdict.reason
    assert verdict.cost_if_wrong


def test_single_node_is_never_evicted() -> None:
    """A job on one node has nobody to replace it by: a person decides."""
    assert smallest_domain([3], domains_of(roster(1, 8), Layout())).action == "ask"


def test_five_looks_need_three_that_agree() -> None:
    """A slow node that shows in three of five looks is the answer; slow ranks that wander are not."""
    looks = [smallest_domain(odd, paper(), limit=WIDE) for odd in ([4, 5], [9], [4, 5], [30], [4, 5])]
    agreed = most_voted(looks)
    assert agreed is not None
    assert agreed.nodes == ("n2",)
    assert most_voted(looks[:4]) is None
    assert most_voted([]) is None
