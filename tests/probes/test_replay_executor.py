"""Replay on real processes: crashes, hangs and wrong results name their machine, and a killed search goes on."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepstep.core.locate.replay import Phase
from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Terms, Verdict
from keepstep.model.ids import NodeId
from keepstep.probes.exceptions import ForeignRecord, NothingRan, UnreadableRecord
from keepstep.probes.groups import Job, Outcome, Worker, judge_sums, run_round
from keepstep.probes.record import Begun, Judged, Record
from keepstep.probes.replay import examine

HALF = 0.5


def shell(script: str, **options: float) -> Job:
    return Job(command=("sh", "-c", script), **options)  # type: ignore[arg-type]


def room(count: int, guilty: Sequence[int] = (), fault: str = "yes") -> list[Worker]:
    """Machines of which the guilty ones have ``FAULT`` in their environment; nobody else knows."""
    return [
        Worker(machine=NodeId(f"n{index}"), environ={"FAULT": fault} if index in guilty else {})
        for index in range(count)
    ]


def play(workers: list[Worker], job: Job, phase: Phase, directory: Path) -> dict[int, Outcome]:
    found: list[Outcome] = []
    by_name = {worker.machine: worker for worker in workers}
    run_round(phase, range(len(phase.groups)), by_name, job, directory, found.append)
    return {outcome.group: outcome for outcome in found}


def pairs(count: int) -> Phase:
    return Phase(groups=tuple((NodeId(f"n{at}"), NodeId(f"n{at + 1}")) for at in range(0, count, 2)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what: str, condition: object) -> None:
    until = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, f"{what} did not happen in 20 s"
        time.sleep(0.02)


def test_crashing_machine_is_named(tmp_path: Path) -> None:
    """One of twelve exits with 7 wherever it runs; its last words and the outputs of failing groups are kept."""
    told: list[str] = []
    job = shell('if [ -n "$FAULT" ]; then echo "Xid 79" >&2; exit 7; fi', grace_s=0.5)
    verdict = examine(room(12, [5]), job, record=tmp_path / "r", luck=lambda: HALF, tell=told.append)
    assert (verdict.kind, verdict.machines, verdict.rounds) == ("found", ("n5",), 2)
    failed = [line for line in told if "failed" in line]
    assert all("on n5: exit code 7 (Xid 79)" in line for line in failed)
    kept = sorted(path.name for path in (tmp_path / "r.out").glob("*/*/*.err") if path.stat().st_size)
    assert len(failed) == len(kept) == 2


def test_hanging_machine_is_named(tmp_path: Path) -> None:
    """A machine that freezes is found by the deadline, and its process does not survive the round."""
    pids = tmp_path / "pids"
    job = shell(f'echo $$ >> {pids}; [ -z "$FAULT" ] || kill -STOP $$', deadline_s=1.0)
    verdict = examine(room(6, [2]), job, record=tmp_path / "r", luck=lambda: HALF)
    assert verdict.machines == ("n2",)
    assert not [pid for pid in map(int, pids.read_text().split()) if alive(pid)]


def test_wrong_result_is_named_by_majority(tmp_path: Path) -> None:
    """Nobody knows the right checksum; three equal groups agree on it, and no exit code tells."""
    job = shell('echo "checksum: early"; echo "checksum: a$FAULT$WORLD_SIZE"')
    verdict = examine(room(9, [4]), job, record=tmp_path / "r", terms=Terms(size=3), luck=lambda: HALF)
    assert verdict.machines == ("n4",)


def test_two_results_need_to_know_the_right_one(tmp_path: Path) -> None:
    """Two groups that differ prove nothing about either; with the expected checksum they do."""
    job = ("sh", "-c", 'echo "checksum: a$FAULT"')
    terms = Terms(unit=2, most_rounds=4)
    open_ = examine(room(4, [1]), Job(command=job), record=tmp_path / "a", terms=terms, luck=lambda: HALF)
    assert (open_.kind, open_.rounds) == ("open", 4)
    lines = (tmp_path / "a").read_text()
    assert "no majority of 2 groups agrees; give the expected one" in lines
    found = examine(room(4, [1]), Job(command=job, expected="a"), record=tmp_path / "b", terms=terms, luck=lambda: HALF)
    assert found.machines == ("n1",)


def outcome(group: int, *sums: str) -> Outcome:
    return Outcome(group=group, kind="passed", why="", seconds=1.0, sums=sums)


def test_results_are_compared_by_size_and_rank() -> None:
    """Ranks may differ within a group, groups of another size are another computation, earlier rounds count."""
    seen: Counter[tuple[str, ...]] = Counter({("a", "b"): 2})
    judged = judge_sums([outcome(0, "a", "b"), outcome(1, "a", "x"), outcome(2, "q"), outcome(3)], seen)
    assert [o.kind for o in judged] == ["passed", "failed", "passed", "passed"]
    assert judged[1].why == "rank 1 printed checksum x, 3 of 4 groups b"


def test_silent_rank_among_those_that_print_has_failed(tmp_path: Path) -> None:
    job = shell('[ -n "$FAULT" ] || echo "checksum: a"')
    found = play(room(4, [3]), job, pairs(4), tmp_path)
    assert [found[0].kind, found[1].kind] == ["passed", "failed"]
    assert found[1].why == "rank 1 printed no checksum, others did"


def test_survivors_of_a_crash_get_their_grace_and_no_more(tmp_path: Path) -> None:
    """The peer of a dead process would wait for ever: it is killed, and the dead one is the reason."""
    job = shell('[ -z "$FAULT" ] || exit 3; exec sleep 300', deadline_s=60, grace_s=0.3)
    found = play(room(2, [1]), job, pairs(2), tmp_path)
    assert found[0].why == "rank 1 on n1: exit code 3"
    assert found[0].machine == "n1"
    assert found[0].seconds < 10


def test_what_a_process_leaves_behind_is_killed(tmp_path: Path) -> None:
    """A data loader in the background outlives its trainer, which ended well; it does not outlive the round."""
    pids = tmp_path / "pids"
    job = shell(f"sleep 300 & echo $! >> {pids}")
    assert play(room(2), job, pairs(2), tmp_path / "out")[0].kind == "passed"
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    wait_until("the end of the background processes", lambda: not any(map(alive, left)))


def test_groups_at_the_same_time_are_bounded(tmp_path: Path) -> None:
    """With ``parallel`` 2 there are never three; all six run."""
    log = tmp_path / "log"
    job = shell(f"echo + >> {log}; sleep 0.1; echo - >> {log}", parallel=2)
    phase = Phase(groups=tuple((NodeId(f"n{at}"),) for at in range(6)))
    assert len(play(room(6), job, phase, tmp_path / "out")) == 6
    depth, most = 0, 0
    for sign in log.read_text().split():
        depth += 1 if sign == "+" else -1
        most = max(most, depth)
    assert most == 2


def test_fields_and_environment_reach_the_command(tmp_path: Path) -> None:
    """Template fields are filled, other braces are left alone, and torch finds its variables."""
    job = Job(
        command=("sh", "-c", 'echo "checksum: {rank}/{world}/{machine}/{port}/$RANK$WORLD_SIZE/${MASTER_PORT}"'),
        port=7000,
    )
    found = play(room(4), job, pairs(4), tmp_path)
    assert found[1].sums == ("0/2/n2/7001/02/7001", "1/2/n3/7001/12/7001")


def test_prefix_is_the_way_to_a_machine(tmp_path: Path) -> None:
    workers = [Worker(machine=NodeId(f"n{at}"), prefix=("env", f"WHERE=n{at}")) for at in range(2)]
    found = play(workers, shell('echo "checksum: $WHERE"'), pairs(2), tmp_path)
    assert found[0].sums == ("n0", "n1")


def test_nothing_that_runs_is_an_error_and_not_a_verdict(tmp_path: Path) -> None:
    """A command that is not there proves nothing about machines. Once it is, the same record goes on."""
    tool = tmp_path / "tool"
    job = Job(command=(str(tool),))
    with pytest.raises(NothingRan, match="could not be started for n0: No such file"):
        examine(room(4), job, record=tmp_path / "r", luck=lambda: HALF)
    tool.write_text('#!/bin/sh\n[ -z "$FAULT" ]\n')
    tool.chmod(0o755)
    assert examine(room(4, [3]), job, record=tmp_path / "r", luck=lambda: HALF).machines == ("n3",)


def test_too_few_descriptors_leave_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process was started that cannot be watched, its group is void and the process is ended."""
    pids: list[int] = []
    real = os.pidfd_open

    def scarce(pid: int, flags: int = 0) -> int:
        pids.append(pid)
        if len(pids) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", scarce)
    phase = Phase(groups=((NodeId("n0"), NodeId("n1"), NodeId("n2")),))
    found = play(room(3), Job(command=("sleep", "300")), phase, tmp_path / "out")
    assert found[0].kind == "void"
    assert "Too many open files" in found[0].why
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_finished_search_is_not_run_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = shell(f'echo x >> {log}; [ -z "$FAULT" ]')
    first = examine(room(4, [1]), job, record=tmp_path / "r", luck=lambda: HALF)
    runs = len(log.read_text())
    assert examine(room(4, [1]), job, record=tmp_path / "r") == first
    assert len(log.read_text()) == runs


KILLED = """
import sys
from pathlib import Path
from keepstep.probes.replay import examine
from tests.probes.test_replay_executor import gated, room
examine(room(6, [3]), gated(Path(sys.argv[1])), record=Path(sys.argv[1]) / "r", luck=lambda: 0.5)
"""


def gated(folder: Path) -> Job:
    """Group of machine n5 waits for a gate; each run of a machine is logged with its pid."""
    script = f'echo {{machine}} $$ >> {folder}/log; [ -z "$FAULT" ] || exit 1; [ {{machine}} != n5 ] || '
    return shell(f"{script} while [ ! -e {folder}/gate ]; do sleep 0.05; done", deadline_s=60)


def test_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 amid a round: its processes die with it, finished groups keep their outcome, the verdict is the same."""
    record, log = tmp_path / "r", tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=env)
    try:
        wait_until("five of six outcomes", lambda: record.exists() and record.read_text().count('"Ran"') >= 2)
        wait_until("the gated process", lambda: "n5" in log.read_text())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    waiting = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("n5")]
    wait_until("the end of the gated process", lambda: not any(map(alive, waiting)))
    with record.open("a") as file:
        file.write('{"type":"Ran","step":0,"rep')
    before = Counter(line.split()[0] for line in log.read_text().splitlines())
    ran = record.read_text().count('"Ran"') - 1
    (tmp_path / "gate").touch()
    verdict = examine(room(6, [3]), gated(tmp_path), record=record, luck=lambda: HALF)
    assert verdict.machines == ("n3",)
    after = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert ran >= 2
    assert sum((after - before).values()) == verdict.rounds * 6 - 2 * ran, "groups of two that had ended ran once"


def test_record_of_another_search_is_refused(tmp_path: Path) -> None:
    job = shell('[ -z "$FAULT" ]')
    examine(room(4, [1]), job, record=tmp_path / "r", luck=lambda: HALF)
    with pytest.raises(ForeignRecord, match="machines is not the same"):
        examine(room(5, [1]), job, record=tmp_path / "r")
    with pytest.raises(ForeignRecord, match="job is not the same"):
        examine(room(4, [1]), shell("true"), record=tmp_path / "r")


def test_record_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("buy milk\n")
    with pytest.raises(UnreadableRecord, match=r"notes:1: .*move the file away to begin anew"):
        examine(room(4), shell("true"), record=path)
    assert path.read_text() == "buy milk\n"


def test_two_writers_are_refused(tmp_path: Path) -> None:
    """A second search on the same record while the first one runs: told so, at once."""
    errors: list[str] = []

    def again(line: str) -> None:
        with pytest.raises(ForeignRecord, match="being written by another process") as caught:
            examine(room(4, [1]), shell('[ -z "$FAULT" ]'), record=tmp_path / "r")
        errors.append(str(caught.value))

    verdict: Verdict = examine(
        room(4, [1]),
        shell('[ -z "$FAULT" ]'),
        record=tmp_path / "r",
        luck=lambda: HALF,
        tell=lambda line: again(line) if line.startswith("round") else None,
    )
    assert verdict.machines == ("n1",)
    assert errors


@pytest.mark.acceptance
def test_evicted_machines_are_told_apart_by_real_jobs(tmp_path: Path) -> None:
    """Two machines went on suspicion; beside two good ones they train over gloo, and the one that flips a bit is named.

    One round is enough: each suspect has a group of its own, and what the weights have to be is known.
    """
    script = str(Path(__file__).with_name("replay_job_torch.py"))
    right = hashlib.sha256(struct.pack("<64f", *[-6.0] * 64)).hexdigest()[:16]
    job = Job(command=(sys.executable, script), deadline_s=60.0, expected=right)
    good = {NodeId("n0"): 0.0, NodeId("n3"): 0.0}
    verdict = examine(
        room(4, [2], "flip"), job, record=tmp_path / "r", terms=Terms(unit=2), suspicion=good, luck=lambda: HALF
    )
    assert (verdict.kind, verdict.machines, verdict.rounds) == ("found", ("n2",), 1)


def test_torn_line_is_cut_off_before_anything_is_added(tmp_path: Path) -> None:
    """However long the half line was that a power cut left, what is written next can be read again."""
    path = tmp_path / "r"
    begun = Begun(
        schema=1, machines=(NodeId("n0"),), suspicion={}, terms=Terms(), prior=Prior(), job=Job(command=("true",))
    )
    with Record(path) as record:
        record.append(begun)
    with path.open("a") as file:
        file.write('{"type":"Judged","reasons":["' + "x" * 5000)
    with Record(path) as record:
        assert record.lines == [begun]
        record.append(Judged(step=0, repeat=0, failed=(), void=(), reasons=()))
    assert path.read_bytes().endswith(b"}\n")
    with Record(path) as record:
        assert len(record.lines) == 2
