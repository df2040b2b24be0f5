"""Clocks of a node: how fast its processors and devices run, and whether heat holds them back.

Read at the end of each window from files of the kernel and, where there is one, from the driver's library; what cannot
be read is ``None``, never zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from keepstep.agent.nvml import Device, open_nvml
from keepstep.model.pace import NodePace

PROCESSORS = 16
"""Processors whose frequency is read, spread over the node: asking one that sleeps wakes it."""


class Devices(Protocol):
    """What a driver says of its devices; ``nvml`` and the tests' double."""

    def devices(self) -> Sequence[Device]:
        """Raises ``OSError`` where the driver does not answer."""
        ...


class Clocks:
    """One node's.

    Args:
        root: where ``/sys`` is.
        devices: the driver; found by itself where ``None``.
    """

    def __init__(self, root: Path = Path("/sys"), devices: Devices | None = None) -> None:
        self._cpus = root / "devices/system/cpu"
        self._devices = devices
        self._looked = devices is not None
        self._throttled: int | None = None

    def read(self) -> NodePace:
        """As it is now; throttling since the last call."""
        folders = _spread(sorted(self._cpus.glob("cpu[0-9]*/cpufreq")), PROCESSORS)
        now = _mean(folders, "scaling_cur_freq")
        limit = _mean(folders, "cpuinfo_max_freq")
        counted = self._counted()
        fresh = None if counted is None or self._throttled is None else max(0, counted - self._throttled)
        self._throttled = counted
        slowest = self._slowest()
        return NodePace(
            clock_mhz=now,
            clock_limit_mhz=limit,
            throttled=fresh,
            gpu_clock_mhz=slowest.clock_mhz if slowest else None,
            gpu_clock_limit_mhz=slowest.limit_mhz if slowest else None,
            gpu_reasons=slowest.reasons if slowest else (),
        )

    def _counted(self) -> int | None:
        """Events of all cores since the node was started, by the kernel's count."""
        found = [_number(path) for path in self._cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
        known = [count for count in found if count is not None]
        return sum(known) if known else None

    def _slowest(self) -> Device | None:
        if not self._looked:
            self._looked = True
            with contextlib.suppress(OSError):
                self._devices = open_nvml()
        if self._devices is None:
            return None
        try:
            found = self._devices.devices()
        except OSError:
            return None
        return min(found, key=lambda device: device.clock_mhz / (device.limit_mhz or 1.0), default=None)


def _spread(paths: Sequence[Path], count: int) -> Sequence[Path]:
    return paths[:: max(1, -(-len(paths) // count))]


def _mean(folders: Sequence[Path], name: str) -> float | None:
    """In MHz; the kernel says kHz."""
    found = [value for folder in folders if (value := _number(folder / name)) is not None]
    return round(sum(found) / len(found) / 1000, 1) if found else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
