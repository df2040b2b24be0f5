"""Flags of ``keepstep run``: torchrun's, with the same names, abbreviations and ``PET_*`` defaults, and ours.

argparse, because torchrun's behaviour *is* argparse's: abbreviations, ``--flag=value`` and everything after the
script belonging to the script. A test compares the list with the parser of the installed torch.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from keepstep.cli.errors import UsageError, closest

MAX_RESTARTS = 3
"""Whole-job restarts by default. torchrun's default is 0, which would make the upper rungs of recovery useless."""

DIFFERENT_DEFAULTS = {
    "max_restarts": MAX_RESTARTS,
    "monitor_interval": None,
    "node_rank": None,
    "start_method": None,
}
"""Where an absent flag means something else than in torchrun (None: what it means depends on the other flags)."""

NO_EFFECT = {
    "start_method": "how processes start is chosen with --start",
    "event_log_handler": "events are in the job's log: `keepstep job`",
    "logs_specs": "per-rank files are always written: `keepstep logs`",
    "numa_binding": "processes are not bound to CPUs",
    "virtual_local_rank": "LOCAL_RANK keeps its usual meaning",
    "shutdown_timeout": "processes that ignore SIGTERM are killed after 10 s",
    "duplicate_stdout_filters": "use `keepstep logs | grep`",
    "duplicate_stderr_filters": "use `keepstep logs | grep`",
}
"""torchrun flags that are accepted and do nothing here, with what serves instead."""

RDZV_BACKENDS = ("static", "c10d")
ENV_PREFIX = "PET_"


def _commas(value: str) -> list[str]:
    """Comma-separated list; a doubled comma stands for a comma (torchrun's ``--duplicate-*-filters``)."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


class RunParser(argparse.ArgumentParser):
    """argparse with two courtesies: errors are ``UsageError``, and our flags leave torchrun's abbreviations alone."""

    ours: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        raise UsageError(_plain(message), help=self._hint(message))

    def _hint(self, message: str) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", message):
            near = closest(word, known) if word not in known else None
            if near:
                return f"did you mean {near}? `keepstep run --help` lists all flags"
        return (
            "`keepstep run --help` lists all flags; the script comes after them: keepstep run [flags] train.py [args]"
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        theirs = [one for one in found if one[0].dest not in self.ours]
        kept: dict[str, Any] = {}
        for one in theirs or found:  # --x-y and --x_y of one flag are not two answers
            kept.setdefault(one[0].dest, one)
        return list(kept.values())


def _plain(message: str) -> str:
    missing = "the following arguments are required: training_script"
    if message.startswith(missing):
        return "no training script given"
    return message.replace("argument ", "flag ", 1)


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Read the command line of ``keepstep run``.

    The result has two attributes more than flags: ``given``, the names of the torchrun flags that the user set
    (by flag or ``PET_*``), and ``training_script_args``.

    Raises:
        UsageError: unknown flag, bad value, no script.
    """
    environ = os.environ if environ is None else environ
    parser = build_parser()
    defaults = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    preset = {action.dest: _preset(parser, action, environ) for action in parser._actions if _var(action) in environ}
    parser.set_defaults(**preset)
    found = parser.parse_args(list(argv))
    if found.rdzv_backend not in RDZV_BACKENDS:
        near = closest(found.rdzv_backend, RDZV_BACKENDS) or "c10d"
        raise UsageError(
            f"--rdzv-backend {found.rdzv_backend} is not available: keepstep's controller is the rendezvous",
            help=f"use --rdzv-backend {near} with --rdzv-endpoint HOST:PORT, or --controller HOST:PORT",
        )
    found.given = frozenset(
        name for name, value in vars(found).items() if name in preset or (name in defaults and value != defaults[name])
    )
    return found


def _var(action: argparse.Action) -> str:
    return str(getattr(action, "variable", ""))


def _preset(parser: RunParser, action: argparse.Action, environ: Mapping[str, str]) -> Any:
    """The default that ``PET_<FLAG>`` (or ours) gives. Switches: any integer, 0 is off, as in torchrun."""
    raw = environ[_var(action)]
    if action.nargs == 0:
        try:
            return bool(int(raw))
        except ValueError:
            parser.error(f"{_var(action)}={raw!r}: a switch is set by 1 and cleared by 0")
    return _typed(parser, action, raw)


def _typed(parser: RunParser, action: argparse.Action, raw: str) -> Any:
    convert = action.type
    if not callable(convert):
        return raw
    try:
        value = convert(raw)
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"{_var(action)}={raw!r} is not a valid value for {action.option_strings[0]}")
    if action.choices is not None and value not in action.choices:
        parser.error(f"{_var(action)}={raw!r}: choose from {', '.join(map(str, action.choices))}")
    return value


def build_parser() -> RunParser:
    """The parser; ``--help`` shows torchrun's groups first, then ours."""
    parser = RunParser(
        prog="keepstep run",
        usage="keepstep run [flags] [--] script.py [script's arguments]",
        description="Start training as torchrun does, and keep it going: takes torchrun's flags and PET_* environment.",
        epilog="Exit codes: 0 done; 64 usage; 65 configuration; 66 refused before start; 93 no progress; 138 requeue; "
        "else the first failing rank's own code. exit.json in the run directory is authoritative.",
    )
    _torchrun_size(parser)
    _torchrun_launch(parser)
    _torchrun_output(parser)
    theirs = {action.dest for action in parser._actions}
    _ours(parser)
    _automation(parser)
    _checkpoints(parser)
    parser.ours = frozenset(action.dest for action in parser._actions) - theirs
    parser.add_argument("training_script", help="program that runs on every rank, then its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _flag(group: argparse._ArgumentGroup, *names: str, env: str | None = None, **kwargs: Any) -> None:
    """Add a flag; with both spellings, and with its environment variable remembered for ``parse``."""
    both: list[str] = []
    for name in names:
        both += [name] + ([name[:2] + name[2:].replace("-", "_")] if "-" in name[2:] and name[:2] == "--" else [])
    action = group.add_argument(*both, **kwargs)
    action.variable = env if env is not None else ENV_PREFIX + action.dest.upper()  # type: ignore[attr-defined]


def _torchrun_size(parser: RunParser) -> None:
    group = parser.add_argument_group("size and rendezvous (as in torchrun)")
    _flag(group, "--nnodes", default="1:1", metavar="N|MIN:MAX", help="nodes of the job")
    _flag(group, "--nproc-per-node", default="1", metavar="N", help="ranks per node: a number, auto, gpu, cpu or xpu")
    _flag(group, "--rdzv-backend", default="static", metavar="NAME", help="static or c10d; both mean our controller")
    _flag(group, "--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the first node's controller listens")
    _flag(group, "--rdzv-id", default="none", metavar="ID", help="name of the job, the same on all nodes")
    _flag(group, "--rdzv-conf", default="", metavar="K=V,..", help="join_timeout, last_call_timeout, timeout, is_host")
    _flag(group, "--standalone", action="store_true", help="one node, free ports")
    _flag(group, "--node-rank", type=int, default=None, metavar="N", help="this node's number")
    _flag(group, "--master-addr", default="127.0.0.1", metavar="HOST", help="first node, for static rendezvous")
    _flag(group, "--master-port", type=int, default=None, metavar="PORT", help="port there (29500)")
    _flag(group, "--local-addr", default=None, metavar="HOST", help="address under which others reach this node")


def _torchrun_launch(parser: RunParser) -> None:
    group = parser.add_argument_group("launch (as in torchrun)")
    _flag(
        group, "--max-restarts", type=int, default=MAX_RESTARTS, metavar="N", help="whole-job restarts (3; torchrun: 0)"
    )
    _flag(
        group, "--monitor-interval", type=float, default=None, metavar="S", help="how often ranks are looked at (0.05)"
    )
    _flag(group, "--start-method", default=None, choices=["spawn", "fork", "forkserver"], help="no effect: see --start")
    _flag(group, "--event-log-handler", default="null", metavar="NAME", help="no effect: events are in the job's log")
    _flag(group, "--role", default="default", metavar="NAME", help="ROLE_NAME of the ranks")
    _flag(group, "-m", "--module", action="store_true", help="the script is a module, as in python -m")
    _flag(group, "--no-python", action="store_true", help="the script is a program, not Python")
    _flag(group, "--run-path", action="store_true", help="run the script with runpy.run_path")
    _flag(
        group,
        "--numa-binding",
        env="",
        default=None,
        choices=["node", "socket", "exclusive", "core-complex"],
        help="no effect",
    )
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    _flag(group, "--signals-to-handle", default=signals, metavar="NAMES", help=f"signals that end the job ({signals})")
    _flag(group, "--shutdown-timeout", type=int, default=None, metavar="S", help="no effect: 10 s, then SIGKILL")
    _flag(group, "--virtual-local-rank", action="store_true", help="no effect")


def _torchrun_output(parser: RunParser) -> None:
    group = parser.add_argument_group("output (as in torchrun; per-rank files are always written)")
    _flag(
        group, "--log-dir", default=None, metavar="DIR", help="per-rank files go to DIR/<job> (default: run directory)"
    )
    _flag(
        group,
        "-r",
        "--redirects",
        default="0",
        metavar="STD",
        help="streams to files only: 1 out, 2 err, 3 both, 0:3,1:2",
    )
    _flag(group, "-t", "--tee", default="0", metavar="STD", help="streams to files and console")
    _flag(group, "--local-ranks-filter", default="", metavar="N,..", help="show only these local ranks on the console")
    _flag(group, "--duplicate-stdout-filters", type=_commas, default=[], metavar="WORDS", help="no effect")
    _flag(group, "--duplicate-stderr-filters", type=_commas, default=[], metavar="WORDS", help="no effect")
    _flag(group, "--logs-specs", env="", default=None, metavar="NAME", help="no effect")


def _ours(parser: RunParser) -> None:
    group = parser.add_argument_group("keepstep")
    _flag(group, "--job", env="KEEPSTEP_JOB_NAME", default=None, metavar="NAME", help="name of the job (or --rdzv-id)")
    _flag(
        group,
        "--standbys",
        env="KEEPSTEP_STANDBYS",
        type=int,
        default=1,
        metavar="N",
        help="warm processes per node (1)",
    )
    _flag(
        group, "--standby-nodes", env="KEEPSTEP_STANDBY_NODES", type=int, default=0, metavar="K", help="spare nodes (0)"
    )
    _flag(group, "--standby", env="KEEPSTEP_STANDBY", action="store_true", help="this node is a spare one")
    _flag(
        group, "--controller", env="KEEPSTEP_CONTROLLER", default=None, metavar="HOST:PORT", help="use this controller"
    )
    _flag(group, "--token-file", env="KEEPSTEP_TOKEN_FILE", default="", metavar="FILE", help="needed beyond loopback")
    _flag(
        group,
        "--hang-detect",
        env="KEEPSTEP_HANG_DETECT",
        default="auto",
        metavar="auto|off|30s",
        help="limit for silence",
    )
    _flag(
        group,
        "--pace-window",
        env="KEEPSTEP_PACE_WINDOW",
        metavar="30s|off",
        help="ranks' own times per step are compared once in so long; the controller's policy where not given",
    )
    _flag(
        group,
        "--snapshot-every",
        env="KEEPSTEP_SNAPSHOT_EVERY",
        type=int,
        default=1,
        metavar="N",
        help="steps; 0 is off",
    )
    _flag(
        group,
        "--user-retries",
        env="KEEPSTEP_USER_RETRIES",
        type=int,
        default=1,
        metavar="N",
        help="of a script's error",
    )
    _flag(
        group,
        "--guard",
        env="KEEPSTEP_GUARD",
        default=None,
        choices=["off", "observe", "on"],
        help="losses, gradients, replicas: off, observe (tell) or on (act); see keepstep.Guard",
    )
    _flag(
        group, "--allow-inject", env="KEEPSTEP_ALLOW_INJECT", action="store_true", help="let `keepstep inject` break it"
    )
    _flag(
        group,
        "--start",
        env="KEEPSTEP_START",
        default="auto",
        choices=["auto", "fork", "spawn"],
        help="fork: warm start",
    )
    _flag(group, "--state-dir", env="KEEPSTEP_STATE_DIR", default=None, metavar="DIR", help="home of run directories")
    _flag(
        group,
        "--node-name",
        env="KEEPSTEP_NODE_NAME",
        default=None,
        metavar="NAME",
        help="unique in the job (host name)",
    )
    _flag(
        group,
        "--rack",
        env="KEEPSTEP_RACK",
        default="",
        metavar="NAME",
        help="this node's rack: copies are kept in another one",
    )
    _flag(
        group,
        "--layout",
        env="KEEPSTEP_LAYOUT",
        default="",
        metavar="tp=8,pp=8,dp=32",
        help="parallel groups: copies are kept outside of them",
    )


def _automation(parser: RunParser) -> None:
    group = parser.add_argument_group("automation (what may be done to nodes that live; the dead are always replaced)")
    _flag(
        group,
        "--mode",
        env="KEEPSTEP_MODE",
        default=None,
        choices=["observe", "assist", "auto"],
        help="observe: only say it; assist: ask a person (`keepstep approve`); auto: act within the limits (auto)",
    )
    _flag(
        group,
        "--protect",
        env="KEEPSTEP_PROTECT",
        type=_commas,
        default=[],
        metavar="NODE,..",
        help="nodes that only a person may take out",
    )
    _flag(
        group,
        "--evictions-per-hour",
        env="KEEPSTEP_EVICTIONS_PER_HOUR",
        type=int,
        default=None,
        metavar="N",
        help="living nodes that may be taken out without a person, then the breaker opens (4)",
    )


def _checkpoints(parser: RunParser) -> None:
    """What they mean is in ``policy``."""
    group = parser.add_argument_group("checkpoints (with keepstep.init in the script)")

    def add(name: str, metavar: str, help: str, *, default: Any = "", type: Any = str) -> None:
        variable = f"KEEPSTEP_{name[2:].upper().replace('-', '_')}"
        _flag(group, name, env=variable, default=default, type=type, metavar=metavar, help=help)

    add("--ckpt-dir", "URL", "durable generations: a path that all nodes reach, or s3://, gs://, az://, file://")
    add("--ckpt-local-dir", "PATH", "the same on each node's own disk")
    add("--ckpt-every", "N", "steps between durable generations (100)", default=100, type=int)
    add("--ckpt-full-every", "N", "every N-th is full, the others hold differences (1)", default=1, type=int)
    add("--ckpt-keep", "N", "newest generations that are kept (3)", default=3, type=int)
    add("--ckpt-keep-every", "N", "keep those whose step is a multiple of N (0: none)", default=0, type=int)
    add("--ckpt-keep-for", "24h", "keep those that are younger")
    add("--ckpt-sdc-window", "6h", "keep one that is older: silent corruption is found late")
    add("--ckpt-overhead", "1%", "share of a step that snapshots may take: chooses their interval")
    add("--ckpt-rate-peer", "500MB/s", "limit for copies into other nodes' memory (none)")
    add("--ckpt-rate-local", "500MB/s", "limit for the local disk (none)")
    add("--ckpt-rate-remote", "500MB/s", "limit for --ckpt-dir (none)")
    _flag(
        group,
        "--no-resume",
        env="KEEPSTEP_NO_RESUME",
        action="store_true",
        help="start at step 0 although there are generations",
    )
    _flag(
        group,
        "--allow-tainted",
        env="KEEPSTEP_ALLOW_TAINTED",
        action="store_true",
        help="resume also from generations that silent corruption may have spoilt",
    )
