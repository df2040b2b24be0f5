"""The lease table, on a clock of the tests' own: each change is reported once, at the right time."""

from __future__ import annotations

from keepstep.controlplane.leases import Contact, LeaseTable, NodeKey
from keepstep.model.ids import JobId, NodeId

A = NodeKey(JobId("j"), NodeId("a"))
B = NodeKey(JobId("j"), NodeId("b"))
OTHER = NodeKey(JobId("k"), NodeId("a"))


def test_silence_is_reported_once_and_coming_back_too() -> None:
    """Heartbeats say nothing; a whole lease of silence is one edge, the next sign of life another."""
    table = LeaseTable(10.0)
    assert [table.heard(A, float(t)) for t in range(5)] == [False] * 5
    assert table.next_look() == 14.0
    assert table.expired(13.9) == []
    assert table.expired(14.0) == [(A, 10.0)]
    assert table.expired(99.0) == []
    assert table.next_look() is None
    assert table.heard(A, 100.0)
    assert not table.heard(A, 101.0)
    assert table.expired(111.0) == [(A, 10.0)]


def test_a_broken_connection_is_an_edge_and_the_lease_runs_on() -> None:
    """After a broken connection the lease still counts from the last sign of life."""
    table = LeaseTable(10.0)
    table.heard(A, 0.0)
    assert table.broken(A)
    assert not table.broken(A)
    assert table.expired(10.0) == [(A, 10.0)]
    assert not table.broken(A)
    assert table.heard(A, 11.0)


def test_reconnecting_within_the_lease_is_one_edge() -> None:
    """Broken, then heard again: renewed exactly once, no expiry."""
    table = LeaseTable(10.0)
    table.heard(A, 0.0)
    table.broken(A)
    assert table.heard(A, 5.0)
    assert not table.heard(A, 6.0)
    assert table.expired(15.9) == []


def test_what_the_log_already_says_is_not_said_again() -> None:
    """After a restart leases run anew; a node given up before is not given up twice, but its return is news."""
    table = LeaseTable(10.0)
    table.expect(A, 5.0, Contact.EXPIRED)
    table.expect(B, 5.0, Contact.BROKEN)
    assert table.next_look() == 15.0
    assert not table.broken(B)
    assert table.expired(15.0) == [(B, 10.0)]
    assert table.heard(A, 16.0)
    assert table.heard(B, 16.0)


def test_our_own_sleep_is_not_held_against_the_nodes() -> None:
    """After this process was stopped, silent nodes get a moment more, but only once per silence."""
    table = LeaseTable(10.0)
    table.heard(A, 0.0)
    table.heard(B, 0.0)
    table.forgive(500.0, 2.0)
    assert table.expired(501.9) == []
    assert table.next_look() == 502.0
    assert not table.heard(A, 501.0)
    table.forgive(502.0, 2.0)
    assert table.expired(502.0) == [(B, 502.0)]
    assert table.expired(510.9) == []
    table.forgive(511.0, 2.0)
    assert table.expired(512.9) == []
    assert table.expired(513.0) == [(A, 12.0)]


def test_who_left_in_good_order_is_forgotten() -> None:
    """Neither a node that left nor the nodes of a finished job expire; other jobs' nodes of that name stay."""
    table = LeaseTable(10.0)
    for key in (A, B, OTHER):
        table.heard(key, 0.0)
    table.forget(A)
    assert not table.broken(A)
    table.forget_job(B.job)
    assert table.expired(50.0) == [(OTHER, 50.0)]
