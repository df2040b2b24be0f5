"""torch's flight recorder, read by a double of its dump: the shape is that of torch 2.13 (version 2.10 of the dump)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from keepstep.trainer.recorder import read_dump
from keepstep.trainer.recorder_torch import find_dump, recorded

NOW_NS = 1_796_086_930_000_000_000
MEMBERS = {"0": (0, 1, 2, 3), "pp": (1, 3, 5), "other": (0, 2)}


def entry(number: int, pg: int, name: str, sequence: int, op: str, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": pg,
        "process_group": [name, "default_pg"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": op,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        "time_created_ns": NOW_NS - 2_000_000_000,
        "time_discovered_started_ns": 0,
        "timeout_ms": 600000,
        "thread_name": "python",
        **more,
    }


def dump() -> bytes:
    """Group 0 was connected anew (7 after 0); of its operations 41 is over; the middle rank of pp sends to the next."""
    entries = [
        entry(0, 0, "0", 9, "nccl:all_reduce", retired=True, state="completed"),
        entry(1, 7, "0", 41, "nccl:_all_gather_base", input_sizes=[[1024, 8]], input_dtypes=["BFloat16"], retired=True),
        entry(2, 7, "0", 42, "nccl:_reduce_scatter_base", input_sizes=[[2, 3, 4]]),
        entry(3, 7, "0", 43, "nccl:all_reduce", input_sizes=[[5], [6]]),
        entry(4, 8, "pp", 0, "nccl:send 1->2", is_p2p=True, p2p_seq_id=3),
        entry(5, 8, "pp", 0, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=4, state="completed"),
        entry(6, 9, "stranger", 5, "nccl:all_reduce"),
    ]
    status = {"7": {"last_completed_collective": "41", "last_enqueued_collective": "43"}}
    return json.dumps({"entries": entries, "pg_status": status, "version": "2.10", "pg_config": {}}).encode()


def test_groups_stand_where_the_recorder_has_them() -> None:
    """An older generation of a group, and groups that are not ours, are left out; messages are told by themselves."""
    world, pipeline = read_dump(dump(), MEMBERS, now_ns=NOW_NS)
    assert (world.group, world.members, world.launched, world.finished) == ("0", "0-3", 43, 41)
    assert world.pending == (42, 43)
    assert world.inside is not None
    assert (world.inside.op, world.inside.elements, world.inside.dtype) == ("reduce_scatter_tensor", 24, "float32")
    assert [(one.op, one.elements, one.dtype) for one in world.recent] == [
        ("all_gather_into_tensor", 8192, "bfloat16"),
        ("reduce_scatter_tensor", 24, "float32"),
        ("all_reduce", 11, "float32"),
    ]
    assert world.inside.age_s == pytest.approx(2.0)
    assert [(one.op, one.peer, one.sequence) for one in pipeline.messages] == [("send", 5, 3)]
    assert pipeline.inside is None


def test_what_is_no_dump_is_no_position() -> None:
    """A recorder that is switched off, of another version, or broken is as good as none."""
    with pytest.raises(msgspec.MsgspecError):
        read_dump(b"\x80\x04nonsense", MEMBERS, now_ns=NOW_NS)
    assert recorded(MEMBERS, lambda: b"[]") == ()
    assert recorded(MEMBERS, lambda: b"{}") == ()

    def broken() -> bytes:
        raise RuntimeError("the recorder is off")

    assert recorded(MEMBERS, broken) == ()


def test_the_recorder_of_this_torch_can_be_dumped() -> None:
    """By the name that it has here; nothing was recorded in this process."""
    found = find_dump()
    if found is None:
        pytest.skip("this torch has no recorder that can be dumped as JSON")
    assert recorded(MEMBERS) == ()
