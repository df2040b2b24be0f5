"""One attempt to bring the members of an epoch together over its store.

It blocks in native code, so it runs on an errand thread; ``interrupt`` makes the store's client return. Each rank
leaves the names of its groups in the store: when the members do not come together, that tells why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from torch._C._distributed_c10d import PrefixStore

from keepstep.model.topology import fold_ranks
from keepstep.trainer.circuit_torch import Circuit, discard
from keepstep.trainer.errand import Errand
from keepstep.trainer.exceptions import GroupsAborted
from keepstep.trainer.gloo_torch import gloo_device
from keepstep.trainer.seats_torch import Seat, Wire
from keepstep.trainer.sockets import Handle, connected, has_peer_port, open_sockets, shut_down
from keepstep.trainer.store_torch import dial

ASK_WHY_S: Final = 2.0
"""How long a meeting that has failed asks the store for the reason."""

Built = dict[str, list[Circuit]]
"""New communication by name of the group."""


class Meeting:
    """Where and with whom to connect.

    Args:
        key: prefix in the store that no other attempt uses.
        seats: the groups of this process, in the order in which all ranks have made them.
        stopped: whether a newer epoch has made this attempt pointless.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        key: str,
        rank: int,
        world_size: int,
        limit_s: float,
        seats: Sequence[Seat],
        stopped: Callable[[], bool],
    ) -> None:
        self.host, self.port, self.key = host, port, key
        self.limit_s = limit_s
        self.phases: dict[str, float] = {}
        self._rank, self._world_size = rank, world_size
        self._seats = seats
        self._stopped = stopped
        self._lines: tuple[Handle, ...] = ()

    def connect(self) -> tuple[Wire, Built]:
        """Connect to all members of all groups; blocks until they are there.

        Raises:
            GroupsAborted: stopped.
            RuntimeError: somebody did not come in time or went away, or the store is gone.
        """
        began = time.monotonic()
        before = open_sockets()
        client = dial(self.host, self.port, limit_s=self.limit_s)
        self._lines = connected(open_sockets() - before, has_peer_port(self.port))
        self.check()  # after `_lines` is set: whoever stops it from here on also interrupts it
        store = PrefixStore(self.key, client)
        store.set(f"here/{self._rank}", " ".join(seat.name for seat in self._seats))
        wire = Wire(store=store, gloo_device=gloo_device(), limit_s=self.limit_s)
        self.phases["store"] = (time.monotonic() - began) * 1e3
        built: Built = {}
        try:
            for seat in self._seats:
                self.check()
                t = time.monotonic()
                built[seat.name] = seat.connect(wire)
                self.phases[seat.name] = (time.monotonic() - t) * 1e3
        except BaseException:
            discard(flat(built))
            raise
        return wire, built

    def check(self) -> None:
        if self._stopped():
            raise GroupsAborted(f"building communicators for {self.key} was ended by a newer abort")

    def interrupt(self) -> None:
        """Make ``connect`` return soon, with an error; from any thread."""
        lines, self._lines = self._lines, ()
        shut_down(lines)

    def why_not(self) -> str:
        """A sentence on why the members did not come together."""
        errand = Errand(self._groups_of_ranks, bell=threading.Condition(), discard=lambda _: None)
        why = "the store does not answer"
        if errand.wait(limit_s=ASK_WHY_S, stop=lambda: False):
            try:
                why = self._difference(errand.result())
            except RuntimeError as error:
                why = f"the store does not answer ({error})"
        return f"communicators for {self.key} did not come together within {self.limit_s:g} s: {why}"

    def _groups_of_ranks(self) -> list[set[str] | None]:
        """The names of the groups that each rank has, ``None`` for a rank that has not come."""
        store = PrefixStore(self.key, dial(self.host, self.port, limit_s=ASK_WHY_S))
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        return [set(store.get(k).decode().split()) if store.check([k]) else None for k in keys]

    def _difference(self, there: list[set[str] | None]) -> str:
        missing = [rank for rank, names in enumerate(there) if names is None]
        if missing:
            return f"ranks {fold_ranks(missing)} never came"
        for seat in self._seats:
            without = [rank for rank in seat.ranks if seat.name not in (there[rank] or set())]
            if without:
                return (
                    f"group {seat.name} (ranks {fold_ranks(seat.ranks)}) does not exist on ranks "
                    f"{fold_ranks(without)}; make all groups before the training loop, where a replacement makes "
                    "them too"
                )
        return "all ranks came, but not all could connect"


def flat(built: Built) -> list[Circuit]:
    return [circuit for circuits in built.values() for circuit in circuits]
