"""Where the controller listens, and how others find it: sockets, ``controller.json``, and one controller per log.

Free ports are taken from below the kernel's range for outgoing connections. An agent that keeps trying to reach a
controller which is just restarting would otherwise, sooner or later, be given the controller's own port as its source
port, connect to itself (TCP simultaneous open) and keep the controller from coming back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint.files import write_atomic
from keepstep.controlplane.exceptions import PreflightFailed

ADDRESS_FILE = "controller.json"
LOCK_FILE = "controller.lock"
BACKLOG = 4096
FIRST_FREE_PORT = 20_000
FREE_PORT_TRIES = 256
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Address(Struct, frozen=True, kw_only=True):
    """``<run_dir>/controller.json``: written once the controller listens on both ports."""

    host: str
    agent_port: int
    http_port: int
    pid: int
    token_file: str = ""
    version: str = ""


def read_address(run_dir: Path) -> Address | None:
    """The address of the controller that runs, or last ran, on ``run_dir``; ``None`` if there is none to be read."""
    try:
        return msgspec.json.decode((run_dir / ADDRESS_FILE).read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def write_address(run_dir: Path, address: Address) -> None:
    """Replace ``controller.json`` as a whole: a reader sees the old one or the new one."""
    write_atomic(run_dir / ADDRESS_FILE, msgspec.json.format(msgspec.json.encode(address)) + b"\n", durable=True)


@contextlib.contextmanager
def sole_controller(run_dir: Path) -> Iterator[None]:
    """Hold ``controller.lock`` for as long as the context lasts; the kernel lets go of it when the process dies.

    Raises:
        PreflightFailed: another controller holds it, or the file cannot be made.
    """
    path = run_dir / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PreflightFailed(f"cannot open {path}: {error.strerror}; check the directory's permissions") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise PreflightFailed(
                f"another controller (pid {holder}) holds {path}: use that one, or stop it before starting another"
            ) from None
        with contextlib.suppress(OSError):  # the pid is for people; a full disk must not keep us from starting
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, what: str, last: int = 0, seed: str = "") -> socket.socket:
    """A listening socket on ``port``; with port 0 on ``last`` if it is still free, else on any free one.

    Raises:
        PreflightFailed: the port is taken, or the host is not one of ours.
    """
    if port:
        try:
            return _open(host, port)
        except OSError as error:
            raise PreflightFailed(_why(host, port, what, error)) from error
    low = _first_ephemeral()
    free = range(FIRST_FREE_PORT, low) if low > FIRST_FREE_PORT + FREE_PORT_TRIES else range(low, 65_536)
    start = zlib.crc32(f"{seed}/{what}".encode())
    candidates = [free[(start + i) % len(free)] for i in range(FREE_PORT_TRIES)]
    for candidate in [last, *candidates, 0] if last else [*candidates, 0]:
        try:
            return _open(host, candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise PreflightFailed(_why(host, candidate, what, error)) from error
    raise PreflightFailed(f"no free port for {what} on host {host!r}; name one with agent_port and http_port")


def _open(host: str, port: int) -> socket.socket:
    """Bind and listen in one go: with SO_REUSEADDR only ``listen`` tells that somebody else has the port."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _why(host: str, port: int, what: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} for {what} is in use on host {host!r}: stop who has it, or choose another (0 takes any)"
    reason = error.strerror or error
    return f"cannot listen on host {host!r} port {port} for {what}: {reason}; is it an address of this machine?"


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
