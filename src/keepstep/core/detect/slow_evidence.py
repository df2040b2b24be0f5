"""Evidence of slowness in words: how a rank's step is made up, and what a node's own clocks say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keepstep.core.detect.pace_stats import typical
from keepstep.model.ids import NodeId, Rank
from keepstep.model.pace import NodePace, RankPace

COOL = 0.85
"""A clock below so much of what the other nodes' clocks reach is held back."""
ALONE = 0.6
"""The same for a job of one node, against what the clock is able to do: clocks follow load, so it takes more."""
_HEAT = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_slowdown", "hw_power_brake", "sw_power_cap")
Machines = Sequence[Mapping[NodeId, NodePace]]


def parts_words(rank: Rank, node: NodeId, paces: Sequence[RankPace]) -> str:
    """``rank 5 on n2: 13.2 ms of 15.0 for itself (data 0.1, ...), steps 10 to 90``."""

    def ms(part: Callable[[RankPace], float]) -> float:
        return sum(map(part, paces)) / len(paces) * 1e3

    parts = {
        "data": ms(lambda p: p.data_s),
        "collection": ms(lambda p: p.gc_s),
        "snapshots": ms(lambda p: p.save_s),
        "no processor": ms(lambda p: p.starved_s),
        "on processors": ms(lambda p: p.cpu_s),
    }
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value >= 0.05)
    own, whole = ms(lambda p: p.own_s), ms(lambda p: p.step_s)
    inside = f" ({shown})" if shown else ""
    return f"rank {rank} on {node}: {own:.1f} of {whole:.1f} ms per step for itself{inside}, steps " + (
        f"{paces[0].first + 1} to {paces[-1].last}"
    )


def held_back(node: NodeId, machines: Machines) -> str:
    """Why the node's clocks are no match for the others', in every window; empty where they are."""
    return (
        _clock(node, machines, lambda m: _ratio(m.gpu_clock_mhz, m.gpu_clock_limit_mhz), _gpu_words)
        or _clock(node, machines, lambda m: _ratio(m.clock_mhz, m.clock_limit_mhz), _cpu_words)
        or _throttled(node, machines)
    )


def _clock(
    node: NodeId,
    machines: Machines,
    ratio: Callable[[NodePace], float | None],
    words: Callable[[NodePace], str],
) -> str:
    for window in machines:
        mine = ratio(window[node]) if node in window else None
        others = [one for name, pace in window.items() if name != node and (one := ratio(pace)) is not None]
        if mine is None or mine >= (COOL * typical(others) if others else ALONE):
            return ""
    return words(machines[-1][node])


def _throttled(node: NodeId, machines: Machines) -> str:
    """Heat that the kernel counted in every window, and on no other node."""
    counts = [window[node].throttled if node in window else None for window in machines]
    if not all(counts):
        return ""
    others = [pace.throttled for window in machines for name, pace in window.items() if name != node]
    return "" if any(others) else f"its processors were throttled {counts[-1]} times by heat in the last window"


def _ratio(now: float | None, limit: float | None) -> float | None:
    return None if now is None or not limit else now / limit


def _cpu_words(pace: NodePace) -> str:
    return f"clock {_ghz(pace.clock_mhz, 1)} of {_ghz(pace.clock_limit_mhz, 1)} GHz"


def _gpu_words(pace: NodePace) -> str:
    why = [name for name in pace.gpu_reasons if name in _HEAT]
    said = f" ({', '.join(why)})" if why else ""
    return f"GPU clock {_ghz(pace.gpu_clock_mhz, 2)} of {_ghz(pace.gpu_clock_limit_mhz, 2)} GHz{said}"


def _ghz(mhz: float | None, digits: int) -> str:
    return "?" if mhz is None else f"{mhz / 1000:.{digits}f}"
