"""Questions to the network, each with a deadline: whose address is this, who listens there?"""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

from keepstep.cli.errors import PreflightError
from keepstep.model.ids import JobId, NodeId
from keepstep.model.topology import JobSpec
from keepstep.model.wire import AgentHello, ControllerToAgent, FrameError, Refused, Unpacker, pack

PROBE_S = 2.0
"""How long one probe may take altogether."""


def resolve(host: str, port: int) -> str:
    """The numeric address of ``host``; IPv4 first, as torch's stores do.

    Raises:
        PreflightError: the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PreflightError(
            f"host {host!r} cannot be resolved: {error.strerror or error}",
            help="check the name, or give the numeric address of the first node",
        ) from error
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_local(address: str) -> bool:
    """Whether the address is one of this machine's: only then can a socket be bound to it."""
    return bind_error(address, 0) is None


def bind_error(address: str, port: int) -> str | None:
    """Why a listener on the address and port is impossible; ``None`` when it is possible."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def own_address_towards(address: str, port: int) -> str:
    """The address of ours that packets to ``address`` carry; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port or 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"


def who_listens(address: str, port: int) -> Literal["nobody", "keepstep", "other"]:
    """Introduce ourselves with an impossible protocol number: a controller answers with a refusal, nobody else does."""
    spec = JobSpec(job=JobId("probe"), min_nodes=1, max_nodes=1, nproc_per_node=1)
    hello = AgentHello(protocol=0, version="probe", job=spec.job, node=NodeId("probe"), boot="probe", spec=spec)
    answers: Unpacker[ControllerToAgent] = Unpacker(ControllerToAgent)
    try:
        with _connect(address, port) as line:
            line.sendall(pack(hello))
            while data := line.recv(65536):
                for frame in answers.feed(data):
                    return "keepstep" if isinstance(frame, Refused) else "other"
    except (ConnectionRefusedError, socket.gaierror):
        return "nobody"
    except TimeoutError:
        return "other" if _accepts(address, port) else "nobody"
    except FrameError:
        return "other"
    except OSError as error:
        return "other" if isinstance(error, ConnectionResetError) else "nobody"
    return "other"


def _accepts(address: str, port: int) -> bool:
    try:
        _connect(address, port).close()
    except OSError:
        return False
    return True


def _connect(address: str, port: int) -> socket.socket:
    """Connect from any port but ``port`` itself.

    A probe of a free port of our own would otherwise sooner or later connect to itself (TCP simultaneous open), and
    keep the controller that is about to listen there from binding.
    """
    line = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        line.settimeout(PROBE_S)
        line.bind(("", 0))
        if line.getsockname()[1] == port:
            return _connect(address, port)
        line.connect((address, port))
    except BaseException:
        line.close()
        raise
    return line
