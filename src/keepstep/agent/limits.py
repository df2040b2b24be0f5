"""How long a rank may be silent. Pure: step times and a phase in, a number of seconds out.

A fixed limit is either too long (torch's default is 30 minutes) or raises false alarms, so the limit comes from the
job's own step times, with a floor that no pause of a few seconds can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.agent.exceptions import BadConfig
from keepstep.model.beat import Phase

KEPT_STEPS = 200
"""Step times remembered per rank."""
KNOWN_STEPS = 5
"""Below this many the rhythm is not known."""
FLOOR_S = 10.0
FACTOR = 8.0
QUANTILE = 0.95
SETUP_S = 600.0
"""Before the rhythm is known: imports, data, first compilation."""
SLOW_PHASE_S = 1800.0
"""Evaluation, checkpoint, compilation and whatever a script names itself."""
UNINTERRUPTIBLE_STEP_S = 30.0
"""State D within a step: a hung disk, network file system or driver call."""
UNINTERRUPTIBLE_S = 600.0
"""State D elsewhere: a checkpoint may wait long for storage."""
PARKED_SILENT_S = 60.0
"""A parked standby shows a sign of life every second; after so long without one it would not take a seat either."""
AGENT_GAP_S = 1.0
"""Between two looks of an agent that runs; more means that it was stopped itself."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class HangDetect:
    """``--hang-detect``: derive the limit (``auto``), none at all (``off``), or so many seconds within a step."""

    mode: Literal["auto", "off", "fixed"]
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> HangDetect:
        if text in ("auto", "off"):
            return cls(mode="auto" if text == "auto" else "off")
        for unit in ("ms", "s", "m", "h"):
            number = text.removesuffix(unit)
            if number != text and number.replace(".", "", 1).isdigit() and float(number) > 0:
                return cls(mode="fixed", seconds=float(number) * _UNITS[unit])
        raise BadConfig(f"hang_detect ({text!r}) must be 'auto', 'off' or a duration such as '30s' or '5m'")


def quantile(values: Sequence[int], q: float) -> int:
    """The ``q``-quantile by the nearest rank; robust, and exact for few values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def stall_limit_s(phase: Phase, steps_ns: Sequence[int], hang: HangDetect) -> float | None:
    """Silence after which a rank in ``phase`` counts as stalled; ``None``: never."""
    if hang.mode == "off":
        return None
    match phase:
        case Phase.PARKED | Phase.DONE | Phase.RECOVERING:
            # Recovery has a deadline of its own (``rebuild_s``), kept by the controller; see ``agent.restores``.
            return None
        case Phase.STARTING | Phase.SETUP:
            return SETUP_S
        case Phase.EVALUATION | Phase.CHECKPOINT | Phase.COMPILE | Phase.OTHER:
            return SLOW_PHASE_S
        case Phase.STEP:
            if hang.mode == "fixed":
                return hang.seconds
            if len(steps_ns) < KNOWN_STEPS:
                return SETUP_S
            return max(FLOOR_S, FACTOR * quantile(steps_ns, QUANTILE) / 1e9)


def frozen_limit_s(state: str, phase: Phase, frozen_s: float, hang: HangDetect) -> float | None:
    """How long the kernel may show a process in ``state`` before it counts as frozen; ``None``: as long as it likes."""
    if hang.mode == "off":
        return None
    if state == "T":
        return frozen_s
    if state == "D":
        return UNINTERRUPTIBLE_STEP_S if phase is Phase.STEP else UNINTERRUPTIBLE_S
    return None
