"""What the log knows of checkpoints: the newest generation of each tier, ranks without a copy, and the pace."""

from __future__ import annotations

from typing import Any

from keepstep.cli.show import age, checkpoint_rows, told
from keepstep.controlplane.views import job_view, status_view
from keepstep.model.facts import CheckpointNoted
from keepstep.model.ids import NodeId, Rank
from tests.core.fleet import Fleet, replay, running


def note(fleet: Fleet, name: str, what: str, tier: str = "remote", step: int = 0, **more: Any) -> None:
    fleet.say(NodeId(name), CheckpointNoted, what=what, tier=tier, step=step, **more)
    fleet.pump()


def test_the_newest_generation_of_each_tier_is_kept() -> None:
    """Late and repeated notes do not turn the clock back; verified belongs to its own step."""
    fleet = running()
    names = [str(node) for node in fleet.job.nodes]
    note(fleet, names[0], "saved", step=100, bytes=10, seconds=1.5)
    note(fleet, names[0], "verified", step=100)
    note(fleet, names[0], "saved", step=200, bytes=20)
    note(fleet, names[0], "verified", step=100)
    (row,) = job_view(fleet.job)["checkpoints"]
    assert (row["tier"], row["step"], row["verified"], row["bytes"]) == ("remote", 200, False, 20)
    note(fleet, names[0], "verified", step=200)
    (row,) = job_view(fleet.job)["checkpoints"]
    assert row["verified"] is True


def test_own_disks_count_as_far_as_all_nodes_have_come() -> None:
    """A generation that one node lacks cannot be restored: the table shows the oldest of the newest."""
    fleet = running()
    for index, name in enumerate(str(node) for node in fleet.job.nodes):
        note(fleet, name, "saved", tier="local", step=100 + index)
    rows = {row["tier"]: row["step"] for row in job_view(fleet.job)["checkpoints"]}
    assert rows == {"local": 100}


def test_gaps_open_close_and_end_with_the_process_that_had_them() -> None:
    """A replaced rank says anew whether it lacks a copy; its predecessor's gap is no news any more."""
    fleet = running()
    name = str(fleet.job.seat_of(Rank(1)).node)
    note(fleet, name, "gap", tier="peer", step=5, rank=1, why="keeper away")
    note(fleet, name, "gap", tier="peer", step=5, rank=0, why="keeper away")
    assert status_view(fleet.mind)["jobs"][0]["ranks_without_copy"] == "0-1"
    note(fleet, name, "closed", tier="peer", step=6, rank=0)
    assert [gap["rank"] for gap in job_view(fleet.job)["replication_gaps"]] == [1]
    fleet.kill(1)
    fleet.pump()
    assert job_view(fleet.job)["replication_gaps"] == []


def test_notes_decide_nothing_and_fold_from_the_log() -> None:
    """Nothing but the note itself is written down, and a replay of the log gives the same state."""
    fleet = running()
    before = len(fleet.log)
    name = next(str(node) for node in fleet.job.nodes)
    for what in ("skipped", "damaged", "expired", "restored", "interval"):
        note(fleet, name, what, tier="memory", step=3, why="every 4 steps instead of 1")
    assert len(fleet.log) == before + 5
    assert job_view(fleet.job)["snapshot_pace"] == "every 4 steps instead of 1"
    assert replay(fleet.log).dump() == fleet.mind.dump()


def test_people_read_ages_and_sizes() -> None:
    """The table's cells: age in the largest unit that is not coarse, size with a unit."""
    at = "2026-01-01T00:00:00.000000Z"
    now = 1767225600.0
    assert [age(at, now + s) for s in (-5, 14, 119, 600, 7200, 200_000)] == [
        "0 s",
        "14 s",
        "119 s",
        "10 min",
        "2 h",
        "2 d",
    ]
    job = {
        "checkpoints": [{"tier": "remote", "step": 9, "saved_at": at, "verified": True, "bytes": 2048, "seconds": 1}]
    }
    (row,) = checkpoint_rows(job, now + 14)
    assert (row["age"], row["size"]) == ("14 s", "2.0 KiB")
    assert told(job)["durable"] == "remote:9"
    assert told({})["durable"] == ""
