"""Level 1: the checkpoint engine without keepstep's runtime, under torchrun or plain Python.

Ranks meet in the default process group, show each other where their nodes are, and write down a roster as an agent
would have it from a controller. From there on everything is as at level 2: the same snapshots, keepers, archivers and
agreement. What is missing is the runtime's part: a lost rank costs a restart of all, by torchrun.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import distributed as dist

from keepstep.checkpoint import nodedir, room
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import BadSetting, NotEnoughMemory, TierError
from keepstep.checkpoint.files import write_atomic
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model import env, exits
from keepstep.model.ids import MINOR_BITS, Epoch, NodeId, Rank, SlotId
from keepstep.model.placement import Host
from keepstep.model.placement import place as place_copies
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Member, Place, Roster
from keepstep.trainer import options
from keepstep.trainer.attendant import TOKEN
from keepstep.trainer.attended import Attended, say
from keepstep.trainer.ending_torch import lost_parts
from keepstep.trainer.exceptions import GroupsUnsupported
from keepstep.trainer.exchange_torch import gather, keep
from keepstep.trainer.join_torch import Identity
from keepstep.trainer.options import Checkpoint
from keepstep.trainer.recovery_torch import everybody_is_here
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State

PROBE_S = 5.0
"""How long the look at a durable tier before the run may try again."""
ORIGIN = "torchrun"


class Card(Struct, frozen=True, kw_only=True):
    """What a rank tells all others at the start.

    Attributes:
        token: what keepers of this job showed each other before a restart.
        epoch: the newest epoch that this node knows of.
    """

    node: str
    host: str
    rack: str
    local_rank: int
    token: str = ""
    epoch: int = 0


class Level1:
    """One process's part, from ``init`` to the end of its loop. It holds what a ``Session`` holds at level 2."""

    def __init__(self, who: Identity, asked: Checkpoint) -> None:
        _require_cpu_group()
        self.who, self.rank = who, who.rank
        self.state = State()
        self.token = ""
        config, self._linger_s = options.settle(asked, os.environ, who.world_size)
        self.config, self._cards, root = self._meet(config)
        self._node = self._cards[self.rank].node
        self.node_dir = options.node_dir(root, self.config.job, self._node)
        self.snap_dir = self.node_dir / env.SNAP_DIR
        _check_places(self.config.policy, shared=self.rank == 0, local=self.who.local_rank == 0)
        self.line = self._attend()
        self.roster = self._write_roster()
        self.snapshots = Snapshots(self.snap_dir, self.rank, self.node_dir / env.KEEPER_SOCKET, self.config)

    # ---------------------------------------------------------------- meeting

    def _meet(self, config: CheckpointConfig) -> tuple[CheckpointConfig, list[Card], Path]:
        """Rank 0's settings, everybody's card, and where node directories are."""
        root = nodedir.runtime_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := root.stat().st_uid) != os.getuid():
            raise BadSetting(
                f"runtime directory {root} belongs to another user (uid {owner})", f"set {env.RUNTIME_DIR} to yours"
            )
        config = options.decode(gather(options.encode(config) if self.rank == 0 else b"")[0])
        node = options.node_name(os.environ)
        here = options.node_dir(root, config.job, node)
        mine = Card(
            node=node,
            host=_own_address(),
            rack=os.environ.get(options.RACK, ""),
            local_rank=self.who.local_rank,
            token=_read(here / TOKEN),
            epoch=_known_epoch(here / env.ROSTER_FILE),
        )
        return config, [msgspec.convert(card, Card) for card in gather(msgspec.to_builtins(mine))], root

    def _attend(self) -> Attended:
        """A line to this node's attendant; its lowest rank starts one where there is none."""
        leader = min(rank for rank, card in enumerate(self._cards) if card.node == self._node) == self.rank
        fresh = gather(secrets.token_hex(16) if self.rank == 0 else "")[0]
        self.token = next((card.token for card in self._cards if card.token), fresh)
        line = Attended(
            self.node_dir,
            self.rank,
            host=self._cards[self.rank].host,
            linger_s=self._linger_s,
            config=self.config if leader else None,
            token=self.token if leader else "",
        )
        if problem := line.open():
            say(self.rank, f"{problem}; training goes on without copies on other nodes and durable checkpoints")
            with contextlib.suppress(OSError):  # so that whoever starts here next gives the memory back
                self.node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                (self.node_dir / nodedir.OWNER).touch()
        self._leader = leader
        return line

    def _write_roster(self) -> Roster:
        """As the controller would: who is where, and whose copies go to which node."""
        ports = gather(self.line.keeper_port)
        epoch = torch.tensor([max(int(time.time()), *((c.epoch >> MINOR_BITS) + 1 for c in self._cards))])
        dist.all_reduce(keep(epoch), op=dist.ReduceOp.MAX)
        ranks: dict[str, list[int]] = {}
        for rank, card in enumerate(self._cards):
            ranks.setdefault(card.node, []).append(rank)
        hosts = [Host(NodeId(node), tuple(held), self._cards[held[0]].rack) for node, held in ranks.items()]
        homes = place_copies(hosts, self.config.layout).buddy
        roster = Roster(
            job=self.config.job,
            epoch=Epoch(int(epoch) << MINOR_BITS),
            origin=ORIGIN,
            mode="restart",
            world_size=self.who.world_size,
            members=tuple(
                Member(rank=Rank(r), node=NodeId(c.node), slot=SlotId(f"l{c.local_rank}"), local_rank=c.local_rank)
                for r, c in enumerate(self._cards)
            ),
            places=tuple(
                Place(
                    node=host.node,
                    host=self._cards[host.ranks[0]].host,
                    keeper_port=ports[host.ranks[0]],
                    peer_port=0,
                    rack=host.rack,
                    buddy=homes[host.node],
                )
                for host in hosts
            ),
            store_host="",
            store_port=0,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            snapshot_every=self.config.snapshot_every,
        )
        if self._leader:
            try:
                write_atomic(self.node_dir / env.ROSTER_FILE, msgspec.msgpack.encode(roster))
                self._ring_keeper()
            except OSError as error:
                say(self.rank, f"keepers will not copy to other nodes: {error}")
        everybody_is_here()  # nobody asks another node's keeper before that one knows the roster
        return roster

    def _ring_keeper(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.setblocking(False)
            with contextlib.suppress(OSError):  # it reads the file when it starts
                bell.sendto(b"roster", str(self.node_dir / env.KEEPER_SOCKET))

    # ---------------------------------------------------------------- what the loop asks

    @property
    def has_buddy(self) -> bool:
        place = self.roster.place(NodeId(self._node))
        return place is not None and place.buddy is not None

    def lost_parts(self, version: Version) -> list[int]:
        """Ranks of this node without a part in the shared tier; asked of its lowest rank, once the archiver has ended.

        The node of rank 0 need not be asked: its archiver knows, and does not wait for what it could not write.
        """
        if not (self._leader and self.config.policy.dir) or self._node == self._cards[0].node:
            return []
        ranks = [rank for rank, card in enumerate(self._cards) if card.node == self._node]
        return lost_parts(self.config.policy.dir, version, ranks)

    def check_room(self) -> None:
        """Refuse before the run what would run out of memory during it."""
        try:
            room.check(
                version_bytes=self.state.expected_bytes(),
                ranks=sum(card.node == self._node for card in self._cards),
                has_buddy=self.has_buddy,
                room=room.free(self.node_dir) + room.used(self.snap_dir, self.node_dir / env.REPLICA_DIR),
                durable=self.config.durable,
                full_every=self.config.policy.full_every,
            )
        except NotEnoughMemory as error:
            say(self.rank, str(error))
            raise SystemExit(exits.PREFLIGHT) from error


# -------------------------------------------------------------------- helpers


def _check_places(policy: CheckpointPolicy, *, shared: bool, local: bool) -> None:
    """Find out before the run what the first generation would find out during it."""
    for url, label, mine in ((policy.dir, "remote", shared), (policy.local_dir, "local", local)):
        if not (url and mine):
            continue
        probe = f".keepstep-probe.{os.getpid()}"
        try:
            tier = open_tier(url, label, create=True, budget_s=PROBE_S)
            tier.put(probe, [b"probe"])
            tier.remove(probe)
        except TierError as error:
            raise BadSetting(f"no checkpoint can be written to {url}: {error}", "choose or mend the place") from error


def _require_cpu_group() -> None:
    """Agreement is about numbers in host memory."""
    try:
        dist.all_reduce(keep(torch.zeros(1, dtype=torch.int64)))
    except RuntimeError as error:
        raise GroupsUnsupported(
            "the default process group cannot sum numbers in host memory, which checkpoints need: leave "
            'init_process_group() to keepstep.init(), or give it backend="cpu:gloo,cuda:nccl"'
        ) from error


def _own_address() -> str:
    """The address under which other nodes reach this one: that from which it reaches the first of them."""
    master = os.environ.get("MASTER_ADDR", "")
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1") or 1) > 1
    if not master or not several:
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _known_epoch(path: Path) -> int:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Roster).epoch
    except (OSError, msgspec.DecodeError):
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
