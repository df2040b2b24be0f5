"""NVML, the few words of it that tell how fast a GPU runs and why not faster.

Through the driver's own library and ctypes: an agent must start where there is neither a GPU nor a Python package for
it. Constants are those of nvml.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_CLOCK_SM = 1
_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""Idle, clocks that somebody has set, and sync boost are no trouble and are left out."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: its SM clock, what it is able to do, and why the driver holds it back."""

    index: int
    clock_mhz: float
    limit_mhz: float
    reasons: tuple[str, ...] = ()


class Nvml:
    """The library, loaded and initialised.

    Raises:
        OSError: there is none, or it does not work.
    """

    def __init__(self, library: Any = None) -> None:
        self._lib = ctypes.CDLL(LIBRARY) if library is None else library
        self._call("nvmlInit_v2")

    def devices(self) -> list[Device]:
        """All GPUs that this process may see.

        Raises:
            OSError: the driver does not answer.
        """
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> Device:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        now, limit, bits = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        self._call("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(_CLOCK_SM), ctypes.byref(now))
        self._call("nvmlDeviceGetMaxClockInfo", handle, ctypes.c_uint(_CLOCK_SM), ctypes.byref(limit))
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(bits))
        return Device(
            index=index,
            clock_mhz=float(now.value),
            limit_mhz=float(limit.value),
            reasons=tuple(name for bit, name in _REASONS.items() if bits.value & bit),
        )

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code != 0:
            raise OSError(code, f"{name} answers {code}")


def open_nvml() -> Nvml:
    """Raises ``OSError`` where there is no such library or no driver."""
    return Nvml()
