"""Policy: what the flags about checkpoints mean, and what can be known to be wrong with them before a run.

``make`` judges the words alone; ``fit`` and ``check`` need the world's size and a look at the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from keepstep.cli.errors import PreflightError, UsageError, closest
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout

SCHEMES = ("file", "s3", "gs", "az")
"""Of ``--ckpt-dir``; a text without a scheme is a path."""
EXTRA = "pip install 'keepstep[checkpoint]'"
MAX_OVERHEAD = 0.5
"""Share of a step above which a budget cannot be meant."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B|bit)(?:/s)?")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_LEAST = {"ckpt_every": 1, "ckpt_full_every": 1, "ckpt_keep": 1, "ckpt_keep_every": 0}


def make(args: argparse.Namespace) -> CheckpointPolicy:
    """The policy that the flags mean.

    Raises:
        UsageError: names the flag, its value and the way out.
    """
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value < least:
            raise UsageError(
                f"{_spelled(name)} {value} must be {least} or more",
                help=f"for example {_spelled(name)} {least or 1000}",
            )
    policy = CheckpointPolicy(
        overhead=share(args.ckpt_overhead, "--ckpt-overhead"),
        dir=place(args.ckpt_dir, "--ckpt-dir"),
        local_dir=local_place(args.ckpt_local_dir, "--ckpt-local-dir"),
        every=args.ckpt_every,
        full_every=args.ckpt_full_every,
        keep=args.ckpt_keep,
        keep_every=args.ckpt_keep_every,
        keep_s=duration(args.ckpt_keep_for, "--ckpt-keep-for"),
        sdc_window_s=duration(args.ckpt_sdc_window, "--ckpt-sdc-window"),
        peer_rate=rate(args.ckpt_rate_peer, "--ckpt-rate-peer"),
        local_rate=rate(args.ckpt_rate_local, "--ckpt-rate-local"),
        remote_rate=rate(args.ckpt_rate_remote, "--ckpt-rate-remote"),
        resume=not args.no_resume,
    )
    if policy.dir and policy.dir == policy.local_dir:
        raise UsageError(
            f"--ckpt-dir and --ckpt-local-dir are both {policy.dir}: one is shared by all nodes, the other is not",
            help="leave one out",
        )
    return policy


def idle_flags(policy: CheckpointPolicy, given: frozenset[str]) -> list[str]:
    """Remarks on flags that have nothing to act upon."""
    need_any = ("every", "full_every", "keep", "keep_every", "keep_for", "sdc_window")
    remarks = []
    for names, there, need in (
        (need_any, policy.dir or policy.local_dir, "--ckpt-dir or --ckpt-local-dir"),
        (("rate_remote",), policy.dir, "--ckpt-dir"),
        (("rate_local",), policy.local_dir, "--ckpt-local-dir"),
    ):
        idle = [_spelled(f"ckpt_{name}") for name in names if f"ckpt_{name}" in given]
        if idle and not there:
            remarks.append(f"{', '.join(idle)} without effect: there is no {need}")
    return remarks


# ---------------------------------------------------------------- words


def share(text: str, flag: str) -> float:
    """``1%`` or ``0.01``; 0 where nothing was said."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value <= MAX_OVERHEAD:
        raise UsageError(
            f"{flag} {text!r} is no share between 0% and {MAX_OVERHEAD:.0%}", help=f"for example {flag} 1%"
        )
    return value


def duration(text: str, flag: str) -> float:
    """``90s``, ``30m``, ``24h``, ``7d`` in seconds; 0 where nothing was said."""
    if text in ("", "0"):
        return 0.0
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{flag} {text!r} is not a duration", help=f"for example {flag} 24h (s, m, h and d are known)")
    return float(found[1]) * _SECONDS[found[2]]


def rate(text: str, flag: str) -> int:
    """``500MB/s``, ``2GiB/s``, ``25Gbit/s`` in bytes per second; 0, no limit, where nothing was said."""
    if text in ("", "0"):
        return 0
    found = _RATE.fullmatch(text.strip())
    value = 0
    if found:
        base = 1024 if found[3] else 1000
        value = int(float(found[1]) * base ** _POWER[found[2]] / (8 if found[4] == "bit" else 1))
    if value <= 0:
        raise UsageError(
            f"{flag} {text!r} is not a rate",
            help=f"for example {flag} 500MB/s, 2GiB/s or 25Gbit/s; leave it out for no limit",
        )
    return value


def place(text: str, flag: str) -> str:
    """A path, made absolute, or a URL of a known scheme."""
    if not text:
        return ""
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme not in SCHEMES:
        near = closest(parts.scheme, SCHEMES)
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(
            f"{flag} {text!r}: there is no {parts.scheme}:// here",
            help=f"did you mean {near}://? known: a path, {known}" if near else f"known: a path, {known}",
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or len(parts.path) < 2:
            raise UsageError(
                f"{flag} {text!r} names no directory of this machine", help="for example file:///data/ckpt"
            )
        return os.path.abspath(parts.path)
    if not parts.netloc:
        raise UsageError(f"{flag} {text!r} names no bucket", help=f"for example {parts.scheme}://bucket/prefix")
    return text.rstrip("/")


def local_place(text: str, flag: str) -> str:
    """A path, made absolute."""
    found = place(text, flag)
    if "://" in found:
        raise UsageError(
            f"{flag} {text!r} is not on this node's disk", help="give the URL as --ckpt-dir, or a path here"
        )
    return found


def layout(text: str, flag: str = "--layout") -> Layout | None:
    """``tp=8,pp=8,dp=32``; what is left out is 1, but for ``dp``: 0, the rest of the world (see ``fit``)."""
    if not text:
        return None
    sizes = {"dp": 0}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", item)
        if not found or found[1] not in ("tp", "pp", "dp") or int(found[2]) < 1:
            raise UsageError(
                f"{flag} {text!r}: {item.strip()!r} is none of tp=N, pp=N, dp=N",
                help=f"for example {flag} tp=8,pp=8,dp=32",
            )
        sizes[found[1]] = int(found[2])
    return Layout(**sizes)


# ---------------------------------------------------------------- the world and the machine


def fit(wanted: Layout | None, world: int) -> Layout:
    """The layout for a world of that size.

    Raises:
        PreflightError: the world cannot be arranged so.
    """
    if wanted is None:
        return Layout()
    inner = wanted.tp * wanted.pp
    dp = wanted.dp or world // inner
    if inner * dp != world:
        product = " x ".join(
            f"{name} {size}" for name, size in (("tp", wanted.tp), ("pp", wanted.pp), ("dp", wanted.dp)) if size
        )
        raise PreflightError(
            f"--layout: {product} does not make the {world} ranks of this job",
            help="tp x pp x dp must be nodes x ranks per node; dp may be left out",
        )
    return Layout(tp=wanted.tp, pp=wanted.pp, dp=dp)


def check(policy: CheckpointPolicy) -> None:
    """Extras are installed and directories can be written: made, written, fsynced, removed again.

    Raises:
        PreflightError: with the first thing that cannot work.
    """
    if "://" in policy.dir and not _installed("obstore"):
        raise PreflightError(f"--ckpt-dir {policy.dir} needs obstore, which is not installed", help=EXTRA)
    if policy.full_every > 1 and not (_installed("zstandard") and _installed("numpy")):
        raise PreflightError(f"--ckpt-full-every {policy.full_every} needs zstandard and numpy", help=EXTRA)
    for flag, where in (("--ckpt-dir", policy.dir), ("--ckpt-local-dir", policy.local_dir)):
        if where and "://" not in where:
            check_directory(Path(where), flag)


def check_directory(path: Path, flag: str) -> None:
    """Raises ``PreflightError`` where generations could not be written."""
    probe = path / f".keepstep-probe.{socket.gethostname()}.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"keepstep")
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
    except OSError as error:
        raise PreflightError(
            f"{flag} {path} cannot be written: {error.strerror}",
            help=f"set {flag} to a directory of yours that has room",
        ) from error


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
