"""Pretended hosts with a network of their own: one namespace per node on a bridge, and cuts between two of them.

A cut is a wrong permanent neighbour entry on both sides: what one sends to the other goes to a hardware address that
nobody has. Nothing is refused, the links stay up, and all other pairs talk on. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.cli.demo_cluster import Cluster

DEVICE = "eth0"
NOBODY = "02:00:00:00:00:ff"


def missing() -> str:
    """Why there can be no such network here; empty where there can."""
    if os.geteuid() != 0:
        return "it needs root"
    return next((f"{tool} is not installed" for tool in ("ip", "nsenter") if shutil.which(tool) is None), "")


class Hosts:
    """Namespaces ``0`` to ``count - 1``; the first address of the subnet is this machine's own.

    Args:
        subnet: three numbers of it; drawn from this process's number where left out, so that two runs do not meet.
    """

    def __init__(self, count: int, subnet: str = "") -> None:
        pid = os.getpid()
        tag = f"k{pid % 1_000_000}"
        self.subnet, self.count, self.bridge = subnet or f"10.{64 + pid % 128}.{pid // 128 % 250}", count, f"{tag}b"
        self.names = [f"{tag}-{index}" for index in range(count)]
        self._cuts: list[tuple[int, int]] = []

    def address(self, index: int) -> str:
        return f"{self.subnet}.{index + 2}"

    def up(self) -> None:
        """Raises ``subprocess.CalledProcessError``; take it down in any case."""
        lines = [f"link add {self.bridge} type bridge", f"addr add {self.subnet}.1/24 dev {self.bridge}"]
        lines += [f"link set {self.bridge} up", *(f"netns add {name}" for name in self.names)]
        for name in self.names:
            lines.append(f"link add {name} type veth peer name {DEVICE} netns {name}")
            lines += [f"link set {name} master {self.bridge}", f"link set {name} up"]
        _ip(lines)
        for index, name in enumerate(self.names):
            inside = ["link set lo up", f"addr add {self.address(index)}/24 dev {DEVICE}", f"link set {DEVICE} up"]
            _ip([*inside, f"route add default via {self.subnet}.1"], name)

    def words(self, index: int) -> list[str]:
        """Before a command, to run it on that host."""
        return ["nsenter", f"--net=/run/netns/{self.names[index]}"]

    def cut(self, one: int, other: int) -> None:
        self._cuts.append((one, other))
        for here, there in ((one, other), (other, one)):
            _ip([f"neigh replace {self.address(there)} lladdr {NOBODY} dev {DEVICE} nud permanent"], self.names[here])

    def heal(self) -> None:
        while self._cuts:
            one, other = self._cuts.pop()
            for here, there in ((one, other), (other, one)):
                _ip([f"neigh del {self.address(there)} dev {DEVICE}"], self.names[here])

    def down(self) -> None:
        for name in self.names:  # the namespace takes its end of the link along, and with it the other
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], stderr=subprocess.DEVNULL, check=False)


def _ip(lines: Sequence[str], name: str | None = None) -> None:
    words = ["ip", *(["-n", name] if name else []), "-batch", "-"]
    subprocess.run(words, input="\n".join(lines) + "\n", text=True, check=True, stdout=subprocess.DEVNULL)


class NetCluster(Cluster):
    """A cluster whose nodes have networks of their own. The controller runs on the first."""

    def __init__(self, home: Path, hosts: Hosts, *, environ: Mapping[str, str], **options: Any) -> None:
        # Host names mean nothing in here: gloo has to be told where it is.
        super().__init__(home, environ={**environ, "GLOO_SOCKET_IFNAME": DEVICE}, **options)
        self.hosts = hosts
        self.token = home / "token"

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.token.write_text(os.urandom(24).hex() + "\n")
        self.token.chmod(0o600)
        super().start()

    def command(self, name: str, *, node_rank: int | None, standby: bool) -> list[str]:
        assert node_rank is not None, "spares have no host"
        words = super().command(name, node_rank=node_rank, standby=standby)
        here = f"127.0.0.1:{self._port}"
        words[words.index(here)] = f"{self.hosts.address(0)}:{self._port}"
        at = words.index("run") + 1
        words[at:at] = ["--token-file", str(self.token), "--local-addr", self.hosts.address(node_rank)]
        return [*self.hosts.words(node_rank), *words]
