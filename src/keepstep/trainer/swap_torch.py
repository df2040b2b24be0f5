"""A ProcessGroup whose inside can be replaced while everybody who holds it keeps holding it.

DDP's reducer, FSDP2's mesh, DeviceMesh, DTensor and user code keep references to ProcessGroup objects. After a
fault these objects stay and get a new circuit. See docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from keepstep.trainer.circuit_torch import Circuit, CircuitWork
from keepstep.trainer.meter import Meter

BACKEND = "keepstep"
"""The name under which the backend is registered with torch.distributed."""


class SwapGroup(dist.ProcessGroup):
    """All collectives of c10d, each launched on the present circuit."""

    def __init__(self, name: str, rank: int, size: int, *, world: bool, meter: Meter) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.key = name
        self._desc = ""
        self._spans_world = world
        self._meter = meter
        self.circuit: Circuit | None = None
        self.on_shutdown: Callable[[SwapGroup], None] | None = None
        # Lets torch know which devices this group serves; operations never reach the C++ dispatcher.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, None)

    # c10d keeps a group's name and description in its C++ backends, of which there are none here.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self.key

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self.key = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.key

    @property
    def group_desc(self) -> str:
        return self._desc

    # ------------------------------------------------------------------ life

    def swap(self, circuit: Circuit) -> Circuit | None:
        """Put a new circuit in; returns the old one."""
        old, self.circuit = self.circuit, circuit
        return old

    def abort(self) -> None:
        if self.circuit is not None:
            self.circuit.cut("ProcessGroup.abort() was called")

    def shutdown(self) -> None:
        if self.on_shutdown is not None:
            self.on_shutdown(self)

    # ------------------------------------------------------------------ launch

    def _launch(self, operation: str, reduces: bool, sliced: bool, args: Any, kwargs: Any) -> Any:
        circuit = self.circuit
        if circuit is None:
            raise RuntimeError(f"process group {self.key} has been destroyed")
        circuit.check()
        self._meter.launch(reduces=reduces, world=self._spans_world)
        try:
            work = getattr(circuit.backend, operation)(*args, **kwargs)
        except Exception as error:
            self._meter.finish()
            if circuit.cut_because is not None:
                raise circuit.error() from error
            if isinstance(error, RuntimeError):
                self._meter.breaks(error)
            raise
        return CircuitWork(circuit, work, sliced=sliced)


def _operation(name: str, *, reduces: bool = False, sliced: bool = True) -> Callable[..., Any]:
    def run(self: SwapGroup, *args: Any, **kwargs: Any) -> Any:
        return self._launch(name, reduces, sliced, args, kwargs)

    run.__name__ = name
    return run


_OPERATIONS: dict[str, tuple[str, bool, bool]] = {
    # name in ProcessGroup: (name in the backend, reduces, may be waited for in slices)
    # Not in slices: gloo's reduce-scatter does not keep the time-out of a wait, and its point to point breaks on one.
    "allreduce": ("allreduce", True, True),
    "allreduce_coalesced": ("allreduce_coalesced", True, True),
    "reduce": ("reduce", True, True),
    "reduce_scatter": ("reduce_scatter", True, False),
    "reduce_scatter_single": ("_reduce_scatter_base", True, False),
    "_reduce_scatter_base": ("_reduce_scatter_base", True, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", True, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", True, False),
    "broadcast": ("broadcast", False, True),
    "allgather": ("allgather", False, True),
    "allgather_coalesced": ("allgather_coalesced", False, True),
    "all_gather_single": ("_allgather_base", False, True),
    "_allgather_base": ("_allgather_base", False, True),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced", False, True),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced", False, True),
    "gather": ("gather", False, True),
    "scatter": ("scatter", False, True),
    "alltoall": ("alltoall", False, True),
    "all_to_all_single": ("alltoall_base", False, True),
    "alltoall_base": ("alltoall_base", False, True),
    "barrier": ("barrier", False, True),
    "send": ("send", False, False),
    "recv": ("recv", False, False),
    "recv_anysource": ("recv_anysource", False, False),
}
for _name, (_inner, _reduces, _sliced) in _OPERATIONS.items():
    setattr(SwapGroup, _name, _operation(_inner, reduces=_reduces, sliced=_sliced))
