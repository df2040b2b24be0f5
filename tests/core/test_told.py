"""What processes have written decides with how they ended: words of all ranks, read together, live."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keepstep.core.locate.past import matches
from keepstep.core.locate.told import EVIDENCE_LINES, READ_VOICES, told, words_of
from keepstep.core.state import Incident, Job
from keepstep.core.summary import incident_block
from keepstep.model.facts import UserError
from keepstep.model.ids import NodeId
from keepstep.model.records import PlanMade, SuspectNamed
from keepstep.model.settings import Policy
from tests.core.fleet import Fleet, running

FELL = (
    "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=python, GPU has fallen off the bus.",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
)
ECHO = ("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:31",)
SHARD = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 41, in main',
    "    batch = next(batches)",
    '  File "/job/data.py", line 12, in read',
    "    return decode(record)",
    "ValueError: corrupt record in /data/shard-00017.tar: CRC mismatch at sample 4711",
)


def alive(fleet: Fleet) -> Job:
    return fleet.job


def incident(fleet: Fleet) -> Incident:
    return list(fleet.job.incidents.values())[-1]


def named(fleet: Fleet) -> list[SuspectNamed]:
    return [record for record in fleet.log if isinstance(record, SuspectNamed)]


def rungs(fleet: Fleet) -> list[str]:
    return [record.rung for record in fleet.log if isinstance(record, PlanMade)]


def test_a_lost_gpu_that_only_the_log_tells_of_moves_the_ranks_away() -> None:
    """Exit code 1 looks like the user's fault; the words say that the node's GPU is gone, and a spare node is there."""
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=1, first_error=FELL)
    fleet.pump()
    seen = incident(fleet)
    assert (seen.category, seen.node, seen.code) == ("infrastructure", "n0", "GPU079")
    assert seen.root_cause.startswith("gpu_fell_off_bus: ")
    assert rungs(fleet) == ["replace_node"]
    assert {member.node for member in fleet.job.roster.members} == {NodeId("n1"), NodeId("x0")}  # type: ignore[union-attr]
    assert fleet.job.nodes[NodeId("n0")].health == "QUARANTINED"
    assert seen.evidence[0] == f"n0:r1 | {FELL[0]}"


def test_a_mode_that_only_observes_says_so_and_moves_nobody() -> None:
    """The node lives: taking it out is bound by the same limits as every other change of living nodes."""
    fleet = running(standby_nodes=1, policy=Policy(mode="observe"))
    fleet.kill(1, code=1, first_error=FELL)
    fleet.pump()
    assert fleet.job.nodes[NodeId("n0")].health == "HEALTHY"
    assert rungs(fleet) == ["in_process"]
    plan = next(record for record in fleet.log if isinstance(record, PlanMade))
    assert any("mode observe" in line for line in plan.rejected) or any(
        "observe" in one.held for one in fleet.job.proposals.values()
    )


def test_without_a_spare_node_the_job_goes_on_where_it_is_and_asks_for_another_allocation_at_last() -> None:
    """A node that is broken is no reason to stand still; when nothing helps, the end is one that asks to be queued."""
    fleet = running(max_restarts=0)
    fleet.poisoned.add(1)  # type: ignore[arg-type]
    fleet.kill(1, code=1, first_error=FELL)
    fleet.pump()
    assert rungs(fleet)[0] in ("in_process", "same_node")
    for _ in range(20):
        if fleet.job.over:
            break
        fleet.kill(1, code=1, first_error=FELL)
        fleet.pump()
        fleet.next_deadline()
    assert fleet.job.exit_code == 138


@pytest.mark.parametrize("sdk", [True, False], ids=["sdk", "plain"])
def test_a_corrupt_sample_is_the_datas_fault_and_evicts_nobody(sdk: bool) -> None:
    fleet = running(standby_nodes=1, sdk=sdk)
    error = UserError(type="ValueError", message=SHARD[-1].partition(": ")[2], file="/job/data.py", line=12, step=5)
    fleet.kill(2, code=1, stderr_tail=SHARD, first_error=SHARD, error=error)
    fleet.pump()
    seen = incident(fleet)
    assert (seen.category, seen.node) == ("data", None)
    assert all(not node.lost for node in fleet.job.nodes.values())
    assert seen.user_faults == 1


def test_the_same_corrupt_sample_twice_ends_the_job_with_its_own_code() -> None:
    fleet = running()
    error = UserError(type="ValueError", message=SHARD[-1].partition(": ")[2], file="/job/data.py", line=12, step=5)
    for _ in range(3):
        fleet.kill(2, code=4, first_error=SHARD, error=error)
        fleet.pump()
    assert (fleet.job.state, fleet.job.exit_code) == ("FAILED", 4)


def test_an_exception_of_the_code_stays_the_users() -> None:
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=1, stderr_tail=("KeyError: 'lerning_rate'",), error=UserError(
        type="KeyError", message="'lerning_rate'", file="/job/train.py", line=9, step=5))  # fmt: skip
    fleet.pump()
    seen = incident(fleet)
    assert (seen.category, seen.node) == ("user_code", None)
    assert seen.root_cause


def test_a_kill_is_not_made_the_users_fault_by_an_old_handled_exception() -> None:
    """The output of a process that was killed from outside may hold a stack that it got over hours ago."""
    fleet = running()
    fleet.kill(1, signal=9, first_error=SHARD)
    fleet.pump()
    assert (incident(fleet).category, incident(fleet).node) == ("infrastructure", "n0")


def test_loud_victims_wait_for_the_quiet_culprit() -> None:
    """A plain script: three ranks die of a broken connection first, then the one whose GPU is gone."""
    fleet = running(sdk=False, standby_nodes=1)
    for rank in (0, 2, 3):
        fleet.kill(rank, code=1, first_error=ECHO)
        fleet.pump()
    assert not rungs(fleet)
    fleet.kill(1, code=1, first_error=FELL)
    fleet.pump()
    assert incident(fleet).code == "GPU079"
    assert incident(fleet).suspects == (1,)
    assert rungs(fleet) == ["restart_job"]
    places = {place.node for place in fleet.job.roster.places}  # type: ignore[union-attr]
    assert NodeId("n0") not in places
    assert NodeId("x0") in places


def test_words_of_the_living_count_too() -> None:
    """The process lives, but its collective broke with an error of its own GPU: it is ended, and its node is left."""
    fleet = running(standby_nodes=1)
    fleet.broken(0)
    fleet.broken(
        3, error="NCCL WARN Cuda failure 'uncorrectable ECC error encountered'\nCUDA error: uncorrectable ECC error"
    )
    fleet.pump()
    seen = incident(fleet)
    assert (seen.category, seen.node, seen.suspects) == ("infrastructure", "n1", (3,))


def test_when_nobody_is_gone_the_words_still_name_the_cause() -> None:
    """All processes live; a port that went down is told of by two of them, and nobody is evicted for it."""
    fleet = running(standby_nodes=1)
    for rank in (0, 2):
        fleet.broken(rank, error="NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\nncclSystemError")
    fleet.pump()
    while not named(fleet):
        assert fleet.next_deadline()
        fleet.pump()
    seen = incident(fleet)
    assert seen.root_cause.partition(":")[0] not in ("", "collective_abort")
    assert (seen.node, seen.suspects) == (None, ())
    assert any("port error" in line for line in seen.evidence)


def test_the_page_shows_the_cause_its_words_and_what_was_like_it() -> None:
    """Cause, how to look it up, the lines; an earlier incident of the same cause with what was done about it."""
    fleet = running(standby_nodes=2)
    for rank in (1, 3):
        fleet.kill(rank, code=1, first_error=FELL)
        fleet.pump()
        fleet.train()
    page = incident_block(fleet.log, "lm-i2")
    assert f"   |  said      n1:r3 | {FELL[0]}" in page
    assert "  = cause:  gpu_fell_off_bus (infrastructure); keepstep explain GPU079" in page
    assert named(fleet)[-1].similar == ("lm-i1",)
    (match,) = matches(fleet.job, incident(fleet))
    assert (match.same, match.past.done) == (("cause", "code"), "replace_node")
    assert match.past.ended.startswith("RESOLVED")
    assert match.past.took_s is not None
    assert not matches(fleet.job, next(iter(fleet.job.incidents.values())))


def test_hearsay_about_another_node_evicts_nobody() -> None:
    """A rank that tells of a fault on another machine is a witness, not proof."""
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=1, first_error=(f"n1 kernel: {FELL[0]}",))
    fleet.pump()
    assert fleet.job.nodes[NodeId("n1")].health == "HEALTHY"


@pytest.mark.parametrize("name", ["n0", "N0.cluster.example.org", "host-n0"])
def test_a_node_is_known_by_its_own_names(name: str) -> None:
    """The kernel's or NCCL's name for the machine may be longer than ours, or be its host name."""
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=1, first_error=(f"{name} kernel: {FELL[0]}",))
    fleet.pump()
    assert fleet.job.nodes[NodeId("n0")].health == "QUARANTINED"


QUOTED = "batch text: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def test_a_quoted_kernel_message_evicts_nobody() -> None:
    """The program failed by its own exception; a kernel message in its output is data that it printed."""
    fleet = running(standby_nodes=1)
    error = UserError(type="ValueError", message="bad batch", file="train.py", line=40)
    fleet.kill(1, code=1, error=error, stderr_tail=(QUOTED,))
    fleet.pump()
    assert fleet.job.nodes[NodeId("n0")].health != "QUARANTINED"
    assert [one.category for one in fleet.job.incidents.values()] == ["user_code"]
    assert not fleet.job.proposals


@pytest.mark.parametrize(("signal", "testable"), [(0, True), (6, False)])
def test_words_alone_leave_a_node_only_until_it_has_examined_itself(signal: int, testable: bool) -> None:
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=None if signal else 1, signal=signal or None, first_error=FELL)
    fleet.pump()
    assert [one.testable for one in fleet.job.proposals.values()] == [testable]


def test_only_echoes_are_nobodys_fault() -> None:
    """All ranks of a plain script time out and leave with code 1: no user is blamed for it."""
    fleet = running(sdk=False)
    words = ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",)
    for rank in range(4):
        fleet.kill(rank, code=1, first_error=words)
        fleet.pump()
    fleet.next_deadline()
    fleet.pump()
    assert all(record.category != "user_code" for record in named(fleet))


def test_what_is_said_twice_is_read_once_and_all_is_bounded() -> None:
    fleet = running(nproc_per_node=8)
    lines: dict[str, Any] = {"first_error": (*FELL, *(f"error {i} {'x' * 390}" for i in range(30)))}
    fleet.cut("n0")
    for rank in range(16):
        fleet.kill(rank, code=1, **lines)
    fleet.pump()
    fact = next(iter(fleet.job.exits.values()), None)
    if fact is not None:
        assert len(words_of(fact)) <= 8_000
    begun = time.process_time()
    said = told(fleet.job)
    first = time.process_time() - begun
    assert said is None or len(said.evidence) <= EVIDENCE_LINES
    assert READ_VOICES <= 16
    assert first < 1.0
