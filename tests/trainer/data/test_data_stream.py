"""StepStream: how a restore finds its place, how a stream ends, and what it says when something does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.trainer import reader
from keepstep.trainer.exceptions import StateMismatch
from keepstep.trainer.stream import StepStream
from tests.trainer.data.sources import SOURCES, Forgetful, Iterating, Remembering, through_a_file


def numbers(batch: list[Any]) -> list[int]:
    return [number for _, number in batch]


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_each_rank_uses_its_share_in_order(kind: str) -> None:
    """Two ranks, three samples each: what they use is the stream, over the seam between passes too."""
    ranks = [StepStream(SOURCES[kind](8), 3, rank=rank, world_size=2) for rank in range(2)]
    used = [number for _ in range(4) for one in ranks for number in numbers(next(one))]
    assert used == [*range(8)] * 3
    assert {one.position for one in ranks} == {24}


@pytest.mark.parametrize("kind", [Remembering, Iterating])
def test_a_source_that_knows_its_place_is_sent_there(kind: Any) -> None:
    """A restore reads nothing again; the saved place is the source's own."""
    stream = StepStream(kind(1000), 5)
    for _ in range(100):
        next(stream)
    saved = through_a_file(stream.state_dict())
    assert saved["mark"] == [500, {"at": 500}]
    source = kind(1000)
    other = StepStream(source, 5)
    other.load_state_dict(saved)
    assert numbers(next(other)) == [500, 501, 502, 503, 504]
    assert getattr(source, "reads", 5) == 5


def test_another_source_is_read_up_to_the_place() -> None:
    """Without a state of its own the stream is read again, also where the one before had one."""
    stream = StepStream(Remembering(1000), 5)
    for _ in range(100):
        next(stream)
    source = Forgetful(1000)
    other = StepStream(source, 5)
    other.load_state_dict(through_a_file(stream.state_dict()))
    assert source.reads == 0, "reading begins when it is needed, not while ranks recover"
    assert numbers(next(other)) == [500, 501, 502, 503, 504]
    assert source.reads == 505


def test_a_long_way_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A person who waits sees how far it is."""
    monkeypatch.setattr(reader, "SKIP_SAY_S", -1.0)
    stream = StepStream(Forgetful(1000), 5)
    stream.load_state_dict({"kind": "stream", "format": 1, "position": 900, "pass": 0, "number": 900, "mark": None})
    next(stream)
    said = capsys.readouterr().err
    assert "skipping to the saved place in pass 0 of the stream: 256 of 900 samples" in said


def test_a_stream_that_has_become_shorter_is_found() -> None:
    """It cannot be what it was; the message says both numbers."""
    stream = StepStream(Forgetful(10), 5)
    stream.load_state_dict({"kind": "stream", "format": 1, "position": 90, "pass": 0, "number": 90, "mark": None})
    with pytest.raises(StateMismatch, match="ended after 10 samples where the saved position lies 90"):
        next(stream)


@pytest.mark.parametrize("kind", sorted(SOURCES))
@pytest.mark.parametrize(("pad", "used"), [(False, [*range(5), 0, 1, 2, 3]), (True, [*range(5)] * 2 + [0, 1])])
def test_all_ranks_end_at_the_same_step(kind: str, pad: bool, used: list[int]) -> None:
    """Five samples twice, three a step: the last is left out, or two are added."""
    ranks = [StepStream(SOURCES[kind](5), 1, rank=rank, world_size=3, passes=2, pad=pad) for rank in range(3)]
    found: list[int] = []
    while None not in (batches := [next(one, None) for one in ranks]):
        found += [number for batch in batches for number in numbers(batch)]
    assert batches == [None] * 3
    assert found == used
    assert [next(one, None) for one in ranks] == [None] * 3
    for one in ranks:  # the place at the end is a place like any other
        one.load_state_dict(through_a_file(one.state_dict()))
    assert [next(one, None) for one in ranks] == [None] * 3


def test_a_function_is_given_the_number_of_the_pass() -> None:
    """So it may give another order in each."""
    stream = StepStream(lambda turn: iter([turn * 10, turn * 10 + 1, turn * 10 + 2]), 2)
    assert [next(stream) for _ in range(4)] == [[0, 1], [2, 10], [11, 12], [20, 21]]
    assert stream.passes_done == 2


def test_an_error_in_the_stream_is_not_its_end() -> None:
    """A generator is finished once it has raised; the next try reads again and meets the same error, not a new pass."""

    def broken(turn: int) -> Iterator[int]:
        yield from range(3)
        raise OSError("mount is gone")

    stream = StepStream(broken, 2)
    assert next(stream) == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="mount is gone"):
            next(stream)
    assert stream.state_dict()["number"] == 2


def test_an_error_in_the_middle_leaves_a_source_with_a_place_where_it_was() -> None:
    """The step that failed is taken again from its first sample."""
    failing = iter([True])

    def collate(samples: list[Any]) -> list[int]:
        if samples[0][1] == 3 and next(failing, False):
            raise OSError("out of memory")
        return numbers(samples)

    stream = StepStream(Remembering(10), 3, collate=collate)
    assert next(stream) == [0, 1, 2]
    with pytest.raises(OSError, match="out of memory"):
        next(stream)
    assert [next(stream) for _ in range(3)] == [[3, 4, 5], [6, 7, 8], [9, 0, 1]]


def test_what_can_be_read_once_is_refused() -> None:
    """A generator has no second pass and no way back."""
    with pytest.raises(TypeError, match="generator can be read only once; pass a function"):
        StepStream((number for number in range(3)), 1)
    with pytest.raises(ValueError, match="no sample at all in pass 0"):
        next(StepStream([], 1))
