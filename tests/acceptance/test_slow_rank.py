"""Ranks that take longer than the others, in real jobs: named, with what it costs, and swapped where that helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.checks import MakeCluster, assert_same_losses

from keepstep.cli.demo_cluster import Cluster
from keepstep.model.facts import RankResumed, RanksPaced
from keepstep.model.records import IncidentMeasured, Observed, ProposalMoved, StragglerNoted
from keepstep.store.exceptions import StoreError
from keepstep.store.sqlite import open_log

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
LIMIT_S = 60.0
SLOW = 3


class Log:
    """The job's log, read on from where it was read last."""

    def __init__(self, cluster: Cluster) -> None:
        self._path, self._after = cluster.run_dir / "log.sqlite", 0
        self.windows: list[RanksPaced] = []
        self.notes: list[StragglerNoted] = []
        self.proposals: list[ProposalMoved] = []
        self.resumed: list[RankResumed] = []
        self.measured: list[IncidentMeasured] = []

    def look(self) -> Log:
        try:
            log = open_log(self._path, readonly=True)
        except (OSError, StoreError):
            return self  # not made yet
        try:
            for entry in log.read(after=self._after):
                self._after = entry.seq
                match entry.record:
                    case Observed(fact=RanksPaced() as fact):
                        self.windows.append(fact)
                    case Observed(fact=RankResumed() as fact):
                        self.resumed.append(fact)
                    case StragglerNoted() as note:
                        self.notes.append(note)
                    case ProposalMoved() as proposal:
                        self.proposals.append(proposal)
                    case IncidentMeasured() as measured:
                        self.measured.append(measured)
                    case _:
                        pass
        finally:
            log.close()
        return self


def job(cluster: Cluster) -> dict[str, Any]:
    words = [sys.executable, "-m", "keepstep.cli.main", "job", "--state-dir", str(cluster.home / "state"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=os.environ)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_slow_rank_is_named_and_forgiven(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """Two nodes of two ranks, windows of a second: rank 3 takes 60 % longer, and nobody else is blamed for its
    time. Then it waits as long for its data, and that is no machine's fault."""
    slow = tmp_path / "slow"
    cluster = make_cluster(
        script=HERE / "slow_train.py",
        args=("--steps", "100000", "--slow", str(slow)),
        nodes=2,
        nproc=2,
        flags=("--pace-window", "1s", "--standbys", "0"),
    )
    cluster.start()
    log = Log(cluster)
    cluster.until(lambda: len(log.look().windows) >= 2, LIMIT_S, "the first windows of both nodes")
    paces = job(cluster)["paces"]
    assert [row["rank"] for row in paces] == [0, 1, 2, 3]
    assert all(0.02 <= row["own_s"] <= row["step_s"] for row in paces), paces
    slow.write_text(f"{SLOW} 0.012")
    cluster.until(lambda: any(SLOW in note.ranks for note in log.look().notes), LIMIT_S, "the note on rank 3")
    mine = next(note for note in log.notes if SLOW in note.ranks)
    assert (mine.cause, mine.ranks, mine.nodes) == ("device", (SLOW,), ("node-1",)), mine
    assert mine.slowdown > 1.1, mine
    (row,) = [row for row in job(cluster)["stragglers"] if row["ranks"] == str(SLOW)]
    assert "rank 3 on node-1 is" in row["why"]
    assert "of the job" in row["why"]
    slow.unlink()
    cluster.until(lambda: any(note.over for note in log.look().notes), LIMIT_S, "the end of it")
    assert {note.ranks for note in log.notes} == {(SLOW,)}, "nobody else was blamed"
    slow.write_text(f"{SLOW} 0.012 data")
    cluster.until(lambda: any(note.cause == "data" for note in log.look().notes), LIMIT_S, "the note on rank 3's data")
    assert [note.cause for note in log.notes] == ["device", "device", "data"], "no machine is blamed for its data"
    assert [note.ranks for note in log.notes] == [(SLOW,)] * 3


def test_a_slow_node_is_swapped_between_two_steps(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """A living node's rank moves to the spare node without a fault: no step is lost, none is done twice, and every
    loss is the one of an undisturbed run."""
    slow = tmp_path / "slow"
    slow.write_text("node-1 0.012")
    steps = ("--slow", str(slow), "--steps")
    cluster = make_cluster(
        "swap",
        script=HERE / "slow_train.py",
        args=(*steps, "100000"),
        nodes=2,
        standby_nodes=1,
        nproc=1,
        flags=("--pace-window", "1s"),
    )
    cluster.start()
    log = Log(cluster)
    cluster.until(lambda: bool(log.look().measured), LIMIT_S, "the end of the swap")
    (note,) = log.notes
    assert (note.cause, note.nodes) == ("node", ("node-1",)), note
    assert [one.to for one in log.proposals] == ["PROPOSED", "APPROVED", "CARRIED_OUT"]
    cluster.until(lambda: cluster.floor() >= max(fact.step for fact in log.resumed) + 50, LIMIT_S, "fifty more steps")
    (measured,) = log.measured
    last = [fact for fact in log.resumed if fact.epoch == max(one.epoch for one in log.resumed)]
    assert (measured.steps_lost, measured.survivors_kept, measured.replaced) == (0, 1, (1,))
    assert {fact.newest - fact.step for fact in last} == {0}, last
    assert cluster.node_of(1) == "spare-0"
    done = cluster.floor()
    reference = make_cluster(
        "reference",
        script=HERE / "slow_train.py",
        args=(*steps, str(done), "--pace", "0"),
        nodes=1,
        nproc=2,
        flags=("--standbys", "0"),
    )
    cluster.close()
    reference.start()
    assert reference.wait(LIMIT_S) == {"node-0": 0}, reference.tail()
    assert_same_losses(cluster, reference.run_dir, done, world_size=2)
