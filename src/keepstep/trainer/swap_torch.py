"""A ProcessGroup whose inside can be replaced while everybody who holds it keeps holding it.

DDP's reducer, FSDP2's mesh, DeviceMesh, DTensor and user code keep references to ProcessGroup objects. After a
fault these objects stay and get a new circuit. See docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from keepstep.trainer.circuit_torch import Circuit, CircuitWork
from keepstep.trainer.flight import Track
from keepstep.trainer.meter import Meter
from keepstep.trainer.operations_torch import OPERATIONS, Operation, describe

BACKEND = "keepstep"
"""The name under which the backend is registered with torch.distributed."""


class SwapGroup(dist.ProcessGroup):
    """All collectives of c10d, each launched on the present circuit."""

    def __init__(self, name: str, rank: int, ranks: Sequence[int], *, world: bool, meter: Meter) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.key = name
        self._desc = ""
        self._ranks = tuple(ranks)
        self._spans_world = world
        self._meter = meter
        self._track = meter.flight.track(name, self._ranks)
        self._messages: Track | None = None
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
        """Put a new circuit in; returns the old one. All members count their operations from one again."""
        old, self.circuit = self.circuit, circuit
        self._track = self._meter.flight.track(self.key, self._ranks)
        if self._messages is not None:
            self._messages = self._meter.flight.track(self.key, self._ranks, messages=True)
        return old

    def abort(self) -> None:
        if self.circuit is not None:
            self.circuit.cut("ProcessGroup.abort() was called")

    def shutdown(self) -> None:
        if self.on_shutdown is not None:
            self.on_shutdown(self)

    # ------------------------------------------------------------------ launch

    def _launch(self, kind: Operation, args: Any, kwargs: Any) -> Any:
        circuit = self.circuit
        if circuit is None:
            raise RuntimeError(f"process group {self.key} has been destroyed")
        circuit.check()
        self._meter.launch(reduces=kind.reduces, world=self._spans_world)
        track = self._message_track() if kind.message else self._track
        number = track.launch(*describe(kind, args, self._ranks))
        try:
            work = getattr(circuit.backend, kind.backend)(*args, **kwargs)
        except Exception as error:
            # It stays unfinished in the flight memory: this is the operation at which the rank broke.
            self._meter.finish()
            if circuit.cut_because is not None:
                raise circuit.error() from error
            if isinstance(error, RuntimeError):
                self._meter.breaks(error)
            raise
        return CircuitWork(circuit, work, sliced=kind.sliced, landed=(track, number))

    def _message_track(self) -> Track:
        if self._messages is None:
            self._messages = self._meter.flight.track(self.key, self._ranks, messages=True)
        return self._messages


def _operation(name: str, kind: Operation) -> Callable[..., Any]:
    def run(self: SwapGroup, *args: Any, **kwargs: Any) -> Any:
        return self._launch(kind, args, kwargs)

    run.__name__ = name
    return run


for _name, _kind in OPERATIONS.items():
    setattr(SwapGroup, _name, _operation(_kind.backend, _kind))
