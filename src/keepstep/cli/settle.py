"""Where a job lives and who hosts its controller: the part of a start that makes directories and waits for others.

One launcher hosts the controller: the one of a single node; of several, one on the machine that the endpoint names.
The others wait until a controller answers there before they make anything, so that a run of the same name that lies
about from earlier is out of the way by then.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from keepstep.agent.config import AgentConfig, Output
from keepstep.agent.files import write_atomic
from keepstep.cli import dirs, net, tokens
from keepstep.cli.children import Child, Signals, python
from keepstep.cli.errors import PreflightError
from keepstep.cli.home import Home
from keepstep.cli.plan import Plan
from keepstep.cli.preflight import Checked
from keepstep.cli.say import say
from keepstep.controlplane.address import Address, read_address
from keepstep.controlplane.config import ControllerConfig
from keepstep.model import exits
from keepstep.model.env import ALLOW_TAINTED, GUARD
from keepstep.model.ids import JobId
from keepstep.model.settings import Policy
from keepstep.model.topology import JobSpec

TOKEN_FILE = "token"
"""In the run directory, where the job has a token of its own."""
CONTROLLER_START_S = 60.0
"""From the start of the controller's process to its ``controller.json``."""
HOST_PATIENCE_S = 5.0
"""How long a node that is not the first lets others host, before it does so itself."""
ELECTION_S = 90.0
"""How long one launcher may take to become the host while others on its machine wait."""
PROBE_EVERY_S = 0.2
STRANGERS = 5
"""Probes in a row that find something else than a controller at the endpoint, before that is believed."""
MAX_NAMESAKES = 64
"""Launchers with the same host name in one job (several nodes on one machine)."""


class Interrupted(Exception):
    """The user gave up while we waited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def settle(plan: Plan, checked: Checked, signals: Signals, environ: Mapping[str, str] | None = None) -> Home | int:
    """Make or find the job's home.

    Returns:
        The home, with a controller that answers; or an exit code, when a signal came while waiting.

    Raises:
        DoorError: it cannot be; nothing is left behind.
    """
    state = dirs.state_dir(plan.state_dir, environ)
    home: Home | None = None
    try:
        home = _host_or_join(plan, checked, signals, state)
        dirs.point_latest(home.run_dir)
        _take_node(home, plan)
        _write_agent(home, plan, checked)
    except Interrupted as stop:
        return 128 + stop.number
    except BaseException:
        if home is not None:
            home.abandon()
        raise
    dirs.remove_old_runs(state)
    dirs.remove_lost_memory(checked.root)
    return home


def _host_or_join(plan: Plan, checked: Checked, signals: Signals, state: Path) -> Home:
    if plan.endpoint is None:
        return _host(plan, checked, signals, state)
    if plan.hosts == "never" or not checked.local:
        return _join(plan, checked, signals, state)
    later = plan.hosts == "maybe" and (bool(plan.node_rank) or plan.wants_standby)
    if later and _await_controller(plan, checked, signals, HOST_PATIENCE_S):
        return _join(plan, checked, signals, state)
    election = dirs.runs(state) / f".host-{plan.endpoint.port}.lock"
    with dirs.held(election, ELECTION_S) as ours:
        if not ours:
            raise PreflightError(
                f"another launcher has been trying to start a controller for {plan.endpoint} for {ELECTION_S:.0f} s",
                help="look at its output, or end it",
            )
        found = net.who_listens(checked.address, plan.endpoint.port)
        if found == "other" or (found == "keepstep" and plan.hosts == "must"):
            who = "another controller" if found == "keepstep" else "another program"
            raise PreflightError(
                f"port {plan.endpoint.port} on {checked.address} is in use by {who}",
                help="free it (`ss -ltnp` shows who has it), or choose another port on all nodes",
            )
        if found == "nobody":
            return _host(plan, checked, signals, state)
    return _join(plan, checked, signals, state)


# ---------------------------------------------------------------- hosting


def _host(plan: Plan, checked: Checked, signals: Signals, state: Path) -> Home:
    run_dir = dirs.make_run_dir(state, _job_name(plan), _stem(plan))
    home = Home(run_dir.name, run_dir, checked)
    home.created = True
    try:
        home.token_file = _token_file(plan, run_dir)
        config = ControllerConfig(
            run_dir=os.fspath(run_dir),
            host=checked.address,
            agent_port=plan.endpoint.port if plan.endpoint else 0,
            token_file=home.token_file,
            launcher_pid=os.getpid(),
            policy=_policy(plan),
        )
        path = run_dir / dirs.NODES / "controller.config.json"
        write_atomic(path, msgspec.json.encode(config))
        home.controller = Child("controller", python("keepstep.controlplane.main", path), stderr=home.controller_log)
        home.controller.start()
        home.address = _await_address(home, signals)
    except BaseException:
        home.abandon()
        raise
    return home


def _policy(plan: Plan) -> Policy:
    """A job's own controller has no stricter limits than the job asks for itself."""
    usual = Policy()
    return usual if plan.evictions_per_hour is None else replace(usual, evictions_per_hour=plan.evictions_per_hour)


def _token_file(plan: Plan, run_dir: Path) -> str:
    """The user's token; for a job of one launcher one of our own: any user of a machine can reach its loopback."""
    if plan.token_file:
        return os.path.abspath(plan.token_file)
    if plan.endpoint is not None:
        return ""
    path = run_dir / TOKEN_FILE
    tokens.new(path)
    return os.fspath(path)


def _await_address(home: Home, signals: Signals) -> Address:
    """Wait until our controller listens.

    Raises:
        PreflightError: it will not.
    """
    assert home.controller is not None
    deadline = time.monotonic() + CONTROLLER_START_S
    while time.monotonic() < deadline:
        address = read_address(home.run_dir)
        if address is not None and address.pid == home.controller.pid:
            return address
        code = home.controller.poll()
        if code is not None:
            raise PreflightError(
                f"the controller did not start (exit code {code}): {_last_words(home.controller_log)}",
                help="`keepstep doctor` checks this machine",
                code=code if code in (exits.BAD_USAGE, exits.BAD_CONFIG) else None,
            )
        _pause(signals, 0.01)
    raise PreflightError(
        f"the controller did not listen within {CONTROLLER_START_S:.0f} s: {_last_words(home.controller_log)}",
        help="is this machine overloaded? `keepstep doctor` checks it",
    )


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"


# ---------------------------------------------------------------- joining


def _join(plan: Plan, checked: Checked, signals: Signals, state: Path) -> Home:
    assert plan.endpoint is not None
    if net.who_listens(checked.address, plan.endpoint.port) != "keepstep":
        say(f"waiting up to {plan.join_timeout_s:g} s for the controller at {plan.endpoint} (ctrl-C gives up)")
        if not _await_controller(plan, checked, signals, plan.join_timeout_s):
            raise PreflightError(
                f"no controller answered at {plan.endpoint} within {plan.join_timeout_s:g} s",
                help="start the first node's `keepstep run` (or `keepstep controller`) there; "
                "--rdzv-conf join_timeout=S waits longer",
            )
    name = _job_name(plan)
    assert name is not None
    run_dir = dirs.runs(state) / name
    if (run_dir / "exit.json").exists() and not dirs.is_live(run_dir):
        dirs.set_aside(run_dir)  # an earlier run of this name, on a disk that the host does not share
    dirs.furnish(run_dir)
    home = Home(name, run_dir, checked)
    home.token_file = os.path.abspath(plan.token_file) if plan.token_file else ""
    home.address = Address(host=checked.address, agent_port=plan.endpoint.port, http_port=0, pid=0)
    return home


def _await_controller(plan: Plan, checked: Checked, signals: Signals, timeout_s: float) -> bool:
    assert plan.endpoint is not None
    deadline = time.monotonic() + timeout_s
    strangers = 0
    while True:
        found = net.who_listens(checked.address, plan.endpoint.port)
        if found == "keepstep":
            return True
        strangers = strangers + 1 if found == "other" else 0
        if strangers >= STRANGERS:
            raise PreflightError(
                f"what listens at {plan.endpoint} is no keepstep controller",
                help="check host and port; keepstep is its own rendezvous and cannot share torchrun's or etcd's",
            )
        if time.monotonic() >= deadline:
            return False
        _pause(signals, PROBE_EVERY_S)


def _pause(signals: Signals, seconds: float) -> None:
    for number in signals.wait(seconds):
        raise Interrupted(number)


# ---------------------------------------------------------------- the node's part


def _take_node(home: Home, plan: Plan) -> None:
    """A name that no other launcher of the job has, and the memory that goes with it."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename.split(".")[0]).strip("-.")[:48] or "node"
    names = [plan.node_name] if plan.node_name else [host, *(f"{host}-{n}" for n in range(2, MAX_NAMESAKES))]
    for name in names:
        fd = dirs.lock(home.run_dir / dirs.NODES / f"{name}.lock")
        if fd is not None:
            home.hold(fd)
            home.node = name
            home.node_dir = dirs.node_dir(home.root, home.job, name)
            home.hold(dirs.make_node_dir(home.node_dir))
            # Reports of processes that are gone: the agent's first one says what there is now.
            (home.run_dir / "outbox" / name).unlink(missing_ok=True)
            return
    raise PreflightError(
        f"node name {names[-1]} is taken by another launcher of job {home.job}", help="choose another --node-name"
    )


def _write_agent(home: Home, plan: Plan, checked: Checked) -> None:
    assert home.node_dir is not None
    assert home.address is not None
    spec = JobSpec(
        job=JobId(home.job),
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=checked.nproc,
        standby_nodes=plan.standby_nodes,
        standbys=plan.standbys,
        max_restarts=plan.max_restarts,
        user_retries=plan.user_retries,
        hang_detect=plan.hang_detect,
        pace_window_s=plan.pace_window_s,
        allow_inject=plan.allow_inject,
        mode=plan.mode,
        protected=plan.protected,
        evictions_per_hour=plan.evictions_per_hour,
        snapshot_every=plan.snapshot_every,
        join_timeout_s=plan.join_timeout_s,
        last_call_s=plan.last_call_s,
        ckpt=plan.ckpt,
        layout=checked.layout,
        role=plan.role,
        command=(plan.program.target, *plan.program.args),
    )
    log_dir = Path(plan.log_dir).absolute() / home.job if plan.log_dir else home.run_dir / "logs"
    config = AgentConfig(
        spec=spec,
        program=plan.program,
        output=Output(log_dir=os.fspath(log_dir), console=plan.console, local_ranks_filter=plan.local_ranks_filter),
        node=home.node,
        host=checked.own,
        run_dir=os.fspath(home.run_dir),
        node_dir=os.fspath(home.node_dir),
        controller_host=home.address.host,
        controller_port=home.address.agent_port,
        launcher_pid=os.getpid(),
        node_rank=plan.node_rank,
        wants_standby=plan.wants_standby,
        rack=plan.rack,
        token_file=home.token_file,
        env={**({GUARD: plan.guard} if plan.guard else {}), **({ALLOW_TAINTED: "1"} if plan.allow_tainted else {})},
    )
    if plan.monitor_interval_s is not None:
        config = msgspec.structs.replace(config, monitor_interval_s=plan.monitor_interval_s)
    path = home.run_dir / dirs.NODES / f"{home.node}.json"
    write_atomic(path, msgspec.json.format(msgspec.json.encode(config)))
    home.agent_argv = python("keepstep.agent.main", path)


def _stem(plan: Plan) -> str:
    stem = Path(plan.program.target).stem if plan.program.kind != "module" else plan.program.target.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem).strip("-")[:24] or "job"


def _job_name(plan: Plan) -> str | None:
    """The given name; for several nodes else one that all of them can work out for themselves."""
    if plan.job is not None or plan.endpoint is None:
        return plan.job
    words = (str(plan.endpoint.port), plan.program.kind, os.path.basename(plan.program.target), *plan.program.args)
    return f"{_stem(plan)}-{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:6]}"
