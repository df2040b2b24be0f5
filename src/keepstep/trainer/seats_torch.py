"""Seats: one per process group of this process. A seat knows its members and how to get new communication.

On CPU the group is a ``SwapGroup``: gloo cannot be aborted, so every collective passes through our hands. On CUDA
the group is torch's own ProcessGroup object, and new backends are registered inside it: NCCL can really be
aborted, so nothing needs to stand on the hot path. The NCCL side is exercised by tests through a double only; it
has not run on GPUs in this project's own checks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from msgspec import Struct
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from keepstep.trainer.circuit_torch import Circuit
from keepstep.trainer.exceptions import GroupsUnsupported
from keepstep.trainer.gloo_torch import connect_gloo
from keepstep.trainer.meter import Meter
from keepstep.trainer.standin_torch import StandIn
from keepstep.trainer.swap_torch import SwapGroup

_FIRST_TYPE: Final = 32
_LAST_TYPE: Final = 250
"""c10d keeps one backend per 8-bit type and never forgets one, so each generation takes two fresh numbers."""


class Wire(Struct, frozen=True, kw_only=True):
    """What one generation of communication is built from."""

    store: Store
    gloo_device: Any
    limit_s: float


class Seat(Protocol):
    """This process's place in one group."""

    name: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    def connect(self, wire: Wire) -> list[Circuit]:
        """Build new communication; blocks until all members are there."""
        ...

    def stand_in(self) -> list[Circuit]:
        """Communication that needs nobody."""
        ...

    def install(self, circuits: list[Circuit]) -> list[Circuit]:
        """Use new communication from now on; returns what was in use."""
        ...

    def circuits(self) -> list[Circuit]:
        """What is in use."""
        ...


class SwapSeat:
    """A group on CPU."""

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], *, world: bool, timeout: timedelta, meter: Meter
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._rank = rank
        self._timeout = timeout
        self._meter = meter
        self._swap = SwapGroup(name, rank, self.ranks, world=world, meter=meter)
        self.group: dist.ProcessGroup = self._swap

    def connect(self, wire: Wire) -> list[Circuit]:
        store = PrefixStore(self.name, wire.store)
        backend, connections = connect_gloo(
            store,
            self._rank,
            len(self.ranks),
            device=wire.gloo_device,
            limit_s=wire.limit_s,
            timeout=self._timeout,
        )
        return [Circuit(self.name, backend, self._meter, connections)]

    def stand_in(self) -> list[Circuit]:
        return [Circuit(self.name, StandIn(self._rank, len(self.ranks)), self._meter)]

    def install(self, circuits: list[Circuit]) -> list[Circuit]:
        old = self._swap.swap(circuits[0])
        return [] if old is None else [old]

    def circuits(self) -> list[Circuit]:
        return [] if self._swap.circuit is None else [self._swap.circuit]


class Nccl:
    """Makes and aborts NCCL backends; the seam through which tests put a double."""

    def make(self, store: Store, rank: int, ranks: Sequence[int], *, name: str, timeout: timedelta) -> Any:
        from torch.distributed import ProcessGroupNCCL
        from torch.distributed.distributed_c10d import GroupName

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = GroupName(name)
        backend = ProcessGroupNCCL(store, rank, len(ranks), options)
        backend._set_sequence_number_for_group()
        return backend

    def abort(self, backend: Any) -> None:
        backend.abort()


class NcclCircuit(Circuit):
    """NCCL in use. Aborting may take as long as NCCL's own clean-up, so it has a thread of its own."""

    def __init__(self, name: str, backend: Any, meter: Meter, nccl: Nccl) -> None:
        super().__init__(name, backend, meter)
        self._nccl = nccl

    def cut(self, why: str) -> None:
        backend = self.backend
        first = self.cut_because is None
        super().cut(why)
        if first and backend is not None:
            abort = threading.Thread(
                target=self._nccl.abort, args=(backend,), name=f"ks-abort-{self.name}", daemon=True
            )
            abort.start()


class DirectSeat:
    """A group on CUDA: gloo for CPU tensors and NCCL for CUDA tensors inside torch's own ProcessGroup."""

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], *, timeout: timedelta, meter: Meter, nccl: Nccl
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._rank = rank
        self._timeout = timeout
        self._meter = meter
        self._nccl = nccl
        self._circuits: list[Circuit] = []
        self._next_type = _FIRST_TYPE
        self.group = dist.ProcessGroup(PrefixStore(name, HashStore()), rank, len(ranks))
        self.group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)

    def connect(self, wire: Wire) -> list[Circuit]:
        store = PrefixStore(self.name, wire.store)
        gloo, connections = connect_gloo(
            PrefixStore("cpu", store),
            self._rank,
            len(self.ranks),
            device=wire.gloo_device,
            limit_s=wire.limit_s,
            timeout=self._timeout,
        )
        nccl = self._nccl.make(
            PrefixStore("cuda", store), self._rank, self.ranks, name=self.name, timeout=self._timeout
        )
        return [
            Circuit(self.name, gloo.gloo, self._meter, connections),
            NcclCircuit(self.name, nccl, self._meter, self._nccl),
        ]

    def stand_in(self) -> list[Circuit]:
        from torch._C._distributed_c10d import FakeProcessGroup

        fakes = [FakeProcessGroup._create_internal(self._rank, len(self.ranks)) for _ in range(2)]
        return [Circuit(self.name, fake, self._meter) for fake in fakes]

    def install(self, circuits: list[Circuit]) -> list[Circuit]:
        kinds = dist.ProcessGroup.BackendType
        if not self._circuits:
            types = [kinds.GLOO, kinds.NCCL]  # torch asks the first ones for their names
        elif self._next_type + 2 > _LAST_TYPE:
            raise GroupsUnsupported(
                f"process group {self.name} has been rebuilt {(self._next_type - _FIRST_TYPE) // 2} times, which is "
                "as often as torch allows in one process; the processes have to be restarted"
            )
        else:
            types = [kinds(self._next_type), kinds(self._next_type + 1)]
            self._next_type += 2
        for device, kind, circuit in zip(("cpu", "cuda"), types, circuits, strict=True):
            self.group._register_backend(torch.device(device), kind, circuit.backend)
        old, self._circuits = self._circuits, circuits
        return old

    def circuits(self) -> list[Circuit]:
        return list(self._circuits)
