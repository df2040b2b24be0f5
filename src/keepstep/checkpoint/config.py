"""Config: the engine's settings as one file of the node directory, read by trainers, keeper and archiver alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.files import write_atomic
from keepstep.model.env import CHECKPOINT_FILE
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout


class CheckpointConfig(Struct, frozen=True, kw_only=True):
    """What ``checkpoint.json`` holds. ``level``: 2 under an agent, 1 for the engine alone (torchrun).

    ``run`` tells this run of the job from an earlier one of the same name, the same on all its nodes: where it is set,
    parts of two runs that reach the same version in one directory never become one generation.
    """

    job: JobId
    policy: CheckpointPolicy = CheckpointPolicy()
    layout: Layout = Layout()
    snapshot_every: int = 1
    level: int = 2
    run: str = ""

    @property
    def durable(self) -> bool:
        """Whether there is any tier that outlives the machines' memory."""
        return bool(self.policy.dir or self.policy.local_dir)


def write(node_dir: Path, config: CheckpointConfig) -> None:
    """Put the file there, whole."""
    write_atomic(node_dir / CHECKPOINT_FILE, msgspec.json.format(msgspec.json.encode(config)) + b"\n")


def read(node_dir: Path, job: str = "") -> CheckpointConfig:
    """The node's settings; the defaults where nobody has written any.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    path = node_dir / CHECKPOINT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointConfig)
    except FileNotFoundError:
        return CheckpointConfig(job=JobId(job))
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from error
