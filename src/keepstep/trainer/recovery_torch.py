"""Recovery: from rebuilt communicators to a common, restored step.

All ranks show what they hold, come to the same plan, and put the state back: from their own memory, from the file
their predecessor left on this node, from another node's keeper, from a durable tier, or from a live replica. A holder
that turns out to be damaged is left out and the ranks agree again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import distributed as dist

from keepstep.checkpoint import agree
from keepstep.checkpoint.agree import Holdings, Plan
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.peers import PeerClient
from keepstep.checkpoint.slot import Description, TensorEntry, Version
from keepstep.model.topology import Member, Place, Roster
from keepstep.trainer.beat import Beat
from keepstep.trainer.exceptions import CannotResume, StateMismatch
from keepstep.trainer.exchange_torch import everybody, keep
from keepstep.trainer.restore_torch import Durable
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import Live, State
from keepstep.trainer.together_torch import Together

MAX_ROUNDS = 4
"""How often ranks may agree anew because a holder turned out to be damaged."""


class Found(Struct, frozen=True, kw_only=True):
    """Where the ranks have met. ``version`` is ``None`` when nobody held anything all could use."""

    version: Version | None
    newest: int
    source: str
    why: str = ""
    durable: bool = False
    """A durable tier holds this version as a complete generation; it needs not be written again."""


class Restorer:
    """Brings this rank's registered state to the step that all ranks agree on.

    Args:
        stop: true when a newer epoch waits; long waits then end early.
        beat: where bytes that arrive are counted, for those who ask whether this rank still moves.
    """

    def __init__(
        self,
        state: State,
        snapshots: Snapshots,
        token: str,
        snap_dir: Path,
        stop: Callable[[], bool],
        beat: Beat | None = None,
    ) -> None:
        self._state, self._snapshots, self._token = state, snapshots, token
        self._snap_dir, self._together = snap_dir, Together(stop)
        self._beat = beat or Beat()
        self._durable: Durable | None = None
        if snapshots.config.durable:
            self._durable = Durable(
                snapshots.config, state, snap_dir, notes=snapshots.notes, beat=self._beat, stop=stop
            )
        self.agree_ms = 0.0
        """How long the last ``meet`` took to agree."""

    def meet(self, roster: Roster, rank: int, live: Version | None, *, newcomer: bool, all_new: bool = False) -> Found:
        """Agree and restore; collective over all ranks of the (rebuilt) world.

        Args:
            live: the last commit of this process; ``None`` for one that has none.
            newcomer: this process has nothing of its own and looks at other nodes' keepers too.
            all_new: every process of the job has just been started; durable tiers may then hold a newer step than
                what is left in memory. Otherwise they are asked only when memory has no common step.

        Raises:
            CannotResume: there is something to go on from, and none of it can be used.
        """
        began = time.monotonic()
        holders = self._peers(roster, rank) if newcomer else {}
        dropped: set[Version] = set()
        saved: tuple[Version, ...] | None = None
        unreadable: CannotResume | None = None
        why = ""
        for _ in range(MAX_ROUNDS):
            if saved is None and all_new and self._durable is not None:
                saved, unreadable = self._look(rank, roster.world_size)
            mine = self._holdings(roster, live, holders, saved or (), dropped, newcomer)
            rows = self._exchange(mine, roster.world_size, rank)
            plan = agree.choose(rows)
            if plan is None and saved is None and self._durable is not None:
                saved = self._durable.look(rank, roster.world_size)
                continue
            self.agree_ms = (time.monotonic() - began) * 1e3
            if plan is None:
                if unreadable is not None:
                    raise unreadable
                if saved:
                    raise CannotResume(
                        f"no checkpoint in {self._durable.where if self._durable else ''} could be read: {why}; "
                        f"`keepstep ckpt verify` tells what is damaged, --no-resume begins anew"
                    )
                return Found(version=None, newest=0, source="initial", why=agree.explain(rows))
            problem = self._restore(plan, roster, rank, holders, dropped)
            if everybody(problem is None):
                self._snapshots.forget_after(plan.version)
                durable = plan.version in (saved or ())
                return Found(version=plan.version, newest=plan.newest, source=plan.sources[rank], durable=durable)
            if problem is not None:
                why = problem
                print(f"keepstep: rank {rank}: {problem}; asking the next holder", file=sys.stderr, flush=True)
                dropped.add(plan.version)
        raise CannotResume(f"no holder of a common step could be read in {MAX_ROUNDS} rounds")

    # ---------------------------------------------------------------- what there is

    def _look(self, rank: int, world_size: int) -> tuple[tuple[Version, ...], CannotResume | None]:
        """What durable tiers hold. That they cannot be read is an error only where memory has nothing either."""
        assert self._durable is not None
        try:
            return self._durable.look(rank, world_size), None
        except CannotResume as error:
            return (), error

    def _holdings(
        self,
        roster: Roster,
        live: Version | None,
        holders: dict[Version, PeerClient],
        saved: tuple[Version, ...],
        dropped: set[Version],
        newcomer: bool,
    ) -> Holdings:
        """Without what could not be restored in an earlier round: asking for it again would only use up the rounds."""
        foreign = self._foreign(roster.world_size) if newcomer else set()
        private = self._snapshots.private() - dropped - foreign
        clean = live if live is not None and self._state.clean and live in private else None
        return Holdings(
            live=clean,
            full=tuple(v for v in self._snapshots.full() if v not in dropped | foreign),
            private=tuple(private),
            peer=tuple(v for v in sorted(holders, reverse=True) if v not in dropped),
            saved=tuple(v for v in saved if v not in dropped),
            replicated=self._state.replicated,
        )

    def _foreign(self, world_size: int) -> set[Version]:
        """Versions in memory that another number of ranks left behind: what they mean to this one nobody knows."""
        found = set()
        for version in self._snapshots.full():
            with contextlib.suppress(CheckpointError):
                if self._snapshots.describe(version).world_size != world_size:
                    found.add(version)
        return found

    def _peers(self, roster: Roster, rank: int) -> dict[Version, PeerClient]:
        """Versions of this rank at other nodes' keepers. A keeper that does not answer holds nothing.

        The many that only may hold one are asked only when nothing has been found yet, there or on this node: asking
        each of a thousand nodes takes longer than everything else.
        """
        seat = roster.seat_of(rank)
        assert seat is not None
        found: dict[Version, PeerClient] = {}
        for place in _likely_holders(roster, seat):
            if place.node not in _named_holders(roster, seat) and (found or self._snapshots.full()):
                break
            client = PeerClient(
                host=place.host,
                port=place.keeper_port,
                job=roster.job,
                token=self._token,
                epoch=roster.epoch,
                key=roster.key,
                stop=self._together.in_vain,
            )
            try:
                for version in client.have(rank):
                    found.setdefault(version, client)
            except CheckpointError as error:
                if seat.replica_node == place.node:
                    print(f"keepstep: rank {rank}: {error}", file=sys.stderr, flush=True)
            if found and seat.replica_node == place.node:
                break
        return found

    def _exchange(self, mine: Holdings, world_size: int, rank: int) -> list[Holdings]:
        rows = torch.zeros(world_size, agree.ROW, dtype=torch.int64)
        rows[rank] = torch.tensor(mine.to_row(), dtype=torch.int64)
        dist.all_reduce(keep(rows))
        return [Holdings.from_row(row) for row in rows.tolist()]

    # ---------------------------------------------------------------- putting it back

    def _restore(
        self, plan: Plan, roster: Roster, rank: int, holders: dict[Version, PeerClient], dropped: set[Version]
    ) -> str | None:
        """Returns what went wrong on this rank, if anything; takes part in the replica broadcast in any case."""
        source, version, problem = plan.sources[rank], plan.version, None
        if "saved" in plan.sources:
            assert self._durable is not None
            mine = source == "saved"
            problem = self._durable.bring(version, roster.world_size, mine=mine, key=roster.key)
        try:
            if "peer" in plan.sources:
                self._together.run(lambda: self._fetch(holders, rank, version) if source == "peer" else None)
            if source == "peer":
                held = self._snapshots.describe(version).world_size
                if held != roster.world_size:
                    raise StateMismatch(f"it was kept by {held} ranks, this job has {roster.world_size}")
            if source != "replica" and problem is None:
                self._snapshots.load(self._state, version, shards=source != "live")
        except (CheckpointError, StateMismatch, KeyError, OSError) as error:
            problem = f"step {version.step} could not be restored ({source}): {error}"
        if plan.root >= 0 and everybody(problem is None):
            self._share(plan, rank, dropped)
        return problem

    def _fetch(self, holders: dict[Version, PeerClient], rank: int, version: Version) -> None:
        before = 0

        def count(done: int, size: int) -> None:
            nonlocal before
            self._beat.arrived(max(0, done - before))  # what was damaged on the way is asked for once more
            before = done

        self._beat.restoring(True)
        try:
            holders[version].fetch(rank, version, self._snap_dir, count)
        finally:
            self._beat.restoring(False)

    def _share(self, plan: Plan, rank: int, dropped: set[Version]) -> None:
        """The root hands its parameters and optimizer state to the ranks that have none."""
        root, receives = plan.root, plan.sources[rank] == "replica"
        description: Description | None = None
        if rank == root:
            description = _describe(self._state)
        data = _share_bytes(msgspec.msgpack.encode(description) if description else b"", root)
        shared = msgspec.msgpack.decode(data, type=Description)
        lives = {live.name: live for live in [*self._state.shards(), *self._state.buffers()]}
        device = _device(self._state)
        arrived: dict[str, torch.Tensor] = {}
        for entry in shared.tensors:
            if rank == root:
                tensor = lives[entry.name].tensor.to(device).contiguous()
            else:
                tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
            if tensor.numel():
                dist.broadcast(tensor, src=root)
                self._beat.arrived(entry.nbytes)
            if receives:
                arrived[entry.name] = tensor
        if receives:
            self._adopt(shared, arrived, plan.version, dropped)

    def _adopt(
        self, shared: Description, arrived: dict[str, torch.Tensor], version: Version, dropped: set[Version]
    ) -> None:
        """Shards from the replica; buffers and random state from this rank's own private part where it survived."""
        self._state.put_shards(shared.tensors, lambda entry: arrived[entry.name], shared.plain)
        if version in self._snapshots.private() - dropped:
            self._snapshots.load(self._state, version, shards=False)
            return
        self._state.put_back(
            tuple(e for e in shared.tensors if e.name[0] == "b"), lambda e: arrived[e.name], shared.plain, shards=False
        )
        print(
            f"keepstep: the random state and buffers of this rank at step {version.step} are not known any more; the "
            f"step is kept, but dropout and the like go on with another sequence (--snapshot-every 1 would keep both)",
            file=sys.stderr,
            flush=True,
        )


# -------------------------------------------------------------------- helpers


def everybody_is_here() -> None:
    """A tiny all-reduce: nobody goes on before all have come, and it ends with an error when somebody is gone."""
    everybody(True)


def _likely_holders(roster: Roster, seat: Member) -> list[Place]:
    """Keepers named by the roster first; any other node may hold a copy from an earlier placement."""
    others = [place for place in roster.places if place.node != seat.node and place.keeper_port]
    named = _named_holders(roster, seat)
    return sorted(others, key=lambda place: (place.node != seat.replica_node, place.node not in named))


def _named_holders(roster: Roster, seat: Member) -> set[str | None]:
    """The node that the roster names for this seat, and the buddy of the seat's own node."""
    home = roster.place(seat.node)
    return {seat.replica_node, home.buddy if home else None}


def _device(state: State) -> torch.device:
    for module in state.modules.values():
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")


def _entry(live: Live) -> TensorEntry:
    tensor = live.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(live.name, dtype, tuple(tensor.shape), 0, tensor.nbytes, live.like, tensor.device.type)


def _describe(state: State) -> Description:
    lives = [*state.shards(), *state.buffers()]
    return Description(tensors=tuple(_entry(live) for live in lives), plain=state.plain(with_random=False))


def _share_bytes(data: bytes, root: int) -> bytes:
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=root)
    buffer = bytearray(data) if data else bytearray(int(size))
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    dist.broadcast(tensor, src=root)
    return bytes(buffer)
