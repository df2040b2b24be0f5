"""Second thoughts on links, fabrics and switches: one machine's, the fabric's, or gone again."""

from __future__ import annotations

import re

from msgspec.structs import replace

from keepstep.core.diagnose.cause import SHARED_NODES, Cause, died, machine, passing, spread, users
from keepstep.core.diagnose.observe import Log

MANY_FLAPS = 3
"""Times a link may go down before its cable is blamed."""
_ANNOUNCED = re.compile(r"announced|planned|scheduled|maintenance", re.IGNORECASE)


def link(cause: Cause, log: Log) -> Cause:
    if len(cause.nodes) >= SHARED_NODES:
        return replace(
            cause,
            id="switch_failure",
            action="retry_with_backoff",
            transient=True,
            weight=0.82,
            why="many machines lost it at once, so it is none of theirs",
        )
    if log.went_on and not died(log) and (log.has("link_up") or log.has("recovered")):
        return replace(
            cause, category="none", action="no_action", transient=True, weight=0.5, why="training did not notice"
        )
    downs = max(log.counts["link_down"], _count(log, "many_times"))
    bad_cable = "cable_fault" in log.findings or "nic_failure" in log.findings
    often = downs > MANY_FLAPS and not log.has("first_time")
    if bad_cable or often or _count(log, "many_times") > MANY_FLAPS:
        return machine(
            replace(cause, id="link_flap_repeating"),
            0.87,
            f"it went down {downs} times" if downs > 1 else "its cable is bad",
        )
    if log.has("link_up") or log.has("recovered") or log.has("first_time"):
        return passing(cause, "link_flap_single", "restart_in_place", 0.76, "it came back, and did not go down again")
    return machine(cause, 0.8, "it did not come back")


def cable(cause: Cause, log: Log) -> Cause:
    return replace(cause, id="link_flap_repeating" if "link_down" in log.findings else cause.id)


def _count(log: Log, tag: str) -> int:
    counts = [int(one.fields["count"]) for one in log.tags.get(tag, ()) if one.fields.get("count", "").isdigit()]
    return max(counts, default=0)


def fabric(cause: Cause, log: Log) -> Cause:
    if spread(cause, log) and cause.id == "rdma_device_broken":
        return users(replace(cause, id="bad_nccl_env"), 0.7, "no machine has such a device")
    if log.has("only_here") or log.has("many_times"):
        return replace(cause, weight=cause.weight + 0.2, why="only this machine reports it")
    if cause.id == "rdma_device_broken" and len(cause.nodes) == 1 and not log.has("link_up"):
        return replace(cause, why="no other machine reports it")
    return replace(cause, action="restart_in_place", transient=None)


def congestion(cause: Cause, log: Log) -> Cause:
    """Congestion belongs to the fabric, unless one machine alone makes it."""
    if log.has("recovered"):
        return passing(cause, cause.id, "retry_with_backoff", cause.weight, "it went away by itself")
    if log.has("only_here") and len(cause.nodes) == 1 and not spread(cause, log):
        return replace(cause, weight=cause.weight + 0.05, why="only this machine is affected")
    return replace(
        cause, action="retry_with_backoff", transient=True, why="it is the fabric's, and no single machine's"
    )


def switch(cause: Cause, log: Log) -> Cause:
    planned = any(_ANNOUNCED.search(one.text) for one in cause.findings)
    if log.has("recovered") or log.has("link_up") or planned:
        return passing(cause, "network_switch_restarted", "retry_with_backoff", cause.weight, "it came back")
    return replace(cause, action="retry_with_backoff", transient=None, why="a switch is no node")


def unreachable(cause: Cause, log: Log) -> Cause:
    if log.has("only_here"):
        return machine(cause, cause.weight + 0.1, "only one machine is affected")
    return replace(cause, action="investigate", transient=None)
