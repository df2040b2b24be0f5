"""Environment variables between the agent and the processes it starts, and the layout of the node directory.

``KEEPSTEP_SLOT`` being present is what makes ``keepstep.init`` talk to an agent; without it the same script runs
under plain ``python`` or ``torchrun``.
"""

from __future__ import annotations

JOB = "KEEPSTEP_JOB"
NODE = "KEEPSTEP_NODE"
SLOT = "KEEPSTEP_SLOT"
ROLE = "KEEPSTEP_ROLE"
"""``standby`` for a warm process that parks in ``keepstep.init`` until it is given a rank; else ``worker``."""
NODE_DIR = "KEEPSTEP_NODE_DIR"
"""Memory-backed directory of this node and job; everything below is relative to it."""
RUN_DIR = "KEEPSTEP_RUN_DIR"
"""Directory of the job on disk: log, losses, exit.json, per-rank output."""
TOKEN_FILE = "KEEPSTEP_TOKEN_FILE"
CONTROLLER = "KEEPSTEP_CONTROLLER"
ORPHAN_GRACE = "KEEPSTEP_ORPHAN_GRACE_S"
"""How long the shim waits for an agent; a worker that has lost launcher, agent and shim ends after twice as long."""
COPY = "KEEPSTEP_COPY"
"""How snapshots are copied: ``blocking`` before a commit returns, ``overlapped`` beside the next step, or ``auto``:
blocking where it costs no more than ``--ckpt-overhead``, or one percent of a step."""
GUARD = "KEEPSTEP_GUARD"
"""What is done about losses, gradient norms and replicas: ``off``, ``observe`` (tell) or ``on`` (act). Default of
`keepstep run --guard`; ``keepstep.init(guard=...)`` of the script beats it."""
ALLOW_TAINTED = "KEEPSTEP_ALLOW_TAINTED"
"""1: restore also generations that are marked as tainted by silent data corruption; as `keepstep run
--allow-tainted`."""
STATE_DIR = "KEEPSTEP_STATE_DIR"
RUNTIME_DIR = "KEEPSTEP_RUNTIME_DIR"

AGENT_SOCKET = "agent.sock"
"""Unix stream socket, workers connect to it (frames of ``model.wire``)."""
SHIM_SOCKET = "shim.sock"
"""Unix stream socket of the process parent; the agent connects to it."""
KEEPER_SOCKET = "keeper.sock"
"""Unix datagram socket; a trainer says here that a new version is complete: b"<rank> <step>"."""
NOTES_SOCKET = "notes.sock"
"""Unix datagram socket of the agent: trainers, keeper and archiver say here what happened to checkpoints."""
ARCHIVER_SOCKET = "archiver.sock"
"""Unix datagram socket; a trainer says here that it has pinned a version for the durable tiers: b"<rank> <step>"."""
ARCHIVER_FINISH = b"finish"
"""Said to the archiver when no rank trains any more: write, complete and verify what is pinned, then end."""
CHECKPOINT_FILE = "checkpoint.json"
"""The job's ``CheckpointPolicy`` with job name and layout, written by whoever starts the keeper."""
ROSTER_FILE = "roster"
"""Newest accepted roster, msgpack; the keeper reads it, and an agent that is started again."""
KEEPER_PORT_FILE = "keeper.port"
BEAT_DIR = "beat"
FLIGHT_DIR = "flight"
"""``flight/<slot>``: which collectives each trainer has launched (``model.flight``)."""
SNAP_DIR = "snap"
"""``snap/rank<r>.<0|1|2>``: versions of each local rank's state, written by the trainer. The third file only exists
where durable tiers do: one version may be held for them while the other two go on alternating."""
REPLICA_DIR = "replica"
"""``replica/rank<r>.<0|1>``: versions of other nodes' ranks, written by the keeper."""
LOSS_DIR = "steps"
"""Below RUN_DIR: ``steps/rank<r>.jsonl``, one line per committed step: step, epoch, loss (hex float)."""
