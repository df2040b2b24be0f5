"""Who trains where: the roster of an epoch, and the job it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Epoch, IncidentId, JobId, NodeId, Rank, SlotId
from keepstep.model.settings import CheckpointPolicy

JoinMode = Literal["fresh", "in_process", "restart"]
"""How processes enter an epoch.

``fresh``: first start, every process builds real groups in ``init``.
``in_process``: survivors keep their processes and memory, newcomers take vacant ranks (needs the SDK).
``restart``: every process of the job is stopped and started anew (torchrun's way; level 0, or the upper rungs).
"""


class Layout(Struct, frozen=True, kw_only=True):
    """How ranks are arranged in parallel groups, tensor-parallel neighbours first, pipeline stages last.

    Rank = (pp_index * dp + dp_index) * tp + tp_index: the default order of Megatron-LM and torchtitan.
    ``tp = pp = dp = 1`` means unknown: all ranks are one group.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def known(self) -> bool:
        return self.tp * self.pp * self.dp > 1


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user asked for with ``keepstep run``; identical on every node of the job.

    Attributes:
        job: its name; directories, incidents and orders are named after it.
        min_nodes, max_nodes: ``--nnodes``; the job starts with the most that come in time.
        nproc_per_node: ranks on each node.
        standby_nodes: nodes that wait for another one to be lost.
        standbys: warm processes kept on each of the job's nodes.
        max_restarts: whole-job restarts before the job is given up.
        user_retries: how often the script's own error is tried again in process.
        hang_detect: ``auto`` (from the job's own step times), ``off``, or a fixed limit such as ``30s``.
        pace_window_s: length of the windows in which ranks' own times are compared; 0 compares none, and ``None``
            leaves it to the controller's policy.
        allow_inject: whether people may break it on purpose.
        snapshot_every: steps between snapshots into memory; 0 is off.
        join_timeout_s: how long the job waits for its least number of nodes.
        last_call_s: how long it waits for more than that.
        ckpt: the checkpoint engine's policy.
        layout: parallel groups, for the placement of replicas.
        mode: what automation may do to nodes that are alive; the controller's policy where it is ``None`` or stricter.
        protected: nodes that automation never takes out of this job, besides those of the policy.
        evictions_per_hour: breaker of this job; the controller's policy where it is ``None`` or stricter.
        role: torchrun's ``ROLE_NAME``.
        command: program and arguments, so that nodes with another program are refused.
    """

    job: JobId
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    standby_nodes: int = 0
    standbys: int = 0
    max_restarts: int = 3
    user_retries: int = 1
    hang_detect: str = "auto"
    pace_window_s: float | None = None
    allow_inject: bool = False
    snapshot_every: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    ckpt: CheckpointPolicy = CheckpointPolicy()
    layout: Layout = Layout()
    mode: Literal["observe", "assist", "auto"] | None = None
    protected: tuple[str, ...] = ()
    evictions_per_hour: int | None = None
    role: str = "default"
    command: tuple[str, ...] = ()


class Member(Struct, frozen=True, kw_only=True):
    """One rank's seat in a roster."""

    rank: Rank
    node: NodeId
    slot: SlotId
    local_rank: int
    newcomer: bool = False
    """True for a process that enters the job with this epoch and must be given the rank's state."""
    replica_node: NodeId | None = None
    """For a newcomer: the node whose keeper holds the newest replica of this rank's state."""


class Place(Struct, frozen=True, kw_only=True):
    """How to reach a node of the roster."""

    node: NodeId
    host: str
    keeper_port: int
    peer_port: int
    rack: str = ""
    """Fault domain beyond the node, as the agent was told; empty where it is not known."""
    buddy: NodeId | None = None
    """Where this node's keeper sends its replicas; ``None`` when there is no other node."""


class Roster(Struct, frozen=True, kw_only=True):
    """The processes entitled to train in one epoch. Two different rosters never share an epoch and origin."""

    job: JobId
    epoch: Epoch
    origin: str
    """``controller`` or the id of the deputy node that opened the epoch."""
    mode: JoinMode
    world_size: int
    members: tuple[Member, ...]
    places: tuple[Place, ...]
    store_host: str
    store_port: int
    """A store that no earlier epoch has used, so that no stale key can be read."""
    attempt: int = 0
    """How many whole-job restarts came before: torchrun's ``TORCHELASTIC_RESTART_COUNT``."""
    incident: IncidentId | None = None
    snapshot_every: int = 1
    run: str = ""
    """Tells this run of the job from every other one of its name; checkpoints bear it."""
    boundary_s: float = 0.0
    """Nothing is broken, nodes are only swapped: ranks may finish the step that they are in, for at most so long."""

    def seats_on(self, node: NodeId) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.node == node)

    @property
    def node_order(self) -> tuple[NodeId, ...]:
        """Nodes with seats by their lowest rank: torchrun's group ranks, and the order in which deputies are asked."""
        return tuple(dict.fromkeys(m.node for m in sorted(self.members, key=lambda m: m.rank)))

    def place(self, node: NodeId) -> Place | None:
        return next((p for p in self.places if p.node == node), None)

    def seat_of(self, rank: int) -> Member | None:
        return next((m for m in self.members if m.rank == rank), None)

    @property
    def key(self) -> str:
        """Store prefix of this roster; unlike the epoch alone it also tells apart two rival origins."""
        return f"e{self.epoch}/{self.origin}"


def fold_ranks(ranks: Sequence[int]) -> str:
    """``0-20,22-511`` for a set of ranks; ``-`` for none."""
    out: list[str] = []
    for rank in sorted(set(ranks)):
        if out and int(out[-1].rsplit("-", 1)[-1]) == rank - 1:
            out[-1] = f"{out[-1].split('-', 1)[0]}-{rank}"
        else:
            out.append(str(rank))
    return ",".join(out) or "-"
