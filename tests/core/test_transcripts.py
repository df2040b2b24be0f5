"""Incidents as they read in the log: each story is compared with the golden text of its name in ``transcripts/``.

``python -m tests.core.test_transcripts`` writes the texts anew; read the diff before you keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.summary import incident_block
from keepstep.core.summary_lines import record_words
from keepstep.model.facts import (
    OperatorSaid,
    RankAdvanced,
    RankJoined,
    RankResumed,
    SdkAttached,
    StandbyReady,
    StoreReady,
    TimePassed,
)
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import Observed, StandbyMoved
from keepstep.model.settings import Policy
from keepstep.model.stacks import Frame
from tests.core.fleet import JOB, SECOND, START, Fleet, running, spec

HERE = Path(__file__).parent / "transcripts"
_ROUTINE = (StandbyReady, StoreReady, RankAdvanced, RankJoined, RankResumed, SdkAttached, TimePassed)


class Story:
    """A fleet whose log is told together with what the adversary did."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lines: list[str] = []
        self.told = 0

    def note(self, text: str) -> Story:
        """Tell what has been logged so far, then what is done next."""
        self.tell()
        self.lines.append(f"# {text}")
        return self

    def tell(self) -> None:
        for record in self.fleet.log[self.told :]:
            routine = isinstance(record, Observed) and isinstance(record.fact, _ROUTINE)
            if (words := record_words(record)) and not routine and not isinstance(record, StandbyMoved):
                self.lines.append(f"{(record.at - START) / SECOND:8.3f}  {words}")
        self.told = len(self.fleet.log)

    def text(self) -> str:
        self.tell()
        for incident in self.fleet.job.incidents:
            self.lines += ["", *incident_block(self.fleet.log, incident)]
        return "\n".join(self.lines) + "\n"


def story(fleet: Fleet) -> Story:
    tale = Story(fleet)
    tale.told = len(fleet.log)
    return tale


def rank_killed() -> Story:
    """One rank is killed; a parked standby on its node takes its place, three survivors keep their processes."""
    fleet = running()
    tale = story(fleet).note("kill -9 of rank 1")
    fleet.kill(1)
    fleet.pump()
    return tale


def rank_killed_without_standby() -> Story:
    """Without a standby the rank gets a cold process on the same node; survivors are kept all the same."""
    fleet = running(standbys=0)
    tale = story(fleet).note("kill -9 of rank 1, and no standby is kept")
    fleet.kill(1)
    fleet.pump()
    return tale


def node_lost_with_a_standby_node() -> Story:
    """A whole node is gone: collectives break, its agent does not come back, its ranks move to the standby node."""
    fleet = running(standby_nodes=1)
    tale = story(fleet).note("n1 loses power")
    fleet.lose("n1")
    fleet.broken(0)
    fleet.broken(1)
    fleet.pump()
    fleet.later(1.0)
    return tale


def node_dies_piece_by_piece() -> Story:
    """A node that goes down reports the end of a process before its connection breaks: it counts as lost."""
    fleet = running(standby_nodes=1)
    tale = story(fleet).note("n1 goes down: rank 3 first, then everything")
    fleet.kill(3)
    fleet.deliver(NodeId("n1"))
    fleet.lose("n1")
    fleet.pump()
    fleet.later(1.0)
    return tale


def agent_restarts() -> Story:
    """An agent dies and comes back: collectives are healthy, so nothing is done."""
    fleet = running()
    tale = story(fleet).note("the agent of n1 dies; its workers train on")
    fleet.cut("n1")
    fleet.later(3.0)
    tale.note("the launcher has started it again")
    fleet.connect("n1")
    fleet.pump()
    fleet.later(5.0)
    return tale


def controller_back_after_a_deputy() -> Story:
    """The controller is away while a rank dies; a deputy recovers it, and the controller adopts what it did."""
    fleet = running()
    tale = story(fleet).note("the controller dies, then rank 3; the deputy on n0 opens epoch 1.1")
    fleet.restart_controller()
    assert fleet.deputy(3)
    tale.note("the controller is back, the agents connect")
    fleet.connect("n0")
    fleet.connect("n1")
    fleet.pump()
    return tale


def user_exception_twice() -> Story:
    """An exception is retried once; the same one at the same step stops the job, and no node is blamed."""
    fleet = running()
    fleet.stuck = {0}  # the retry ends before any new step
    tale = story(fleet).note("rank 2 raises ValueError at train.py:41 in step 6")
    fleet.user_error(2)
    fleet.pump()
    tale.note("and again after the retry")
    fleet.user_error(2)
    fleet.pump()
    return tale


def rank_frozen() -> Story:
    """The kernel says that a process is stopped: it is killed and replaced."""
    fleet = running()
    tale = story(fleet).note("SIGSTOP to rank 2")
    fleet.later(1.0)
    fleet.freeze(2)
    fleet.pump()
    return tale


def stall_vote() -> Story:
    """Nobody moves. Three ranks wait in collective 101, rank 3 never came to it: rank 3 is killed and replaced."""
    fleet = running()
    tale = story(fleet).note("rank 3 loops for ever outside of any collective")
    fleet.later(12.0)
    for rank in range(3):
        fleet.stall(rank, started=101, finished=100)
    fleet.stall(3, started=100, finished=100)
    fleet.pump()
    fleet.later(1.0)
    return tale


def everybody_in_the_same_collective() -> Story:
    """All ranks hang in the same collective: nobody is blamed, the epoch is rebuilt in place."""
    fleet = running()
    tale = story(fleet).note("the network swallows collective 101")
    fleet.later(12.0)
    for rank in range(4):
        fleet.stall(rank, started=101, finished=100)
    fleet.pump()
    fleet.later(1.0)
    return tale


REDUCE = (Frame("all_reduce", "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2806),)


def stacks_name_whom_the_vote_cannot() -> Story:
    """All ranks are inside some collective, in different groups. Only rank 2's stack shows that it writes a file."""
    fleet = running()
    tale = story(fleet).note("rank 2 holds a lock of the file system inside its own hook of a collective")
    for rank in range(4):
        fleet.places[Rank(rank)] = (*REDUCE, Frame("train", "train.py", 40))
    fleet.places[Rank(2)] = (Frame("write", "hooks.py", 7), Frame("train", "train.py", 40))
    fleet.later(12.0)
    for rank in range(4):
        fleet.stall(rank, started=101, finished=100)
    fleet.pump()
    fleet.later(4.0)
    return tale


def all_wait_for_storage() -> Story:
    """Nobody moves, and every stack ends in a read: no node is to blame, whatever the positions say."""
    fleet = running()
    tale = story(fleet).note("the file server is gone")
    for rank in range(4):
        fleet.places[Rank(rank)] = (Frame("read", "data.py", 12), Frame("train", "train.py", 40))
    fleet.later(12.0)
    for rank in range(3):
        fleet.stall(rank, started=101, finished=100)
    fleet.stall(3, started=100, finished=100)
    fleet.pump()
    fleet.later(1.0)
    return tale


def a_pause() -> Story:
    """Ranks stall and move again by themselves within the time for locating: nothing is done to anybody."""
    fleet = running()
    tale = story(fleet).note("a slow file system holds rank 0 for a while")
    fleet.later(12.0)
    fleet.stall(1)
    fleet.pump()
    fleet.later(0.1)
    fleet.unstall(1)
    fleet.pump()
    return tale


def no_capacity() -> Story:
    """A node is gone and no other one comes: the job asks to be requeued, with code 138."""
    fleet = running()
    tale = story(fleet).note("n1 loses power, and there is no standby node")
    fleet.lose("n1")
    fleet.broken(0)
    fleet.pump()
    fleet.later(1.0)
    tale.note("300 s later")
    fleet.later(300.0)
    return tale


def capacity_comes_in_time() -> Story:
    """A node is gone; a new one joins while the job waits, and takes the ranks."""
    fleet = running()
    tale = story(fleet).note("n1 loses power, and there is no standby node")
    fleet.lose("n1")
    fleet.broken(0)
    fleet.pump()
    fleet.later(20.0)
    tale.note("somebody starts keepstep run on another node")
    fleet.connect("x0")
    fleet.pump()
    return tale


def second_fault_during_recovery() -> Story:
    """A second rank dies before the first recovery is over: one incident, a newer epoch, both replaced."""
    fleet = running()
    tale = story(fleet).note("kill -9 of rank 1; before it has resumed, kill -9 of rank 3")
    fleet.kill(1)
    fleet.deliver(NodeId("n0"))
    fleet.kill(3)
    fleet.pump()
    return tale


def newcomer_never_resumes() -> Story:
    """The new process hangs in its set-up: at the deadline it is killed, and the next rung is taken."""
    fleet = running()
    fleet.slow = {1}
    tale = story(fleet).note("kill -9 of rank 1; its successor hangs")
    fleet.kill(1)
    fleet.pump()
    tale.note("60 s later; the second successor is healthy")
    fleet.slow = set()
    fleet.later(61.0)
    return tale


def poisoned_seat() -> Story:
    """Every process that takes rank 1 on n0 dies: after three attempts the node is given up."""
    fleet = running(standby_nodes=1)
    fleet.poison_on("n0", 1)
    tale = story(fleet).note("rank 1 dies of a bad device on n0, again and again")
    fleet.kill(1, signal=11)
    fleet.pump()
    return tale


def a_person_decides() -> Story:
    """Mode assist: a node whose processes fail again and again stays until somebody says yes, and comes back."""
    fleet = running(standby_nodes=1, policy=Policy(mode="assist", evictions_per_hour=1))
    tale = story(fleet).note("rank 3 dies three times within a few minutes")
    for _ in range(3):
        fleet.kill(3)
        fleet.pump()
        fleet.later(60.0)
    tale.note("ann looks at the proposal and approves it")
    words: Any = {"job": JOB, "by": "ann", "subject": "lm-p1"}
    fleet.tell(OperatorSaid(at=fleet.now, verb="approve", why="its memory is suspect", **words))
    fleet.pump()
    tale.note("an hour later the memory test has passed")
    fleet.later(3600.0)
    fleet.tell(OperatorSaid(at=fleet.now, verb="undo", why="its memory is fine", **words))
    fleet.pump()
    return tale


def fault_at_level_0() -> Story:
    """A script without the SDK: the whole job is restarted, and the echo of the others is not blamed."""
    fleet = running(sdk=False)
    tale = story(fleet).note("rank 3 reports a broken connection before rank 1's death is known")
    fleet.kill(3, code=1, stderr_tail=("RuntimeError: Connection closed by peer [10.0.0.1]:4711",))
    fleet.pump()
    fleet.later(0.2)
    fleet.kill(1)
    fleet.pump()
    fleet.later(11.0)
    return tale


def fault_after_the_loop() -> Story:
    """A rank dies in the script's epilogue: the processes start anew, restore the last step and do it again."""
    fleet = running()
    tale = story(fleet).note("all ranks complete their loop; rank 0 dies while it writes the model")
    for rank in range(4):
        fleet.done(rank)
    fleet.kill(1, code=0)
    fleet.kill(0)
    fleet.pump()
    tale.note("the second time it works")
    fleet.finish()
    fleet.pump()
    return tale


def too_few_nodes() -> Story:
    """The second node never comes: code 66 and a sentence that says what to do."""
    fleet = Fleet(spec())
    tale = Story(fleet)
    fleet.connect("n0")
    fleet.pump()
    fleet.later(601.0)
    return tale


STORIES: list[Callable[[], Story]] = [
    rank_killed,
    rank_killed_without_standby,
    node_lost_with_a_standby_node,
    node_dies_piece_by_piece,
    agent_restarts,
    controller_back_after_a_deputy,
    user_exception_twice,
    rank_frozen,
    stall_vote,
    everybody_in_the_same_collective,
    stacks_name_whom_the_vote_cannot,
    all_wait_for_storage,
    a_pause,
    no_capacity,
    capacity_comes_in_time,
    second_fault_during_recovery,
    newcomer_never_resumes,
    poisoned_seat,
    a_person_decides,
    fault_at_level_0,
    fault_after_the_loop,
    too_few_nodes,
]


def _written(tell: Callable[[], Story]) -> str:
    return f"{tell.__doc__}\n\n{tell().text()}"


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_story(tell: Callable[[], Story]) -> None:
    """The mind answers this story exactly as it did when somebody last read and kept its transcript."""
    golden = HERE / f"{tell.__name__}.txt"
    assert _written(tell) == golden.read_text(encoding="utf-8")


def test_no_transcript_without_a_story() -> None:
    """A transcript that no story writes would never be checked."""
    assert {path.stem for path in HERE.glob("*.txt")} == {tell.__name__ for tell in STORIES}


if __name__ == "__main__":
    for tell in STORIES:
        (HERE / f"{tell.__name__}.txt").write_text(_written(tell), encoding="utf-8")
