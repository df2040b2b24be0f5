"""All process groups of this process: made in one place, ended at once, built anew inside the same objects.

This is what lets survivors keep their processes. Every group that torch makes (world, ``new_group``, each dimension
of a DeviceMesh) comes through one factory here. ``abort`` frees whoever waits in a collective, from any thread;
``rebuild`` connects the members of the next epoch and puts the new communication into the living ProcessGroup
objects. Decided in docs/decisions/0002.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Literal

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from keepstep.model.topology import fold_ranks
from keepstep.trainer.circuit_torch import Circuit, discard
from keepstep.trainer.errand import Errand
from keepstep.trainer.exceptions import GroupsAborted, GroupsUnsupported, RebuildFailed, RebuildTimeout
from keepstep.trainer.flight import Flight
from keepstep.trainer.gloo_torch import gloo_device
from keepstep.trainer.meeting_torch import Built, Meeting, flat
from keepstep.trainer.meter import Meter
from keepstep.trainer.scrapyard import Scrapyard
from keepstep.trainer.seats_torch import DirectSeat, Nccl, Seat, SwapSeat, Wire
from keepstep.trainer.swap_torch import BACKEND, SwapGroup

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
SETTLE_S: Final = 0.25
"""How long a rebuild waits for operations of the old epoch to end."""


class Groups:
    """The process groups of this process; one object per process (``GROUPS``)."""

    def __init__(self, *, nccl: Nccl | None = None) -> None:
        self._meter = Meter()
        self._nccl = nccl or Nccl()
        self._bell = threading.Condition()
        self._seats: dict[str, Seat] = {}
        self._device: Literal["cpu", "cuda"] = "cpu"
        self._timeout = DEFAULT_TIMEOUT
        self._wire: Wire | None = None
        self._meeting: Meeting | None = None
        self._world_size = 0
        self._stand_in = False
        self._why: str | None = None
        self._aborts = 0
        self._scrapyard = Scrapyard()

    # ------------------------------------------------------------------ state

    @property
    def aborted(self) -> bool:
        """True from ``abort`` until the next successful ``rebuild``."""
        return self._why is not None

    @property
    def aborts(self) -> int:
        """How often ``abort`` was called; hand it to ``rebuild`` to be safe from an abort just before it."""
        return self._aborts

    @property
    def broken(self) -> str | None:
        """The first error that a collective met since the last rebuild."""
        return self._meter.broken

    @property
    def stand_in(self) -> bool:
        """True while nobody else takes part."""
        return self._stand_in

    @property
    def started(self) -> int:
        return self._meter.started

    @property
    def finished(self) -> int:
        return self._meter.finished

    @property
    def on_progress(self) -> Callable[[int, int], None] | None:
        """Called with (started, finished) at each start and end of a collective, on whatever thread that is."""
        return self._meter.on_progress

    @on_progress.setter
    def on_progress(self, hook: Callable[[int, int], None] | None) -> None:
        self._meter.on_progress = hook

    def members(self) -> dict[str, tuple[int, ...]]:
        """Ranks in the world of each group, by its name."""
        return {name: tuple(seat.ranks) for name, seat in list(self._seats.items())}

    def tell_positions(self, flight: Flight) -> None:
        """Where each group stands is written there from now on; before the first group is made."""
        self._meter.flight = flight

    @property
    def before_reduce(self) -> Callable[[], None] | None:
        """Called once per ``mark()``, before the first reduction after it, on the thread that launches it."""
        return self._meter.before_reduce

    @before_reduce.setter
    def before_reduce(self, hook: Callable[[], None] | None) -> None:
        self._meter.before_reduce = hook

    def mark(self) -> None:
        """A new step begins."""
        self._meter.mark()

    def world_ops_since_mark(self) -> int:
        """Reductions over all ranks launched since ``mark`` (always 0 on CUDA, where nothing of ours counts)."""
        return self._meter.world_ops

    def leftovers(self) -> dict[str, int]:
        """What past aborts have left behind: backends kept for ever and threads still stuck in native code."""
        yard = self._scrapyard
        return {"parked": yard.parked, "scrapping": yard.busy(), "abandoned": Errand.abandoned()}

    # ------------------------------------------------------------------ life

    @staticmethod
    def prepare() -> None:
        """Find this host's address, which may take time: for a parked standby. ``start`` does it too."""
        gloo_device()

    def start(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        key: str,
        stand_in: bool,
        device: Literal["cpu", "cuda"] = "cpu",
        timeout: timedelta | None = None,
    ) -> None:
        """``init_process_group`` with our backend.

        Args:
            store: where the members of this epoch meet; not needed for a stand-in.
            key: prefix in the store that no other epoch uses.
            stand_in: nobody else takes part until ``rebuild``.
            timeout: of collectives; torch's default where None.

        Raises:
            GroupsUnsupported: torch.distributed has been initialised by somebody else.
            GroupsAborted: ``abort`` was called meanwhile.
            RebuildTimeout: not all members came within ``timeout``.
        """
        if dist.is_initialized():
            raise GroupsUnsupported(
                "torch.distributed is already initialised; call keepstep.init() instead of init_process_group()"
            )
        if store is None:
            if not stand_in:
                raise ValueError("store may only be None for a stand-in")
            store = HashStore()
        self._seats.clear()
        self._device = device
        self._timeout = timeout or DEFAULT_TIMEOUT
        self._world_size = world_size
        self._stand_in = stand_in
        self._why = None
        self._meter.broken = None
        base = PrefixStore(key, store)
        wire = Wire(store=base, gloo_device=gloo_device(), limit_s=self._timeout.total_seconds())
        self._wire = None if stand_in else wire
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, store=base, rank=rank, world_size=world_size, timeout=self._timeout)

    def abort(self, why: str) -> None:
        """End all communication of the present epoch: whoever waits in a collective gets an error at once.

        From any thread, as often as you like; does not block and needs nobody's help. A stand-in has nothing to
        abort, but a ``rebuild`` under way ends with ``GroupsAborted``.
        """
        with self._bell:
            self._aborts += 1
            meeting = self._meeting
            if not self._stand_in and self._why is None:
                self._why = why
            self._bell.notify_all()
        if not self._stand_in:
            for seat in list(self._seats.values()):
                for circuit in seat.circuits():
                    circuit.cut(why)
        if meeting is not None:
            meeting.interrupt()

    def clear(self) -> None:
        """Forget the first error seen (after a fault that needed no rebuild)."""
        self._meter.broken = None

    def rebuild(
        self,
        *,
        store_host: str,
        store_port: int,
        key: str,
        rank: int,
        world_size: int,
        limit_s: float,
        aborts: int | None = None,
    ) -> dict[str, float]:
        """Connect the members of a new epoch and use that from now on, inside the same ProcessGroup objects.

        Args:
            key: prefix in the store that no other epoch, and no earlier attempt of this process, has used.
            limit_s: how long members may take to come.
            aborts: the value of ``aborts`` read before the epoch was chosen; an abort since then ends this at once.
                Whoever announces an epoch calls ``abort`` first and publishes the epoch second.

        Returns:
            Milliseconds per phase: ``settle``, ``store``, each group by name, ``total``.

        Raises:
            GroupsAborted: ``abort`` was called meanwhile; build again for the newest epoch.
            RebuildTimeout: somebody did not come within the limit; the message says who.
            RebuildFailed: somebody went away while connecting, or the store does not answer.
            GroupsUnsupported: the groups of this process cannot be rebuilt.
        """
        began = time.monotonic()
        seen = self._aborts if aborts is None else aborts
        self._check_rebuildable(rank, world_size)
        if self._aborts != seen:  # before anything of this epoch is touched
            raise GroupsAborted(f"communicators for {key} are not built: a newer abort has made them pointless")
        if not self._stand_in and self._why is None:
            self.abort("rebuild")
            seen += 1
        settle_ms = self._settle()
        meeting = Meeting(
            store_host,
            store_port,
            key=key,
            rank=rank,
            world_size=world_size,
            limit_s=limit_s,
            seats=list(self._seats.values()),
            stopped=lambda: self._aborts != seen,
        )
        wire, built = self._meet(meeting, seen)
        self._install(meeting, wire, built, seen)
        return {"settle": settle_ms, **meeting.phases, "total": (time.monotonic() - began) * 1e3}

    # ------------------------------------------------------------------ making groups

    def _create(self, options: Any, _pg_options: Any) -> dist.ProcessGroup:
        """The factory that torch calls for each new group."""
        ranks: Sequence[int] = list(options.global_ranks_in_group) or range(options.group_size)
        name = str(options.group_id)
        seat: Seat
        if self._device == "cuda":
            seat = DirectSeat(
                name, options.group_rank, ranks, timeout=options.timeout, meter=self._meter, nccl=self._nccl
            )
        else:
            world = len(ranks) == self._world_size
            seat = SwapSeat(name, options.group_rank, ranks, world=world, timeout=options.timeout, meter=self._meter)
            assert isinstance(seat.group, SwapGroup)
            seat.group.on_shutdown = lambda _: self._forget(name)
        circuits = seat.stand_in() if self._stand_in else self._connect_one(seat)
        with self._bell:
            seat.install(circuits)
            self._seats[name] = seat
            why = self._why
        if why is not None:  # aborted between connecting and here: `abort` has not seen this group
            for circuit in circuits:
                circuit.cut(why)
        return seat.group

    def _connect_one(self, seat: Seat) -> list[Circuit]:
        wire, seen = self._wire, self._aborts
        assert wire is not None
        if self._why is not None:
            raise GroupsAborted(f"group {seat.name} cannot be made: communication was aborted ({self._why})")
        errand = Errand(lambda: seat.connect(wire), bell=self._bell, discard=discard)
        if not errand.wait(limit_s=wire.limit_s, stop=lambda: self._aborts != seen):
            if self._aborts != seen:
                raise GroupsAborted(f"making group {seat.name} was ended by an abort")
            raise RebuildTimeout(
                f"group {seat.name} of ranks {fold_ranks(seat.ranks)} did not come together within {wire.limit_s:g} s"
            )
        return errand.result()

    def _forget(self, name: str) -> None:
        """The group has been destroyed by its user."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        for circuit in seat.circuits():
            if circuit.cut_because is None:
                circuit.drop()
            else:
                self._scrapyard.take([circuit])
        self._meter.flight.forget(name)
        if isinstance(seat.group, SwapGroup):
            seat.group.circuit = None

    # ------------------------------------------------------------------ rebuilding

    def _check_rebuildable(self, rank: int, world_size: int) -> None:
        if not dist.is_initialized() or not self._seats:
            raise GroupsUnsupported("there are no groups to rebuild: torch.distributed is not initialised")
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise GroupsUnsupported(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} and cannot become rank {rank} of "
                f"{world_size}; a survivor keeps its rank"
            )
        foreign = [name for group, name in c10d._world.pg_names.items() if str(name) not in self._seats]
        if foreign:
            raise GroupsUnsupported(
                f"process groups {foreign} were made with another backend and cannot be rebuilt in process; "
                "leave out backend= in new_group()"
            )

    def _settle(self) -> float:
        """Wait, briefly, until nothing of the old epoch can write into tensors any more; returns milliseconds."""
        began = time.monotonic()
        for seat in self._seats.values():
            for circuit in seat.circuits():
                if circuit.cut_because is not None:
                    circuit.settle(max(0.0, SETTLE_S - (time.monotonic() - began)))
        return (time.monotonic() - began) * 1e3

    def _meet(self, meeting: Meeting, seen: int) -> tuple[Wire, Built]:
        """Have ``meeting`` connect on another thread, for as long as that makes sense."""
        with self._bell:
            self._meeting = meeting
        try:
            errand = Errand(meeting.connect, bell=self._bell, discard=lambda result: discard(flat(result[1])))
            if not errand.wait(limit_s=meeting.limit_s, stop=lambda: self._aborts != seen):
                meeting.interrupt()
                meeting.check()
                raise RebuildTimeout(meeting.why_not())
        finally:
            with self._bell:
                self._meeting = None
        try:
            return errand.result()
        except GroupsAborted:
            raise
        except RuntimeError as error:
            meeting.check()
            raise RebuildFailed(
                f"communicators for {meeting.key} could not be built over the store at {meeting.host}:{meeting.port}: "
                f"{error}"
            ) from error

    def _install(self, meeting: Meeting, wire: Wire, built: Built, seen: int) -> None:
        with self._bell:
            if self._aborts != seen:
                threading.Thread(target=discard, args=(flat(built),), name="ks-discard", daemon=True).start()
                meeting.check()
            old: list[Circuit] = []
            for name, circuits in built.items():
                old += self._seats[name].install(circuits)
            self._wire = wire
            self._stand_in = False
            self._why = None
            self._meter.broken = None
        for group in list(c10d._world.pg_map):
            backend, _ = c10d._world.pg_map[group]
            name = c10d._world.pg_names[group]
            prefix = wire.store if group is dist.group.WORLD else PrefixStore(f"{name}/", wire.store)
            c10d._world.pg_map[group] = (backend, prefix)
        self._scrapyard.take(c for c in old if c.cut_because is not None)


GROUPS: Final = Groups()
"""The one object of this process."""
