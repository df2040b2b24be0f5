"""What was asked for, checked: from the flags of ``keepstep run`` to a frozen plan. Touches nothing on disk.

Everything that can be judged from the words alone is judged here; what needs a look at the machine (files, ports,
space) is in ``preflight``.
"""

from __future__ import annotations

import argparse
import re
import signal
from typing import Literal

from msgspec import Struct

from keepstep.agent.config import Program
from keepstep.cli import flags, policy
from keepstep.cli.errors import PreflightError, UsageError, closest
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout

STATIC_PORT = 29500
C10D_PORT = 29400
"""torchrun's own default ports of its two rendezvous backends."""
LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PACE_LEAST_S = 1.0
"""A shorter window holds too few steps to be compared, and agents would do little else."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_RDZV_KEYS = ("join_timeout", "last_call_timeout", "timeout", "is_host")
_RDZV_SILENT = (
    "rank",
    "close_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "use_libuv",
    "store_type",
)


class Endpoint(Struct, frozen=True):
    """Where the controller listens for agents."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Plan(Struct, frozen=True, kw_only=True):
    """A checked command line.

    Attributes:
        endpoint: ``None`` when this node is the whole job: the controller takes free ports on loopback.
        hosts: ``never`` (``--controller``, ``is_host=0``), ``must`` (``is_host=1``), ``maybe``: if the address is ours.
        nproc: as given; words like ``gpu`` are resolved by ``preflight``.
        console: per local rank, which streams are shown (``agent.config.Output``).
        layout: ``None`` when nothing was said; ``dp`` 0 is filled in by ``preflight``.
        remarks: one line each for the user: what has no effect.
    """

    program: Program
    job: str | None
    min_nodes: int
    max_nodes: int
    nproc: str
    endpoint: Endpoint | None
    hosts: Literal["never", "maybe", "must"]
    node_rank: int | None
    node_name: str | None
    wants_standby: bool
    standby_nodes: int
    standbys: int
    max_restarts: int
    user_retries: int
    snapshot_every: int
    hang_detect: str
    pace_window_s: float | None
    guard: str | None
    allow_tainted: bool
    allow_inject: bool
    mode: Literal["observe", "assist", "auto"] | None
    protected: tuple[str, ...]
    evictions_per_hour: int | None
    join_timeout_s: float
    last_call_s: float
    role: str
    local_addr: str | None
    token_file: str
    state_dir: str | None
    log_dir: str | None
    console: dict[str, int]
    local_ranks_filter: tuple[int, ...]
    monitor_interval_s: float | None
    signals: tuple[signal.Signals, ...]
    ckpt: CheckpointPolicy
    layout: Layout | None
    rack: str
    remarks: tuple[str, ...]

    @property
    def alone(self) -> bool:
        return self.endpoint is None


def make_plan(args: argparse.Namespace) -> Plan:
    """Judge the flags.

    Raises:
        UsageError: a flag's value cannot be meant.
        PreflightError: the flags are fine one by one, but ask for a world that cannot be.
    """
    remarks = [
        f"--{n.replace('_', '-')} has no effect here: {why}" for n, why in flags.NO_EFFECT.items() if n in args.given
    ]
    min_nodes, max_nodes = node_range(args.nnodes)
    conf = rdzv_conf(args.rdzv_conf, remarks)
    _check_numbers(args)
    _check_nodes(args, min_nodes, max_nodes)
    job = args.job or (args.rdzv_id if args.rdzv_id != "none" and not args.standalone else None)
    for what, name in (("--job", job), ("--node-name", args.node_name), ("--rack", args.rack or None)):
        if name is not None and not _NAME.fullmatch(name):
            hint = "use letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
            raise UsageError(f"{what} {name!r} is not a name", help=hint)
    endpoint = _endpoint(args, max_nodes, remarks)
    ckpt = policy.make(args)
    remarks += policy.idle_flags(ckpt, args.given)
    return Plan(
        program=_program(args),
        job=job,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc=args.nproc_per_node,
        endpoint=endpoint,
        hosts=_hosting(args, conf),
        node_rank=_node_rank(args, max_nodes),
        node_name=args.node_name,
        wants_standby=args.standby,
        standby_nodes=args.standby_nodes,
        standbys=args.standbys,
        max_restarts=args.max_restarts,
        user_retries=args.user_retries,
        snapshot_every=args.snapshot_every,
        hang_detect=hang_limit(args.hang_detect),
        pace_window_s=pace_window(args.pace_window),
        guard=args.guard,
        allow_tainted=args.allow_tainted,
        allow_inject=args.allow_inject,
        mode=args.mode,
        protected=tuple(dict.fromkeys(name.strip() for name in args.protect if name.strip())),
        evictions_per_hour=args.evictions_per_hour,
        join_timeout_s=_seconds(conf, "join_timeout", _seconds(conf, "timeout", 600.0)),
        last_call_s=_seconds(conf, "last_call_timeout", 30.0),
        role=args.role,
        local_addr=args.local_addr,
        token_file=args.token_file,
        state_dir=args.state_dir,
        log_dir=args.log_dir,
        console=console(args.redirects, args.tee),
        local_ranks_filter=_ranks(args.local_ranks_filter),
        monitor_interval_s=args.monitor_interval,
        signals=_signals(args.signals_to_handle),
        ckpt=ckpt,
        layout=policy.layout(args.layout),
        rack=args.rack,
        remarks=tuple(remarks),
    )


def node_range(text: str) -> tuple[int, int]:
    """``--nnodes``: ``4`` or ``2:4``."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not found:
        raise UsageError(f"--nnodes {text!r} is neither N nor MIN:MAX", help="for example --nnodes 4 or --nnodes 2:4")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {text}: needs 0 < MIN <= MAX", help="for example --nnodes 4 or --nnodes 2:4")
    return low, high


def rdzv_conf(text: str, remarks: list[str]) -> dict[str, str]:
    """``--rdzv-conf k1=v1,k2=v2``; keys without a meaning here are remarked on."""
    conf: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise UsageError(f"--rdzv-conf {text!r}: {item!r} is not KEY=VALUE", help="for example join_timeout=600")
        conf[key] = value
        if key in _RDZV_KEYS:
            continue
        near = closest(key, _RDZV_KEYS) if key not in _RDZV_SILENT else None
        remarks.append(f"--rdzv-conf {key} has no effect here" + (f"; did you mean {near}?" if near else ""))
    return conf


def _seconds(conf: dict[str, str], key: str, default: float) -> float:
    if key not in conf:
        return default
    try:
        value = float(conf[key])
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise UsageError(
            f"--rdzv-conf {key}={conf[key]} is not a number of seconds above 0", help=f"for example {key}=600"
        )
    return value


def parse_endpoint(text: str, default_port: int, flag: str) -> Endpoint:
    """``host``, ``host:port``, ``[v6]:port``."""
    found = re.fullmatch(
        r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)|([0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*))?(?::(\d+))?", text.strip()
    )
    if not found or int(found[4] or 0) > 65535:
        raise UsageError(f"{flag} {text!r} is not HOST:PORT", help="for example 10.0.0.1:29400 or [fd00::1]:29400")
    host = found[1] or found[2] or found[3] or "localhost"
    return Endpoint(host, default_port if found[4] is None else int(found[4]))


def hang_limit(text: str) -> str:
    """``auto``, ``off`` or a duration; normalised to seconds for the agent."""
    if text in ("auto", "off"):
        return text
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"--hang-detect {text!r} is not auto, off or a duration", help="for example 30s or 5m")
    return f"{seconds:g}s"


def pace_window(text: str | None) -> float | None:
    """Seconds; 0 for ``off``, ``None`` where nothing was asked for."""
    if text is None or text == "off":
        return None if text is None else 0.0
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds < PACE_LEAST_S:
        raise UsageError(f"--pace-window {text!r} is not off or a duration of at least 1s", help="for example 30s")
    return seconds


def console(redirects: str, tee: str) -> dict[str, int]:
    """Streams to show per local rank: what ``--redirects`` takes away, ``--tee`` gives back (1 out, 2 err)."""
    away, back = _std(redirects, "--redirects"), _std(tee, "--tee")
    ranks = [key for key in {**away, **back} if key != "*"]
    star_away, star_back = away.get("*", 0), back.get("*", 0)
    shown = {"*": (3 & ~star_away) | star_back}
    for rank in ranks:
        shown[rank] = (3 & ~away.get(rank, star_away)) | back.get(rank, star_back)
    return shown


def _std(text: str, flag: str) -> dict[str, int]:
    if re.fullmatch(r"[0-3]", text):
        return {"*": int(text)}
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return {str(int(rank)): int(value) for rank, value in (item.split(":") for item in text.split(","))}
    raise UsageError(
        f"{flag} {text!r} is neither 0..3 nor RANK:VALUE,..", help=f"for example {flag} 3 or {flag} 0:1,1:2"
    )


def _ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of numbers", help="for example 0,1,2")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            near = closest(name.upper(), signal.Signals.__members__)
            raise UsageError(
                f"--signals-to-handle: {name} cannot be handled",
                help=f"did you mean {near}?" if near and near != name else "for example SIGTERM,SIGINT,SIGUSR1",
            )
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (
        ("max_restarts", 0),
        ("standbys", 0),
        ("standby_nodes", 0),
        ("user_retries", 0),
        ("snapshot_every", 0),
    ):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be {least} or more")
    if args.evictions_per_hour is not None and args.evictions_per_hour < 0:
        raise UsageError(
            f"--evictions-per-hour {args.evictions_per_hour} must be 0 or more",
            help="0 leaves every eviction to a person; --mode assist does that, too",
        )
    if args.monitor_interval is not None and not 0 < args.monitor_interval <= 60:
        raise UsageError(f"--monitor-interval {args.monitor_interval} must be above 0 and at most 60 seconds")
    if args.master_port is not None and not 0 <= args.master_port <= 65535:
        raise UsageError(f"--master-port {args.master_port} is not a port (0..65535)")
    if re.fullmatch(r"-?\d+", args.nproc_per_node) and int(args.nproc_per_node) < 1:
        raise PreflightError(
            f"--nproc-per-node {args.nproc_per_node}: a world of no ranks cannot be met",
            help="give a number of 1 or more, or auto",
        )
    if args.node_rank is not None and args.node_rank < 0:
        raise UsageError(f"--node-rank {args.node_rank} must be 0 or more")


def _check_nodes(args: argparse.Namespace, min_nodes: int, max_nodes: int) -> None:
    if args.standby_nodes > max_nodes:
        raise PreflightError(
            f"--standby-nodes {args.standby_nodes} is larger than --nnodes {max_nodes}: spares that can never be used",
            help=f"ask for at most {max_nodes}",
        )
    if args.standalone and (min_nodes > 1 or args.standby_nodes or args.standby):
        raise PreflightError(
            f"--standalone is one node, but {min_nodes} with {args.standby_nodes} spare ones are asked for: "
            "this world can never be met",
            help="leave out --standalone and give --rdzv-endpoint HOST:PORT on every node",
        )
    if args.standalone and args.controller and "controller" in args.given:
        raise UsageError("--standalone brings its own controller, --controller names another", help="leave one out")
    if args.node_rank is not None and args.node_rank >= max_nodes and not args.standby:
        raise PreflightError(
            f"--node-rank {args.node_rank} is outside of --nnodes {args.nnodes}",
            help=f"ranks of nodes go from 0 to {max_nodes - 1}; a spare node is started with --standby",
        )
    if args.no_python and args.module and not args.run_path:
        raise UsageError("--no-python and --module exclude each other", help="leave one out")


def _endpoint(args: argparse.Namespace, max_nodes: int, remarks: list[str]) -> Endpoint | None:
    if args.controller and not args.standalone:
        endpoint = parse_endpoint(args.controller, 0, "--controller")
        if not endpoint.port:
            raise UsageError(f"--controller {args.controller!r} has no port", help="for example 10.0.0.1:29400")
        return endpoint
    several = max_nodes > 1 or args.standby_nodes > 0 or args.standby
    if args.standalone or not several:
        for name in ("rdzv_endpoint", "master_port"):
            if name in args.given and not args.standalone:
                remarks.append(f"--{name.replace('_', '-')} has no effect on a job of one node: free ports are used")
        return None
    if args.rdzv_endpoint:
        port = STATIC_PORT if args.rdzv_backend == "static" else C10D_PORT
        endpoint = parse_endpoint(args.rdzv_endpoint, port, "--rdzv-endpoint")
    elif args.rdzv_backend == "static":
        endpoint = parse_endpoint(args.master_addr, STATIC_PORT, "--master-addr")
        endpoint = Endpoint(endpoint.host, STATIC_PORT if args.master_port is None else args.master_port)
    else:
        endpoint = Endpoint("localhost", C10D_PORT)
    if not endpoint.port:
        raise UsageError(
            "port 0 cannot be found by the other nodes", help="give a fixed one: --rdzv-endpoint HOST:29400"
        )
    return endpoint


def _hosting(args: argparse.Namespace, conf: dict[str, str]) -> Literal["never", "maybe", "must"]:
    if args.controller and not args.standalone:
        return "never"
    word = conf.get("is_host", "").lower()
    if word in ("1", "true", "t", "yes", "y"):
        return "must"
    return "never" if word in ("0", "false", "f", "no", "n") else "maybe"


def _node_rank(args: argparse.Namespace, max_nodes: int) -> int | None:
    """Numbered where the user numbers (torchrun ignores it for c10d: pytorch issue 182223), else by arrival."""
    if args.standby:
        return None
    if args.node_rank is None and args.rdzv_backend == "static" and max_nodes == 1:
        return 0
    return args.node_rank if args.node_rank is None else int(args.node_rank)


def _program(args: argparse.Namespace) -> Program:
    kind: Literal["script", "module", "executable", "run_path"] = "script"
    if args.run_path:
        kind = "run_path"
    elif args.no_python:
        kind = "executable"
    elif args.module:
        kind = "module"
    return Program(kind=kind, target=args.training_script, args=tuple(args.training_script_args), start=args.start)
