"""What the log knows of checkpoints: the newest generation of each tier, ranks without a copy, and the pace."""

from __future__ import annotations

from typing import Any

from keepstep.cli.copies import copies_line, trouble_lines
from keepstep.cli.show import age, checkpoint_rows, told
from keepstep.controlplane.views import job_view, status_view
from keepstep.core.fold_checkpoints import MISHAPS, WHY, fold_checkpoint
from keepstep.core.summary import incident_block
from keepstep.model.facts import CheckpointNoted
from keepstep.model.ids import JobId, Nanos, NodeId, Rank
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


# -------------------------------------------------------------------- troubles


def noted(name: str, what: Any, **more: Any) -> CheckpointNoted:
    """A note about a node's own disk, also of a node that the fleet does not have."""
    return CheckpointNoted(job=JobId("lm"), at=Nanos(1), node=NodeId(name), what=what, tier="local", **more)


def troubles(fleet: Fleet) -> list[dict[str, Any]]:
    return list(job_view(fleet.job)["checkpoint_troubles"])


def test_a_trouble_stays_until_a_newer_generation_makes_up_for_it() -> None:
    """Left out: over with the same or a later step in that place. Damaged: with a later one only."""
    fleet = running()
    name = next(str(node) for node in fleet.job.nodes)
    note(fleet, name, "saved", step=100)
    for step in (200, 300, 300):
        note(fleet, name, "skipped", step=step, rank=1, why="No space left")
    note(fleet, name, "damaged", step=100, why="bytes 0 to 9")
    note(fleet, name, "skipped", step=50, why="a late word")
    left_out, damaged = troubles(fleet)
    assert (left_out["tier"], left_out["what"], left_out["ranks"], left_out["why"]) == (
        "remote",
        "skipped",
        "1",
        "No space left",
    )
    assert (left_out["first_step"], left_out["step"], left_out["generations"]) == (200, 300, 2)
    assert "keepstep ckpt ls" in left_out["help"]
    assert "keepstep ckpt verify" in damaged["help"]
    note(fleet, name, "saved", tier="local", step=400)
    assert len(troubles(fleet)) == 2, "another place makes up for nothing"
    note(fleet, name, "verified", step=100)
    assert [row["what"] for row in troubles(fleet)] == ["skipped", "damaged"]
    note(fleet, name, "saved", step=300)
    assert troubles(fleet) == []


def test_memory_that_failed_is_over_when_a_later_state_is_durable() -> None:
    """A generation in the shared place has passed through the memory of every node."""
    fleet = running()
    first, second = [str(node) for node in fleet.job.nodes][:2]
    note(fleet, first, "skipped", tier="memory", step=7, rank=0, why="no room")
    note(fleet, second, "damaged", tier="memory", step=8, rank=2, why="flipped")
    assert {row["tier"] for row in troubles(fleet)} == {"memory"}
    note(fleet, first, "saved", tier="local", step=9)
    assert [row["nodes"] for row in troubles(fleet)] == [[second]]
    note(fleet, first, "saved", step=8)
    assert len(troubles(fleet)) == 1, "it was that very state"
    note(fleet, first, "saved", step=9)
    assert troubles(fleet) == []


def test_the_same_disk_on_many_nodes_is_one_row() -> None:
    """And nodes that are not in the roster any more have no say."""
    fleet = running()
    names = [str(node) for node in fleet.job.nodes]
    for name in (*names, "gone"):
        fold_checkpoint(fleet.job, noted(name, "skipped", step=100, rank=Rank(0), why="Read-only file system"))
    (row,) = troubles(fleet)
    assert row["nodes"] == sorted(name for name in names if fleet.job.in_roster(NodeId(name)))
    assert row["ranks"] == "-"


def test_troubles_are_bounded_and_fold_from_the_log() -> None:
    """However many places fail, and however long their errors are."""
    fleet = running()
    name = next(str(node) for node in fleet.job.nodes)
    for what in ("skipped", "damaged"):
        note(fleet, name, what, tier="local", step=3, why="x" * 500)
    assert replay(fleet.log).dump() == fleet.mind.dump()
    for number in range(MISHAPS + 9):
        fold_checkpoint(fleet.job, noted(f"n{number}", "skipped", step=number, why="x" * 500))
    assert len(fleet.job.mishaps) == MISHAPS
    assert "skipped local/n0" not in fleet.job.mishaps
    assert max(len(one.why) for one in fleet.job.mishaps.values()) == WHY


def test_gaps_that_are_alike_are_one_row_and_lower_what_another_node_has() -> None:
    """The row says since which step; copies say the oldest of the newest."""
    fleet = running()
    name = next(str(node) for node in fleet.job.nodes)
    whole = job_view(fleet.job)["copies"]
    assert whole["memory"] is not None
    assert whole["peer"] == whole["memory"]
    for rank in range(4):
        note(fleet, name, "gap", tier="peer", step=whole["memory"] - rank, rank=rank, why="keeper away")
    (row,) = troubles(fleet)
    assert (row["tier"], row["what"], row["ranks"], row["why"]) == ("peer", "gap", "0-3", "keeper away")
    assert job_view(fleet.job)["copies"]["peer"] == whole["memory"] - 3
    for rank in range(4):
        note(fleet, name, "gap", tier="peer", step=1, rank=rank, why=f"reason {rank}")
    assert [row["ranks"] for row in troubles(fleet)] == ["0", "1", "2-3"]


def test_people_read_what_is_behind_why_and_what_to_do() -> None:
    """Two lines per trouble, one line for what there is, and a cell in the wide table."""
    fleet = running()
    name = next(str(node) for node in fleet.job.nodes)
    note(fleet, name, "saved", step=100)
    note(fleet, name, "skipped", step=200, why="No space left")
    note(fleet, name, "skipped", step=300, why="No space left")
    note(fleet, name, "gap", tier="peer", step=1, rank=1, why="keeper away")
    job = job_view(fleet.job)
    copies = copies_line(job, lambda _: "9 s")
    assert copies.startswith("newest step in: memory ")
    assert copies.endswith("shared 100 (9 s ago)")
    lines = trouble_lines(job, lambda _: "9 s")
    assert lines[0] == "behind: shared: steps 200 to 300 (2) left out for 9 s: No space left"
    assert lines[1].startswith("  help: ")
    assert lines[2] == "behind: rank 1 has no copy on another node since step 1, for 9 s: keeper away"
    assert told(job)["behind"] == "remote:skipped peer:gap"
    assert copies_line({}, lambda _: "") == ""
    assert trouble_lines({}, lambda _: "") == []


def test_an_incident_says_where_states_came_from_and_which_copies_were_bad() -> None:
    """The ranks by source; a copy that was damaged while it was looked for; nothing without notes."""
    fleet = running()
    fleet.kill(1)
    fleet.pump()
    assert not [line for line in incident_block(fleet.log, "lm-i1") if "copies:" in line]
    fleet.broken(0)
    fleet.pump()
    name = str(fleet.job.seat_of(Rank(0)).node)
    for rank in (0, 1):
        note(fleet, name, "restored", tier="memory", step=5, rank=rank)
        note(fleet, name, "damaged", tier="peer", step=6, rank=rank, why="bytes 0 to 9")
    note(fleet, name, "restored", tier="remote", step=5, rank=2)
    block = "\n".join(incident_block(fleet.log, f"lm-i{fleet.job.incident_count}"))
    assert "state:  rank 0-1 from step 5 in memory" in block
    assert "state:  rank 2 from step 5 in the shared place" in block
    assert "copies: rank 0-1: step 6 damaged (peer tier): bytes 0 to 9" in block
