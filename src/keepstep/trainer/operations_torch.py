"""Operations: what SwapGroup has to know of each of c10d's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from keepstep.model.flight import DTYPES, OPS

_DTYPES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): number << 8 for number, name in enumerate(DTYPES) if hasattr(torch, name)
}
_Tensor: Final = torch.Tensor
_OTHER: Final = DTYPES.index("other") << 8


class Operation:
    """One of them.

    Attributes:
        backend: its name in the backend.
        op: its number in ``model.flight.OPS``.
        reduces: it adds up what all members give.
        sliced: may be waited for in slices. gloo's reduce-scatter does not keep the time-out of a wait, and its point
            to point breaks on one.
        tensor: which argument holds what this rank gives; -1 where nothing is given.
        peer: which argument names the other rank of a message; 0 where there is none.
        message: between two members and not all.
    """

    __slots__ = ("backend", "message", "op", "peer", "reduces", "sliced", "tensor")

    def __init__(
        self, backend: str, op: str, tensor: int, *, reduces: bool = False, sliced: bool = True, peer: int = 0
    ) -> None:
        self.backend, self.op, self.tensor, self.peer = backend, OPS.index(op), tensor, peer
        self.reduces, self.sliced = reduces, sliced
        self.message = op in ("send", "recv", "recv_anysource")


def describe(kind: Operation, args: Sequence[Any], ranks: Sequence[int]) -> tuple[int, int]:
    """Kind and elements of one call, as ``Track.launch`` takes them. Never raises: a wrong call is the backend's."""
    try:
        if kind.tensor < 0:
            return kind.op, 0
        given = args[kind.tensor]
        if given.__class__ is list and len(given) == 1:
            given = given[0]
        if given.__class__ is _Tensor:  # the way of almost all calls
            elements, dtype = given.numel(), _DTYPES.get(given.dtype, _OTHER)
        else:
            elements, dtype = _count(given if given.__class__ is list else [given])
        if kind.peer:
            return kind.op | dtype | ranks[args[kind.peer]] + 1 << 16, elements
        return kind.op | dtype, elements
    except (IndexError, TypeError, AttributeError):
        return kind.op, 0


def _count(given: Any) -> tuple[int, int]:
    """Elements in sum, and the type of the first, of lists of tensors however deep."""
    while len(given) == 1 and not isinstance(given[0], torch.Tensor):
        given = given[0]
    first = given[0]
    if isinstance(first, torch.Tensor):
        elements = first.numel() if len(given) == 1 else sum([one.numel() for one in given])
        return elements, _DTYPES.get(first.dtype, _OTHER)
    counted = [_count(one) for one in given]
    return sum([elements for elements, _ in counted]), counted[0][1]


_ALL_REDUCE_COALESCED: Final = Operation("allreduce_coalesced", "all_reduce_coalesced", 0, reduces=True)
_REDUCE_SCATTER: Final = Operation("_reduce_scatter_base", "reduce_scatter_tensor", 1, reduces=True, sliced=False)
_REDUCE_SCATTERS: Final = Operation(
    "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced", 1, reduces=True, sliced=False
)
_ALL_GATHER: Final = Operation("_allgather_base", "all_gather_into_tensor", 1)
_ALL_GATHERS: Final = Operation("allgather_into_tensor_coalesced", "all_gather_into_tensor_coalesced", 1)
_ALL_TO_ALL: Final = Operation("alltoall_base", "all_to_all_single", 1)

OPERATIONS: Final[dict[str, Operation]] = {
    "allreduce": Operation("allreduce", "all_reduce", 0, reduces=True),
    "allreduce_coalesced": _ALL_REDUCE_COALESCED,
    "reduce": Operation("reduce", "reduce", 0, reduces=True),
    "reduce_scatter": Operation("reduce_scatter", "reduce_scatter", 1, reduces=True, sliced=False),
    "reduce_scatter_single": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTERS,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTERS,
    "broadcast": Operation("broadcast", "broadcast", 0),
    "allgather": Operation("allgather", "all_gather", 1),
    "allgather_coalesced": Operation("allgather_coalesced", "all_gather_coalesced", 1),
    "all_gather_single": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHERS,
    "allgather_into_tensor_coalesced": _ALL_GATHERS,
    "gather": Operation("gather", "gather", 1),
    "scatter": Operation("scatter", "scatter", 0),
    "alltoall": Operation("alltoall", "all_to_all", 1),
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "barrier": Operation("barrier", "barrier", -1),
    "send": Operation("send", "send", 0, sliced=False, peer=1),
    "recv": Operation("recv", "recv", 0, sliced=False, peer=1),
    "recv_anysource": Operation("recv_anysource", "recv_anysource", 0, sliced=False),
}
"""By their names in ProcessGroup."""
