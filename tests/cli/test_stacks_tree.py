"""Eight stacks, one tree: shared calls once, and each set of ranks with what it waits for."""

from __future__ import annotations

from keepstep.cli.stacks_tree import tree
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.stacks import Frame, ProcessStacks, ThreadStack

SITE = "/opt/venv/lib/python3.11/site-packages/"
RUN = Frame("<module>", "train.py", 80)
LOOP = Frame("main", "train.py", 40)
REDUCE = Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2806)
LOAD = Frame("load_batch", "train.py", 88)


def process(rank: int, *frames: Frame, state: str = "S") -> ProcessStacks:
    return ProcessStacks(
        rank=Rank(rank), slot=SlotId(f"s{rank}"), pid=rank, role="trainer", name="python", state=state, how="py-spy",
        threads=(ThreadStack(name="MainThread", frames=frames, main=True),) if frames else (),
    )  # fmt: skip


def position(rank: int, launched: int, finished: int) -> RankPosition:
    one = Collective(sequence=launched, op="all_reduce", elements=4096, dtype="float32")
    group = GroupPosition(group="0", members="0-7", launched=launched, finished=finished, last=one)
    return RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=(group,))


def test_seven_wait_and_one_loads() -> None:
    processes = [process(rank, REDUCE, LOOP, RUN) for rank in range(8) if rank != 3]
    processes.append(process(3, LOAD, LOOP, RUN, state="R"))
    positions = {Rank(rank): position(rank, 41, 40) for rank in range(8)} | {Rank(3): position(3, 40, 40)}
    assert tree(processes, positions) == [
        "└─ 8 ranks (0-7): <module> (train.py:80)",
        "   main (train.py:40)",
        "   ├─ 7 ranks (0-2,4-7): all_reduce (torch/distributed/distributed_c10d.py:2806)",
        "   │  └─ 7 ranks (0-2,4-7) in a collective (state S), in all_reduce #41 (4,096 float32) of group 0",
        "   └─ rank 3: load_batch (train.py:88)",
        "      └─ rank 3 computing (state R), 40 done in group 0",
    ]


def test_ranks_without_a_stack_or_a_position_have_their_own_leaf() -> None:
    assert tree([process(0, RUN), process(1, state="T"), process(2, state="T")], {}) == [
        "├─ rank 0: <module> (train.py:80)",
        "│  └─ rank 0 asleep (state S)",
        "└─ 2 ranks (1-2) stopped by a signal (state T)",
    ]
