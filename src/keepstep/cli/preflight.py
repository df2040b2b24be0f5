"""A look at the machine before anything is started or written: what cannot work is refused here, with exit code 66."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from keepstep.cli import dirs, net, policy
from keepstep.cli.errors import PreflightError
from keepstep.cli.plan import LOOPBACK, Plan
from keepstep.model import env
from keepstep.model.topology import Layout

MIN_RUNTIME_BYTES = 16 << 20
"""Free memory-backed space without which nothing can run: sockets, heartbeats and a small model's snapshots."""
LOW_RUNTIME_BYTES = 512 << 20
"""Below this the user is told, as snapshots of two steps per rank live there."""
COUNT_DEVICES_S = 120.0
"""How long counting devices may take (a cold import of torch on a busy file system)."""


class Checked(Struct, frozen=True, kw_only=True):
    """What the look at the machine found out.

    Attributes:
        address: numeric address of the endpoint; loopback for a job of one node.
        local: the address is this machine's, so the controller can be here.
        own: the address under which other nodes reach this one.
    """

    nproc: int
    address: str
    local: bool
    own: str
    root: Path
    remarks: tuple[str, ...]
    layout: Layout = Layout()


def check(plan: Plan, environ: Mapping[str, str] | None = None) -> Checked:
    """Look at everything that can be looked at without changing anything (but for making directories that were named).

    Raises:
        PreflightError: with the first thing that cannot work.
    """
    environ = os.environ if environ is None else environ
    check_program(plan)
    nproc = count_ranks(plan.nproc)
    layout = policy.fit(plan.layout, nproc * plan.max_nodes)
    address = LOOPBACK if plan.endpoint is None else net.resolve(plan.endpoint.host, plan.endpoint.port)
    local = plan.endpoint is None or net.is_local(address)
    check_token(plan.token_file, needed=not net.is_loopback(address), where=str(plan.endpoint or LOOPBACK))
    if plan.hosts == "must" and not local:
        raise PreflightError(
            f"--rdzv-conf is_host=1, but {plan.endpoint} is not an address of this machine",
            help="leave out is_host, or give this machine's address as --rdzv-endpoint",
        )
    root, remarks = check_runtime(dirs.runtime_root(environ), plan)
    check_state(dirs.state_dir(plan.state_dir, environ))
    check_log_dir(plan.log_dir)
    policy.check(plan.ckpt, dirs.state_dir(plan.state_dir, environ))
    own = net.resolve(plan.local_addr, 0) if plan.local_addr else _own(address, local, plan)
    return Checked(nproc=nproc, address=address, local=local, own=own, root=root, layout=layout, remarks=remarks)


def _own(address: str, local: bool, plan: Plan) -> str:
    return address if local else net.own_address_towards(address, plan.endpoint.port if plan.endpoint else 0)


def check_program(plan: Plan) -> None:
    """The script can be read (the module found, the program executed)."""
    target, kind = plan.program.target, plan.program.kind
    if kind == "module":
        sys.path.insert(0, os.getcwd())  # as `python -m` will
        try:
            found = importlib.util.find_spec(target.split(".")[0])
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            raise PreflightError(
                f"module {target} is not found", help=f"check that `{sys.executable} -m {target}` works here"
            )
    elif kind == "executable":
        if shutil.which(target) is None:
            raise PreflightError(
                f"program {target} is not found or not executable", help="check the path and its x bit"
            )
    else:
        path = Path(target)
        if path.is_dir() and (path / "__main__.py").is_file():
            path = path / "__main__.py"
        if not path.is_file():
            word = "is a directory" if path.is_dir() else "does not exist"
            raise PreflightError(
                f"training script {target} {word} (looked in {os.getcwd()})",
                help="check the path; modules are started with -m, other programs with --no-python",
            )
        if not os.access(path, os.R_OK):
            raise PreflightError(f"training script {target} cannot be read by this user", help=f"chmod +r {target}")


def count_ranks(text: str) -> int:
    """``--nproc-per-node``: a number, or a word that torch has to answer."""
    if text.isdecimal():
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    command = [sys.executable, "-P", "-m", "keepstep.cli.devices_torch", text]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_DEVICES_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise PreflightError(
            f"counting devices took longer than {COUNT_DEVICES_S:.0f} s", help="give a number"
        ) from error
    line = answer.stdout.strip()
    if line.isdecimal() and int(line) > 0:
        return int(line)
    why = line[1:] if line.startswith("!") else (answer.stderr.strip().splitlines() or ["no device"])[-1]
    if line == "0":
        why = "there are none"
    raise PreflightError(
        f"--nproc-per-node {text}: {why}", help="give the number of ranks, for example --nproc-per-node 2"
    )


def check_token(path: str, *, needed: bool, where: str) -> None:
    """A token where one is needed, and one that only its owner can read."""
    if not path:
        if needed:
            raise PreflightError(
                f"{where} is beyond loopback, and there is no token that keeps strangers out",
                help="`keepstep token new FILE`, copy FILE to every node, and add --token-file FILE",
            )
        return
    try:
        with open(path, "rb") as file:
            content, mode = file.read(4096).strip(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise PreflightError(
            f"token file {path} cannot be read: {error.strerror}", help=f"make one with `keepstep token new {path}`"
        ) from error
    if not content:
        raise PreflightError(f"token file {path} is empty", help="make another with `keepstep token new FILE`")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PreflightError(
            f"token file {path} can be read by others (mode {mode & 0o777:o})", help=f"chmod 600 {path}"
        )


def check_runtime(root: Path, plan: Plan) -> tuple[Path, tuple[str, ...]]:
    """The memory-backed directory is ours and has room."""
    way_out = f"set {env.RUNTIME_DIR} to a directory of yours on a memory-backed file system"
    base = _nearest(root)
    if base == root:
        owner = root.stat()
        if owner.st_uid != os.getuid():
            raise PreflightError(f"runtime directory {root} belongs to another user (uid {owner.st_uid})", help=way_out)
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise PreflightError(f"runtime directory {root} cannot be made or written", help=way_out)
    dirs.node_dir(root, plan.job or "j" * 40, plan.node_name or os.uname().nodename)
    room = os.statvfs(base)
    free = room.f_bavail * room.f_frsize
    if free < MIN_RUNTIME_BYTES or room.f_favail == 0 < room.f_files:
        raise PreflightError(
            f"no space in the runtime directory {root}: {free >> 20} MiB free, {MIN_RUNTIME_BYTES >> 20} MiB needed",
            help=f"free some (`df -h {base}`), enlarge /dev/shm, or {way_out}",
        )
    if free < LOW_RUNTIME_BYTES and plan.snapshot_every:
        return root, (f"only {free >> 20} MiB free in {root}, where two snapshots of every rank are kept",)
    return root, ()


def check_state(state: Path) -> None:
    """The log can be written."""
    base = _nearest(state)
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise PreflightError(
            f"state directory {state} cannot be made or written",
            help="set --state-dir (or KEEPSTEP_STATE_DIR) to one of yours",
        )
    room = os.statvfs(base)
    if room.f_bavail * room.f_frsize < MIN_RUNTIME_BYTES:
        raise PreflightError(
            f"no space in the state directory {state}", help=f"free some (`df -h {base}`), or set --state-dir"
        )


def check_log_dir(given: str | None) -> None:
    """The ranks' output can be written. The directory is made here, as only that tells for sure."""
    if given is None:
        return
    path = Path(given).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
        why = "" if usable else ": Permission denied"
    except OSError as error:
        usable, why = False, f": {error.strerror}"
    if not usable:
        raise PreflightError(f"--log-dir {given} cannot be made or written{why}", help="set --log-dir to one of yours")


def _nearest(path: Path) -> Path:
    """The path itself, or the first ancestor that exists."""
    for one in (path, *path.parents):
        with contextlib.suppress(OSError):
            if one.exists():
                return one
    return Path("/")
