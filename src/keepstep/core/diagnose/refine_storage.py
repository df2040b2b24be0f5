"""Second thoughts on storage: one client or the server, the job's own files or everybody's, away or only busy."""

from __future__ import annotations

import re

from msgspec.structs import replace

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.cause import SHARED_NODES, Cause, died, machine, passing, spread, users
from keepstep.core.diagnose.observe import Log

_LOCAL_PLACE = re.compile(
    r"'/(?:tmp|var|run|root|opt)/|df \S+:? +100 ?%|100% /(?:$|var|tmp|run|\s)|/var/(?:log|lib)|\btmpfs\b|/dev/(?:sd|md|nvme|dm)\S* .{0,60}100%",
    re.IGNORECASE,
)
_CUT_OFF = re.compile(
    r"no internet|air-?gapped|HF_HUB_OFFLINE|https?_proxy|ProxyError|every start|at every (?:start|attempt)",
    re.IGNORECASE,
)
_OUTAGE = re.compile(
    r"outage|gateways? .{0,20}\bdown\b|not repaired|all jobs of the site|unavailable since|all buckets|gave up after \d+ ?(?:min|h)|not one successful|down for (?:all|every)",
    re.IGNORECASE,
)
_OWN_PLACE = re.compile(r"/home/|\buser quota|quota of (?:the )?user|\$HOME", re.IGNORECASE)


def io_error(cause: Cause, log: Log) -> Cause:
    """I/O errors: of a drive when a node's own, of the store when everywhere."""
    if log.has("recovered") and not log.has("again"):
        return passing(cause, "storage_io_glitch", "retry_with_backoff", cause.weight, "a retry succeeded")
    if spread(cause, log):
        return replace(
            cause, action="retry_with_backoff", transient=True, why="all machines see it, so it is the storage"
        )
    return cause if cause.nodes else replace(cause, action="retry_with_backoff", transient=None)


def stall(cause: Cause, log: Log) -> Cause:
    """One client, or the server of all."""
    back = (log.has("storage_back") or log.has("recovered")) and (log.went_on or not died(log))
    if log.has("storage_back") and not back and not _spread_of_storage(cause, log):
        return replace(cause, action="restart_in_place", transient=True, why="it came back, too late for the process")
    if _spread_of_storage(cause, log):
        if back:
            return passing(cause, "shared_fs_stall", "no_action", 0.82, "all machines waited, and it came back")
        return replace(
            cause,
            id="shared_fs_down",
            action="retry_with_backoff",
            transient=True,
            weight=0.8,
            why="all machines wait, so it is the server",
        )
    if back and not log.has("only_here"):
        return passing(cause, "storage_stall", "no_action", cause.weight, "it came back")
    if "storage_mount_hang" in log.findings and cause.id == "host_hung_task":
        return replace(cause, id="storage_mount_hang", weight=0.7)
    if not cause.nodes:
        return replace(cause, action="retry_with_backoff", transient=True)
    return replace(cause, action="replace_node", transient=True, why="only this machine is affected")


def _spread_of_storage(cause: Cause, log: Log) -> bool:
    wide = any(where.is_node_range(one.text) for one in cause.findings)
    return wide or len(cause.nodes) >= SHARED_NODES or (not cause.nodes and log.has("everywhere"))


def full(cause: Cause, log: Log) -> Cause:
    """A full system disk is its machine's; a full shared file system nobody's."""
    if log.has("stale_process") and any("/dev/shm" in one.text or "/torch_" in one.text for one in cause.findings):
        return passing(
            cause, "stale_shared_memory", "restart_in_place", cause.weight, "an earlier attempt left it full"
        )
    local = any(_LOCAL_PLACE.search(one.text) for one in cause.findings)
    one = len(cause.nodes) == 1 or (not cause.nodes and len(log.told_nodes) == 1)
    if local and one and not spread(cause, log):
        return machine(cause, cause.weight, "a disk of this machine alone is full")
    return cause


def throttle(cause: Cause, log: Log) -> Cause:
    """Asked to slow down, or away altogether."""
    if any(_OUTAGE.search(line.text) for line in log.tail) and not log.has("recovered"):
        return replace(
            cause,
            id="object_store_unavailable",
            category="infrastructure",
            weight=cause.weight + 0.08,
            why="it was away for all",
        )
    if log.went_on and log.has("recovered"):
        return replace(cause, weight=cause.weight + 0.1, why="a later try succeeded")
    return cause


def quota(cause: Cause, log: Log) -> Cause:
    """A shared quota is the operators' to raise; a user's own that the job fills with its own files is the user's."""
    own = any(_OWN_PLACE.search(one.text) for one in cause.findings)
    beside = any(frame.file.startswith("/home/") for _, frame in log.frames)
    if own or beside:
        return users(cause, cause.weight, "the job fills the user's own quota")
    return cause


def checkpoint(cause: Cause, log: Log) -> Cause:
    if log.has("recovered") and any(id.startswith("object_store") for id in log.findings):
        return replace(cause, weight=0.5, why="it was completed later")
    if "storage_full" in log.findings or "storage_quota" in log.findings:
        return replace(cause, weight=0.6, why="the storage was full")
    return cause


def fs_slow(cause: Cause, log: Log) -> Cause:
    """Slow for everybody, and then no longer."""
    if log.has("recovered") or log.went_on:
        return passing(cause, cause.id, "retry_with_backoff", cause.weight, "it went away by itself")
    return cause


def remote(cause: Cause, log: Log) -> Cause:
    if any(map(_CUT_OFF.search, [line.text for line in log.tail])) and not log.has("recovered"):
        return users(cause, cause.weight + 0.04, "the job's settings or network do not let it out")
    if "switch_failure" in log.findings:
        return replace(cause, id="network_outage", weight=cause.weight + 0.06, why="a switch on the way was down")
    return cause
