"""The loopback link of a network namespace of our own: cut for some seconds, and whole again.

Everything of the soak talks over 127.0.0.1. In a namespace of its own that link can be taken down for all processes of
the job at once, as a flapping switch port would do, and nobody else on the machine notices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

_IFREQ = struct.Struct("16sH22x")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
PROBE_LIMIT_S = 10.0
CONNECT_LIMIT_S = 5.0


def enter_namespace(inside: str, words: Sequence[str]) -> str:
    """Run this program again in a network namespace of its own, where that is allowed.

    Args:
        inside: name of the flag that the new image is started with; when it is in ``words`` we are there already.

    Returns:
        Empty inside the namespace; else why there is none.
    """
    if inside in words:
        set_link(up=True)
        return ""
    unshare = shutil.which("unshare")
    if unshare is None:
        return "there is no unshare command"
    command = [unshare, "--net"] if os.geteuid() == 0 else [unshare, "--user", "--map-root-user", "--net"]
    # The probe does what the soak will do, so that a refusal is known before our own image is given up.
    probe = [*command, sys.executable, __file__]
    try:
        tried = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    if tried.returncode == 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(unshare, [*command, sys.executable, *words, inside])
    return f"{' '.join(command)}: {(tried.stderr.strip().splitlines() or ['refused'])[-1]}"


def set_link(*, up: bool) -> None:
    """Take ``lo`` of our namespace up or down.

    Raises:
        OSError: not permitted, or it is up and 127.0.0.1 still cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags))
    if up:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_LIMIT_S).close()


@contextlib.contextmanager
def link_down(set_to: Callable[..., None] = set_link) -> Iterator[None]:
    """The link is down within the block, and up after it whatever happens."""
    set_to(up=False)
    try:
        yield
    finally:
        set_to(up=True)


if __name__ == "__main__":  # the probe of enter_namespace, and nothing for a namespace that others live in
    set_link(up=True)
    with link_down():
        pass
