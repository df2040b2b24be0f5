"""What a launcher tells its agent: one JSON file, so that a restarted agent starts from exactly the same words."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from keepstep.model.topology import JobSpec


class Program(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the user's program is started; the three forms that torchrun knows.

    Attributes:
        kind: ``script`` runs a Python file, ``module`` is ``-m``, ``executable`` is ``--no-python``,
            ``run_path`` runs a file through ``runpy.run_path`` (``--run-path``).
        target: file, module or executable.
        args: its arguments.
        start: ``fork`` from the warm shim, ``spawn`` a new interpreter, ``auto``: fork unless CUDA devices are visible
            or ``kind`` is ``executable``.
    """

    kind: Literal["script", "module", "executable", "run_path"]
    target: str
    args: tuple[str, ...] = ()
    start: Literal["auto", "fork", "spawn"] = "auto"


class Output(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where workers' output goes. Files are always written; ``console`` says what is also shown, with a prefix.

    Attributes:
        log_dir: directory of the per-rank files.
        console: per local rank (``*`` for all others): ``0`` nothing, ``1`` stdout, ``2`` stderr, ``3`` both.
            torchrun's ``--redirects`` takes a stream away from the console, ``--tee`` gives it back.
        local_ranks_filter: only these local ranks are shown on the console (empty: all).
    """

    log_dir: str
    console: dict[str, int] = field(default_factory=lambda: {"*": 3})
    local_ranks_filter: tuple[int, ...] = ()


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent needs to know.

    Attributes:
        node: this node's name; unique within the job.
        node_rank: torchrun's ``--node-rank``; ``None`` lets the controller number the nodes.
        rack: fault domain beyond the node; empty where it is not known.
        host: the address under which other nodes reach this one.
        run_dir: job's directory on disk (this node's view of it).
        node_dir: memory-backed directory of this node and job.
        controller_host, controller_port: where the controller listens for agents.
        token_file: bearer token of the job; empty on loopback.
        launcher_pid: the process whose end means that this node shall leave.
        env: environment variables added to every worker.
        frozen_s: how long a process may be in state T before it counts as frozen.
        controller_patience_s: how long a reported fault may wait for an order before the agents help themselves.
        controller_wait_s: how long a finished node waits for an absent controller's word before it leaves by itself.
        orphan_grace_s: how long the shim waits for an agent before it ends everything.
        services: helpers that this node runs: ``store`` (rendezvous) and ``keeper`` (snapshots).
        warm: what the fork server imports before it forks: ``torch`` and friends, or ``none``.
    """

    spec: JobSpec
    program: Program
    output: Output
    node: str
    host: str
    run_dir: str
    node_dir: str
    controller_host: str
    controller_port: int
    launcher_pid: int
    node_rank: int | None = None
    wants_standby: bool = False
    rack: str = ""
    token_file: str = ""
    env: dict[str, str] = {}
    monitor_interval_s: float = 0.05
    frozen_s: float = 1.0
    controller_patience_s: float = 5.0
    controller_wait_s: float = 60.0
    orphan_grace_s: float = 60.0
    services: tuple[Literal["store", "keeper"], ...] = ("store", "keeper")
    warm: Literal["torch", "none"] = "torch"
