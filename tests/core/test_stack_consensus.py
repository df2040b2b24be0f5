"""Stack consensus: who is not where the others are, and when nobody is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.locate.stacks import comparable, consensus, waits_for
from keepstep.model.ids import Rank, SlotId
from keepstep.model.stacks import Frame, ProcessStacks, ThreadStack

SITE = "/opt/venv/lib/python3.11/site-packages/"
RUN = Frame("<module>", "/srv/lm/train.py", 80)
LOOP = Frame("train", "/srv/lm/train.py", 40)
REDUCE = (Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2806), LOOP, RUN)
BACKWARD = (Frame("_engine_run_backward", SITE + "torch/autograd/graph.py", 825), LOOP, RUN)
NEXT = (
    Frame("select", "/usr/lib/python3.11/selectors.py", 415),
    Frame("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1243),
    LOOP,
    RUN,
)
SPIN = (Frame("spin", "/srv/lm/train.py", 12), LOOP, RUN)
LOCK = (Frame("wait", "/usr/lib/python3.11/threading.py", 320), Frame("put", "/srv/lm/buffer.py", 7), LOOP, RUN)
READ = (Frame("read", "/srv/lm/io.py", 3), LOOP, RUN)


def process(
    rank: int, frames: tuple[Frame, ...] = REDUCE, state: str = "S", *, role: str = "trainer", wchan: str = ""
) -> ProcessStacks:
    thread = ThreadStack(name="MainThread", frames=frames, main=True)
    return ProcessStacks(
        rank=Rank(rank), slot=SlotId(f"r{rank}"), pid=rank + 100, role=role, name="python",  # type: ignore[arg-type]
        state=state, wchan=wchan, how="py-spy", threads=(thread,) if frames else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "state", "wchan", "expected"),
    [
        (REDUCE, "S", "futex_wait_queue", "collective"),
        (BACKWARD, "S", "futex_wait_queue", "collective"),
        (BACKWARD, "R", "", "computing"),
        (NEXT, "S", "do_poll", "data"),
        (SPIN, "R", "", "computing"),
        (LOCK, "S", "futex_wait_queue", "lock"),
        (READ, "S", "", "storage"),
        (READ, "D", "nfs_wait_bit_killable", "storage"),
        (READ, "S", "pipe_read", "sleep"),
        (REDUCE, "T", "do_signal_stop", "stopped"),
        ((), "Z", "", "ended"),
        ((), "S", "", "unknown"),
        ((), "D", "io_schedule", "storage"),
    ],
)
def test_a_place_is_named_by_what_one_waits_for_there(
    frames: tuple[Frame, ...], state: str, wchan: str, expected: str
) -> None:
    assert waits_for(process(0, frames, state, wchan=wchan)) == expected


@pytest.mark.parametrize("other", [SPIN, NEXT, LOCK, READ])
def test_the_one_that_is_elsewhere_is_odd(other: tuple[Frame, ...]) -> None:
    found = consensus([process(rank, other if rank == 5 else REDUCE) for rank in range(8)])
    assert found.odd == (5,)
    assert "rank 5" in found.reason
    assert not found.storage


def test_waiting_in_another_collective_is_waiting_all_the_same() -> None:
    """Pipeline stages stand in different collectives, all because of one rank that is in none."""
    gather = (Frame("all_gather", SITE + "torch/distributed/distributed_c10d.py", 3700), LOOP, RUN)
    stacks = [
        process(0, SPIN),
        *(process(rank, REDUCE) for rank in range(1, 5)),
        process(5, gather),
        process(6, gather),
    ]
    assert consensus(stacks).odd == (0,)


def test_nobody_is_odd_where_all_wait_for_storage() -> None:
    """Also where the trainer waits for a loader that waits for the file system: it is nobody's node."""
    stacks = [process(rank, NEXT) for rank in range(4)]
    stacks += [process(rank, READ, "D", role="child", wchan="rpc_wait_bit_killable") for rank in range(4)]
    stacks += [process(rank, READ, "D", wchan="rpc_wait_bit_killable") for rank in range(4, 8)]
    assert consensus(stacks).storage


def test_two_halves_convict_nobody() -> None:
    stacks = [process(rank, SPIN if rank < 4 else LOCK) for rank in range(8)]
    assert consensus(stacks).odd == ()


def test_versions_of_a_library_and_environments_compare_as_equal() -> None:
    """Two nodes with the same program in another place: the library's own path and lines do not count."""
    other = (
        Frame("all_reduce", "/srv/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2800),
        LOOP,
    )
    first, second = process(0, (REDUCE[0], LOOP)), process(1, other)
    assert comparable(first) == comparable(second)


def test_nothing_seen_is_no_verdict() -> None:
    found = consensus([])
    assert (found.places, found.odd, found.storage) == ((), (), False)


FRAMES = st.sampled_from([REDUCE, BACKWARD, NEXT, SPIN, LOCK, READ, ()])


@given(st.lists(st.tuples(FRAMES, st.sampled_from("RSDTZ")), min_size=1, max_size=24), st.randoms())
def test_whatever_is_seen(seen: list[tuple[tuple[Frame, ...], str]], luck: object) -> None:
    """Each rank stands in exactly one place, the odd are a minority, and order does not matter."""
    stacks = [process(rank, frames, state) for rank, (frames, state) in enumerate(seen)]
    found = consensus(stacks)
    assert sorted(rank for place in found.places for rank in place.ranks) == list(range(len(seen)))
    assert len(found.odd) * 2 < len(seen) or not found.odd
    shuffled = list(stacks)
    luck.shuffle(shuffled)  # type: ignore[attr-defined]
    assert consensus(shuffled) == found
