"""Commands that change something: inject, stop, controller. They say what they will do, and ask once."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from keepstep.agent.files import write_atomic
from keepstep.cli import dirs, net
from keepstep.cli.children import python
from keepstep.cli.errors import UsageError
from keepstep.cli.plan import parse_endpoint
from keepstep.cli.preflight import check_token
from keepstep.cli.say import say
from keepstep.cli.show import hint, job_name
from keepstep.cli.source import find
from keepstep.cli.where import Where
from keepstep.controlplane.config import ControllerConfig
from keepstep.model.settings import Policy

NEEDS_RANK = ("kill", "freeze", "exception", "slow")
WHAT = {
    "kill": "kill -9 rank {rank}",
    "freeze": "stop rank {rank} with SIGSTOP",
    "node-loss": "kill everything on {place}, as a power cut would",
    "controller-loss": "kill -9 the controller",
    "store-loss": "kill -9 the rendezvous store",
    "exception": "raise an exception in the next step of rank {rank}",
    "slow": "let rank {rank} sleep for {seconds:g} s in its next step",
}


def order_fault(
    where: Where, job: str, fault: str, *, rank: int | None, node: str, seconds: float, yes: bool, dry_run: bool
) -> int:
    if fault in NEEDS_RANK and rank is None:
        raise UsageError(f"{fault} needs a rank", help=f"keepstep inject {fault} --rank 1")
    if fault == "node-loss" and rank is None and not node:
        raise UsageError("node-loss needs a node, or a rank on it", help="keepstep inject node-loss --node NAME")
    if fault == "slow" and seconds <= 0:
        raise UsageError("slow needs --seconds above 0", help=f"keepstep inject slow --rank {rank} --seconds 3")
    source = find(where, job)
    name = job_name(source, job)
    place = f"node {node}" if node else f"the node of rank {rank}"
    plan = f"{WHAT[fault].format(rank=rank, place=place, seconds=seconds)}, in job {name}"
    if not agreed(plan, yes=yes, dry_run=dry_run):
        return 0 if dry_run else 1
    body: dict[str, Any] = {"fault": fault, "by": who()}
    if rank is not None:
        body["rank"] = rank
    if node:
        body["node"] = node
    if seconds:
        body["seconds"] = seconds
    source.post("jobs", name, "inject", body=body)
    say(f"ordered: {plan}")
    hint(f"next: keepstep incidents {name}")
    return 0


def order_stop(where: Where, job: str, *, why: str, yes: bool, dry_run: bool) -> int:
    source = find(where, job)
    name = job_name(source, job)
    plan = f"stop job {name} on all its nodes"
    if not agreed(plan, yes=yes, dry_run=dry_run):
        return 0 if dry_run else 1
    source.post("jobs", name, "stop", body={"why": why, "by": who()})
    say(f"ordered: {plan}")
    hint(f"next: keepstep status {name}")
    return 0


def agreed(plan: str, *, yes: bool, dry_run: bool) -> bool:
    """Say what will be done; ask once, and only a person.

    Raises:
        UsageError: nobody is there to be asked.
    """
    if dry_run:
        say(f"would {plan}")
        return False
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"this would {plan}, and there is no terminal to ask at", help="add --yes, or --dry-run to only see it"
        )
    print(f"This will {plan}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.getuid()}"


def run_controller(
    run_dir: str,
    listen: str,
    http_port: int,
    token_file: str,
    *,
    mode: Literal["observe", "assist", "auto"] = "observe",
    protect: str = "",
) -> int:
    """Become a controller: this process is replaced by it, so signals and exit codes are its own.

    A controller of many jobs begins as an observer; that of a single job (``keepstep run``) does not.
    """
    endpoint = parse_endpoint(listen, 29400, "--listen")
    address = net.resolve(endpoint.host, endpoint.port)
    token_file = token_file or os.environ.get("KEEPSTEP_TOKEN_FILE", "")
    check_token(token_file, needed=not net.is_loopback(address), where=str(endpoint))
    home = Path(run_dir).absolute()
    dirs.furnish(home)
    config = ControllerConfig(
        run_dir=os.fspath(home),
        host=address,
        agent_port=endpoint.port,
        http_port=http_port,
        token_file=os.path.abspath(token_file) if token_file else "",
        policy=Policy(mode=mode, protected=tuple(name.strip() for name in protect.split(",") if name.strip())),
    )
    path = home / dirs.NODES / "controller.config.json"
    write_atomic(path, msgspec.json.format(msgspec.json.encode(config)))
    argv = python("keepstep.controlplane.main", path)
    say(f"controller for agents at {endpoint}; log in {home}; start jobs with --controller {endpoint}")
    sys.stdout.flush()
    os.execv(argv[0], argv)
