"""Environment of the processes a node starts: torchrun's variables exactly, and ours beside them. Pure.

The list is that of ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.agent.config import AgentConfig
from keepstep.agent.streaming import streaming
from keepstep.model import env as names
from keepstep.model.ids import SlotId
from keepstep.model.topology import Member, Roster

LOCAL_RANK_MACRO = "${local_rank}"
"""torchrun replaces it in the program's arguments."""


def worker_env(
    config: AgentConfig, base: Mapping[str, str], roster: Roster, seat: Member, error_file: str
) -> dict[str, str]:
    """For a process that is started for a seat."""
    nodes = roster.node_order
    return {
        **_common(config, base, seat.slot, error_file),
        names.ROLE: "worker",
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(roster.world_size),
        "LOCAL_WORLD_SIZE": str(len(roster.seats_on(seat.node))),
        "GROUP_RANK": str(nodes.index(seat.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(roster.world_size),
        "MASTER_ADDR": roster.store_host,
        "MASTER_PORT": str(roster.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(roster.attempt),
    }


def standby_env(config: AgentConfig, base: Mapping[str, str], slot: SlotId) -> dict[str, str]:
    """For a process that will learn its rank only when it takes a seat; a stale one of the launcher's must not leak."""
    env = _common(config, base, slot, "")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return {**env, names.ROLE: "standby", "TORCHELASTIC_RESTART_COUNT": "0"}


def service_env(config: AgentConfig, base: Mapping[str, str]) -> dict[str, str]:
    """For our own helpers: no slot, so that nothing in them takes itself for a trainer."""
    return {**base, "OMP_NUM_THREADS": "1", names.JOB: config.spec.job, names.NODE: config.node}


def program_args(args: tuple[str, ...], local_rank: int | None) -> list[str]:
    """Arguments with torchrun's macro replaced; a standby has no local rank yet and counts as 0."""
    return [a.replace(LOCAL_RANK_MACRO, str(local_rank or 0)) for a in args]


def omp_threads(config: AgentConfig, base: Mapping[str, str]) -> str | None:
    """torchrun's rule: several processes per node and nothing said means one thread each."""
    wanted = config.env.get("OMP_NUM_THREADS", base.get("OMP_NUM_THREADS"))
    return "1" if wanted is None and config.spec.nproc_per_node > 1 else wanted


def _common(config: AgentConfig, base: Mapping[str, str], slot: SlotId, error_file: str) -> dict[str, str]:
    spec = config.spec
    env = {
        **base,
        **config.env,
        "ROLE_NAME": spec.role,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        names.JOB: spec.job,
        names.NODE: config.node,
        names.SLOT: slot,
        names.NODE_DIR: config.node_dir,
        names.RUN_DIR: config.run_dir,
        names.TOKEN_FILE: config.token_file,
        names.ORPHAN_GRACE: f"{config.orphan_grace_s:g}",
        names.CONTROLLER: f"{config.controller_host}:{config.controller_port}",
    }
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.update(streaming(env))
    threads = omp_threads(config, base)
    if threads is not None:
        env["OMP_NUM_THREADS"] = threads
    return env
