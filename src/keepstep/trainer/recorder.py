"""Recorder: positions out of torch's own flight recorder, for groups whose collectives do not pass through our hands.

On CUDA the groups are torch's, and NCCL's operations are recorded by torch in a ring of its own
(``TORCH_FR_BUFFER_SIZE``; https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). Its JSON dump is
read here, by name and not by position, since fields come and go between versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.model.ids import Rank
from keepstep.model.position import Collective, GroupPosition, fold_members

KEPT = 15
"""Newest operations of each group that are told."""

_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_DTYPES: Mapping[str, str] = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
_NAMES: Mapping[str, str] = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_to_allv": "all_to_all_single",
}


class _Entry(msgspec.Struct):
    record_id: int = 0
    pg_id: int = 0
    process_group: list[str] = []
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    state: str = ""
    retired: bool = False
    time_created_ns: int = 0


class _Status(msgspec.Struct):
    last_completed_collective: int | str = -1
    last_enqueued_collective: int | str = -1


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []
    pg_status: dict[str, _Status] = {}


_decode = msgspec.json.Decoder(_Dump).decode


def read_dump(data: bytes, members: Mapping[str, Sequence[int]], *, now_ns: int) -> tuple[GroupPosition, ...]:
    """Where each group stands.

    Args:
        members: ranks in the world by name of the group; what the recorder knows of others is left out.
        now_ns: wall clock, as the recorder's times are.

    Raises:
        msgspec.MsgspecError: the dump is none.
    """
    dump = _decode(data)
    newest: dict[str, int] = {}
    for entry in dump.entries:  # a group that was connected anew is another one to the recorder, with the same name
        if entry.process_group:
            newest[entry.process_group[0]] = max(entry.pg_id, newest.get(entry.process_group[0], -1))
    found = []
    for name, ranks in members.items():
        mine = [e for e in dump.entries if e.process_group[:1] == [name] and e.pg_id == newest[name]]
        if mine:
            status = dump.pg_status.get(str(newest[name]), _Status())
            found.append(_position(name, ranks, sorted(mine, key=lambda e: e.record_id), status, now_ns))
    return tuple(found)


def _position(
    name: str, ranks: Sequence[int], entries: Sequence[_Entry], status: _Status, now_ns: int
) -> GroupPosition:
    together = [entry for entry in entries if not entry.is_p2p]
    # The coalesced parts of one operation share its number; the last of them stands for all.
    known = list({e.collective_seq_id: _collective(e, e.collective_seq_id, ranks, now_ns) for e in together}.values())
    launched = max((one.sequence for one in known), default=0)
    told = int(status.last_completed_collective)
    over = {e.collective_seq_id for e in together if _over(e) or e.collective_seq_id <= told}
    pending = tuple(one.sequence for one in known[-KEPT:] if one.sequence not in over)
    return GroupPosition(
        group=name,
        members=fold_members(ranks),
        launched=launched,
        finished=min(pending, default=launched + 1) - 1 if pending else launched,
        last=known[-1] if known else None,
        recent=tuple(known[-KEPT:]),
        pending=pending,
        messages=tuple(
            _collective(e, e.p2p_seq_id, ranks, now_ns) for e in entries[-KEPT:] if e.is_p2p and not _over(e)
        ),
    )


def _over(entry: _Entry) -> bool:
    return entry.state == "completed" or entry.retired


def _collective(entry: _Entry, number: int, ranks: Sequence[int], now_ns: int) -> Collective:
    words = entry.profiling_name.partition(":")[2] or entry.profiling_name
    op, peer = words, None
    if match := _PEERS.match(words):
        op, at = match[1], int(match[3])
        peer = Rank(ranks[at]) if at < len(ranks) else None
    dtype: Any = entry.input_dtypes[0] if entry.input_dtypes else ""
    return Collective(
        sequence=number,
        op=_NAMES.get(op, op),
        elements=sum(_product(sizes) for sizes in entry.input_sizes),
        dtype=_DTYPES.get(dtype, str(dtype).lower()),
        peer=peer,
        age_s=round(max(0, now_ns - entry.time_created_ns) / 1e9, 3),
    )


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found
