"""Pace: how the time of each rank's steps was spent in one window, and over which connections it was slow."""

from __future__ import annotations

from msgspec import Struct

from keepstep.model.ids import Rank


class LinkPace(Struct, frozen=True, kw_only=True):
    """Traffic of one rank with one other host within a window, from the kernel's books of its connections.

    Attributes:
        host: the other end's address.
        bytes: sent and acknowledged.
        resent: segments that had to be sent again.
        rtt_ms: smoothed round trip at the end of the window.
        blocked_s: time in which there was something to send and the network did not take it.
    """

    host: str
    bytes: int = 0
    resent: int = 0
    rtt_ms: float = 0.0
    blocked_s: float = 0.0


class RankPace(Struct, frozen=True, kw_only=True):
    """One rank, seconds per step on average unless said otherwise.

    Attributes:
        first, last: committed steps at the window's begin and end.
        step_s: commit to commit.
        wait_s: of these, inside collectives: waiting for others or for the network.
        data_s: waiting for data.
        gc_s: in the interpreter's garbage collection.
        save_s: held up by snapshots.
        starved_s: ready to run, and without a processor.
        cpu_s: on a processor, all threads.
        size: elements of input per step where the SDK knows them; 0 where not.
    """

    rank: Rank
    first: int
    last: int
    step_s: float
    wait_s: float = 0.0
    data_s: float = 0.0
    gc_s: float = 0.0
    save_s: float = 0.0
    starved_s: float = 0.0
    cpu_s: float = 0.0
    size: int = 0
    links: tuple[LinkPace, ...] = ()

    @property
    def own_s(self) -> float:
        """What the rank took for itself: step time net of waiting for others."""
        return max(0.0, self.step_s - self.wait_s)

    @property
    def work_s(self) -> float:
        """Own time in which it could run at all; a neighbour that takes the processor is no work of its own."""
        return max(0.0, self.own_s - self.starved_s)


class NodePace(Struct, frozen=True, kw_only=True):
    """What the node itself says of its speed at the end of a window; ``None`` where it cannot be read.

    Attributes:
        clock_mhz: mean of the processors' present frequency.
        clock_limit_mhz: what they are able to do.
        throttled: events in which heat took speed away, within the window.
        gpu_clock_mhz, gpu_clock_limit_mhz: the slowest device.
        gpu_reasons: why the driver says that it holds devices back (``hw_thermal_slowdown``, ``sw_power_cap``...).
    """

    clock_mhz: float | None = None
    clock_limit_mhz: float | None = None
    throttled: int | None = None
    gpu_clock_mhz: float | None = None
    gpu_clock_limit_mhz: float | None = None
    gpu_reasons: tuple[str, ...] = ()
