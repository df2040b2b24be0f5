"""Budgets: how often a fault of each class is tried again in process before the next rung, and after which pause.

A retry is a bet that the same thing will not happen again. The odds depend on the class of the fault: a connection that
timed out will often hold the second time, if the network is given a moment; memory that did not suffice seldom suffices
the second time; a device that fell off its bus is gone. The class comes from the cause that the words of the processes
were read as; where nothing is known the budget is ``in_process_budget``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from keepstep.core.state import Incident
from keepstep.model.settings import Policy

FaultClass = Literal["network", "storage", "memory", "process"]

CLASSES: Mapping[str, FaultClass] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "collective_timeout",
                "collective_abort",
                "peer_lost",
                "nccl_error",
                "network_congestion",
                "switch_failure",
                "no_route",
                "name_resolution",
                "connection_refused",
                "rdma_retry_exceeded",
                "ib_subnet_manager_down",
                "store_lost",
                "host_unreachable",
            ),
            "network",
        ),
        **dict.fromkeys(
            (
                "storage_mount_hang",
                "storage_mount_missing",
                "lustre_evicted",
                "nfs_failover_estale",
                "storage_quota",
                "storage_full",
                "storage_io_error",
                "object_store_throttle",
                "object_store_unreachable",
                "shared_fs_slow",
            ),
            "storage",
        ),
        **dict.fromkeys(("cuda_oom", "host_memory_error", "shm_too_small"), "memory"),
    }
)
"""By root cause, as the rules of ``keepstep explain`` name it; every other one is ``process``."""


class Budget(Struct, frozen=True, kw_only=True):
    """Attributes:
    name: of the setting that it comes from.
    retries: attempts in process without a new step between them.
    pause_s: before the second attempt; doubled for each further one.
    pause_max_s: it grows no longer than this.
    """

    fault: FaultClass
    name: str
    retries: int
    pause_s: float = 0.0
    pause_max_s: float = 0.0

    def pause(self, attempts: int) -> float:
        """Seconds to wait before the next attempt, when ``attempts`` have led to no new step."""
        if attempts < 1 or not self.pause_s:
            return 0.0
        return min(self.pause_s * 2.0 ** min(attempts - 1, 60), self.pause_max_s)


def fault_class(incident: Incident) -> FaultClass:
    """Of the cause that is known by now."""
    return CLASSES.get(incident.root_cause.partition(":")[0], "process")


def budget(incident: Incident, policy: Policy) -> Budget:
    """What this incident may cost in attempts before the next rung."""
    match fault_class(incident):
        case "network":
            return Budget(
                fault="network",
                name="network_retries",
                retries=policy.network_retries,
                pause_s=policy.network_pause_s,
                pause_max_s=policy.pause_max_s,
            )
        case "storage":
            return Budget(
                fault="storage",
                name="storage_retries",
                retries=policy.storage_retries,
                pause_s=policy.storage_pause_s,
                pause_max_s=policy.pause_max_s,
            )
        case "memory":
            return Budget(fault="memory", name="memory_retries", retries=policy.memory_retries)
        case "process":
            return Budget(fault="process", name="in_process_budget", retries=policy.in_process_budget)


def came_back(incident: Incident) -> str:
    """That the same stack ended a process again in one incident, without a new step between them; else empty.

    A machine does not choose a line of code: what comes back in the same place, even on another node, is the code or
    the data.
    """
    if not incident.deaths:
        return ""
    last = incident.deaths[-1]
    before = [death for death in incident.deaths[:-1] if (death.rank, death.stack) == (last.rank, last.stack)]
    if not before:
        return ""
    nodes = list(dict.fromkeys(death.node for death in (*before, last)))
    where = f"on node {nodes[0]} again" if len(nodes) == 1 else f"on {' and then on '.join(nodes)}"
    return f"rank {last.rank} ended {where} with the same stack at the same step: it is the code or the data"
