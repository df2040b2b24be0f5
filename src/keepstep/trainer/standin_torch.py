"""A stand-in for a communicator: every collective succeeds at once and nobody else takes part.

A newcomer runs the script's set-up with it (model, DDP constructor, DeviceMesh, ``fully_shard``) while the
survivors wait for nobody. What it computes is thrown away: the rank's real state is restored afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.futures import Future

from keepstep.trainer.exceptions import GroupsUnsupported

_NEEDS_OTHERS: Final = frozenset({"broadcast_object_list", "scatter_object_list", "recv_object_list"})
_FRAMES_TO_LOOK_AT = 12


class DoneWork(dist.Work):
    """The handle of a collective that is already complete."""

    def __init__(self, result: Any, source: int = 0) -> None:
        super().__init__()
        self._result = result
        self._source = source

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def result(self) -> Any:
        return self._result

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class StandIn:
    """Has the operations of a c10d backend for one rank of ``size``; reductions are the identity."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    # Operations that leave this rank's own tensors as they are.

    def allreduce(self, tensors: Sequence[Tensor], opts: object = None) -> DoneWork:
        return DoneWork(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: object = None) -> DoneWork:
        return DoneWork(list(tensors))

    def reduce(self, tensors: Sequence[Tensor], opts: object = None) -> DoneWork:
        return DoneWork(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> DoneWork:
        if opts is None or opts.rootRank != self._rank:
            _refuse_objects()
        return DoneWork(list(tensors))

    def barrier(self, opts: object = None) -> DoneWork:
        return DoneWork([])

    # Operations that give others' tensors: this rank's own stands for all.

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object = None) -> DoneWork:
        with torch.no_grad():
            for slots, own in zip(outputs, inputs, strict=True):
                for slot in slots:
                    slot.copy_(own)
        return DoneWork([list(slots) for slots in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object = None
    ) -> DoneWork:
        with torch.no_grad():
            for of_rank in outputs:
                for slot, own in zip(of_rank, inputs, strict=True):
                    slot.copy_(own)
        return DoneWork([list(of_rank) for of_rank in outputs])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: object = None) -> DoneWork:
        with torch.no_grad():
            # FSDP2 gives a view into the output as input.
            output.view(self._size, -1).copy_(own.clone().view(1, -1))
        return DoneWork([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: object = None
    ) -> DoneWork:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return DoneWork(list(outputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object = None) -> DoneWork:
        if not outputs:
            return DoneWork([])
        return self.allgather(outputs, inputs)

    # Operations that leave a part to each rank: this rank keeps its own.

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: object = None
    ) -> DoneWork:
        with torch.no_grad():
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])
        return DoneWork(list(outputs))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: object = None) -> DoneWork:
        with torch.no_grad():
            output.copy_(whole.reshape(self._size, -1)[self._rank].clone().view_as(output))
        return DoneWork([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: object = None
    ) -> DoneWork:
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole)
        return DoneWork(list(outputs))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: object = None) -> DoneWork:
        _refuse_objects()
        if inputs:
            return self.reduce_scatter(outputs, inputs)
        return self._nothing_came(outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: object = None) -> DoneWork:
        done = self._nothing_came(outputs)
        with torch.no_grad():
            outputs[self._rank].copy_(inputs[self._rank])
        return done

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: object = None,
    ) -> DoneWork:
        done = self._nothing_came([output])
        out_parts = torch.split(output, list(output_splits) or output.size(0) // self._size)
        in_parts = torch.split(whole, list(input_splits) or whole.size(0) // self._size)
        with torch.no_grad():
            out_parts[self._rank].copy_(in_parts[self._rank])
        return done

    # Point to point: what is sent goes nowhere, what is received is zero.

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> DoneWork:
        return DoneWork(list(tensors))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> DoneWork:
        _refuse_objects()
        return self._nothing_came(tensors, source)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> DoneWork:
        return self._nothing_came(tensors)

    def _nothing_came(self, tensors: Sequence[Tensor], source: int = 0) -> DoneWork:
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
        return DoneWork(list(tensors), source)

    # Names of older torch versions for the same operations.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _refuse_objects() -> None:
    """Receiving a Python object from nobody would read uninitialised memory as a pickle: say so instead."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame is None:
            return
        if frame.f_code.co_name in _NEEDS_OTHERS:
            raise GroupsUnsupported(
                f"torch.distributed.{frame.f_code.co_name} was called while this process sets up as a replacement "
                "for a lost rank, when no other rank takes part; compute the object on every rank, or exchange it "
                "inside the training loop"
            )
        frame = frame.f_back
