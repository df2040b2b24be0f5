"""Options: what a script (or its environment) asks of the checkpoint engine where no ``keepstep run`` has been told.

``keepstep.Checkpoint(dir="s3://bucket/run", every=500)`` and ``KEEPSTEP_CKPT_DIR=s3://bucket/run`` mean the same as
``keepstep run --ckpt-dir s3://bucket/run``; an argument beats the variable.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from keepstep.checkpoint import words
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import BadSetting
from keepstep.checkpoint.process import started
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.trainer.attendant import LINGER_S

VARIABLES = {name: f"KEEPSTEP_CKPT_{name.upper()}" for name in words.DEFAULTS}
NO_RESUME = "KEEPSTEP_NO_RESUME"
SNAPSHOT_EVERY = "KEEPSTEP_SNAPSHOT_EVERY"
LAYOUT = "KEEPSTEP_LAYOUT"
RACK = "KEEPSTEP_RACK"
JOB_NAME = "KEEPSTEP_JOB_NAME"
LINGER = "KEEPSTEP_LINGER_S"
MAX_NAME = 40
"""Characters of a job's or node's name in a path; longer ones are cut and made unique by a hash."""
_NUMBERS = ("every", "full_every", "keep", "keep_every")


class Checkpoint(Struct, frozen=True, kw_only=True):
    """What ``keepstep.init(checkpoint=...)`` takes. ``None`` leaves a setting to its environment variable.

    Attributes:
        dir: durable generations, where all nodes reach them: a path, ``s3://``, ``gs://``, ``az://``, ``file://``.
        local_dir: the same on each node's own disk.
        every: steps between durable generations.
        full_every: every how many of them one is full; the others hold differences.
        keep, keep_every, keep_for, sdc_window: which generations stay; see ``keepstep run --ckpt-keep`` and friends.
        overhead: share of a step that snapshots may take, ``"1%"`` or 0.01; chooses their interval.
        rate_peer, rate_local, rate_remote: limits in bytes per second, or ``"500MB/s"``.
        snapshot_every: steps between snapshots into memory.
        resume: whether a new start goes on from the newest generation.
        layout: ``"tp=8,pp=8,dp=32"``, for the placement of copies.
        job: name of the training; memory and generations of another name are not taken for its own.
        linger_s: how long this node's memory outlives its ranks, to be there when they are started again.
    """

    dir: str | os.PathLike[str] | None = None
    local_dir: str | os.PathLike[str] | None = None
    every: int | None = None
    full_every: int | None = None
    keep: int | None = None
    keep_every: int | None = None
    keep_for: str | float | None = None
    sdc_window: str | float | None = None
    overhead: str | float | None = None
    rate_peer: str | float | None = None
    rate_local: str | float | None = None
    rate_remote: str | float | None = None
    snapshot_every: int | None = None
    resume: bool | None = None
    layout: str | None = None
    job: str | None = None
    linger_s: float | None = None


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for checkpoints."""
    return any(environ.get(variable) for variable in VARIABLES.values())


def settle(asked: Checkpoint, environ: Mapping[str, str], world_size: int) -> tuple[CheckpointConfig, float]:
    """What is asked for, arguments before variables, and how long memory lingers.

    Raises:
        BadSetting: names the argument or variable, its value and the way out.
    """
    said: dict[str, Any] = {}
    called: dict[str, str] = {}
    for name in words.DEFAULTS:
        value, variable = getattr(asked, name), VARIABLES[name]
        if value is not None:
            said[name], called[name] = value, f"Checkpoint({name}=...)"
        elif environ.get(variable):
            called[name] = variable
            said[name] = _integer(environ[variable], variable) if name in _NUMBERS else environ[variable]
    resume = asked.resume if asked.resume is not None else environ.get(NO_RESUME, "0") in ("", "0")
    policy = words.policy(said, lambda name: called.get(name, name), resume=resume)
    layout_text = asked.layout if asked.layout is not None else environ.get(LAYOUT, "")
    every = asked.snapshot_every
    if every is None:
        every = _integer(environ.get(SNAPSHOT_EVERY) or "1", SNAPSHOT_EVERY)
    if every < 1:
        raise BadSetting(f"snapshot_every {every} must be 1 or more", "leave checkpoint= out to have no snapshots")
    config = CheckpointConfig(
        job=JobId(asked.job or environ.get(JOB_NAME, "") or _job(policy, environ)),
        policy=policy,
        layout=words.fit(words.layout(layout_text, "layout"), world_size, "layout"),
        snapshot_every=every,
        level=1,
        run=_launch(environ),
    )
    linger = asked.linger_s if asked.linger_s is not None else _seconds(environ.get(LINGER) or str(LINGER_S))
    return config, linger


def node_dir(root: Path, job: str, node: str) -> Path:
    """Where this node's memory of the job is. The last part is the node's name: the keeper goes by it."""
    return root / f"l1-{_short(job)}" / node


def node_name(environ: Mapping[str, str]) -> str:
    """This node's name: given, or the host's."""
    return _short(environ.get("KEEPSTEP_NODE_NAME") or os.uname().nodename.split(".")[0])


def _job(policy: CheckpointPolicy, environ: Mapping[str, str]) -> str:
    """A name that comes out the same when this training is started again, and differs for every other one.

    Where generations go belongs to one training; so does torchrun's run id where there is one. A run without either,
    and one that shall not resume, is known by the torchrun that started it: what it leaves in memory serves its own
    restarts only.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(sys.argv[0]).stem).strip("-")[:24] or "job"
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    place = policy.dir or policy.local_dir
    if not policy.resume or not (place or run not in ("", "none")):
        place = _launch(environ)
    elif not place:
        return run
    return f"{stem}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _launch(environ: Mapping[str, str]) -> str:
    """What restarts by one torchrun share; a process of its own where there is none."""
    parent = os.getppid() if "TORCHELASTIC_RESTART_COUNT" in environ else os.getpid()
    return f"{os.uname().nodename}/{parent}/{started(parent)}"


def _short(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-.") or "x"
    if plain == name and len(name) <= MAX_NAME:
        return name
    return f"{plain[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise BadSetting(f"{name} {text!r} is not a whole number", f"for example {name}=100") from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise BadSetting(f"{LINGER} {text!r} is not a number of seconds", f"for example {LINGER}=300")
    return value


def encode(config: CheckpointConfig) -> bytes:
    """For the other ranks, which go by the first one's settings."""
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> CheckpointConfig:
    return msgspec.msgpack.decode(data, type=CheckpointConfig)
