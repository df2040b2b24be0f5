"""Second thoughts on numbers that run away and on memory that runs out: one machine, one sample, or the recipe."""

from __future__ import annotations

import re

from msgspec.structs import replace

from keepstep.core.diagnose.cause import Cause, died, machine, passing, spread
from keepstep.core.diagnose.observe import Log

_RUN = re.compile(r"\brun [A-Z]:? ([\w.+-]+)", re.IGNORECASE)
_OTHERS_MEMORY = re.compile(r"Process \d+ has ([\d.]+) GiB memory in use.*this process has ([\d.]+) GiB", re.IGNORECASE)
_ALSO = re.compile(
    r"(?:different|other|another|new|fresh|spare|healthy)\W+(?:nodes?|hardware|machines?|hosts?|gpus?).{0,40}\b(?:again|same|too|also|as well|identical|nan|differs?)\b",
    re.IGNORECASE,
)
"""Other machines, and the same fault there."""
_EACH_MEMORY = re.compile(r"Process \d+ has ([\d.]+) GiB", re.IGNORECASE)
_VICTIM = re.compile(r"Kill(?:ed)? process \d+ \(([^)]+)\)", re.IGNORECASE)
_OWN_PROGRAM = re.compile(r"python|pt_|torch|train|ray", re.IGNORECASE)


def nan(cause: Cause, log: Log) -> Cause:
    """Numbers run away because of one machine, one sample, or the recipe."""
    runs = _runs(log)
    if len(runs) > 1 and len(set(runs)) > 1:
        return replace(cause, weight=0.5)  # silent_data_corruption says it better.
    sample = "bad_sample" in log.findings or "token_id_out_of_range" in log.findings or "corrupt_shard" in log.findings
    if sample:
        known = {"category": "data", "action": "rollback_checkpoint_and_skip_data", "transient": False}
        return replace(
            cause, id="nan_from_bad_sample", weight=0.84, why="it comes with one sample of the data", **known
        )
    if log.has("recovered") and not log.has("again") and cause.id == "loss_divergence":
        spared = {"category": "none", "action": "no_action", "transient": True}
        return replace(cause, id="loss_spike_recovered", weight=0.72, why="the loss came back by itself", **spared)
    if log.has("recent_change") or log.has("bad_hyperparameters"):
        return replace(cause, weight=cause.weight + 0.1, why="the recipe had been changed")
    if log.has("again") and log.has("elsewhere_too"):
        return replace(cause, weight=cause.weight + 0.05, why="other machines fail at the same place")
    return cause


def _runs(log: Log) -> list[str]:
    values: list[str] = []
    for one in log.findings.get("silent_data_corruption", ()):
        values += [value.lower() for value in _RUN.findall(one.text)]
    return values


def sdc(cause: Cause, log: Log) -> Cause:
    runs = _runs(log)
    if len(runs) > 1 and len(set(runs)) == 1:
        return replace(cause, weight=0.1, why="repeated runs agree")
    if log.has("again") and any(_ALSO.search(one.text) for one in log.tags.get("elsewhere_too", ())):
        return replace(
            cause, weight=0.4, category="user_code", action="stop_and_notify_user", why="other machines give the same"
        )
    return cause


def gpu_memory(cause: Cause, log: Log) -> Cause:
    if log.has("stale_process"):
        return passing(
            cause, "gpu_memory_held_by_stale_process", "restart_in_place", 0.8, "an older process holds the memory"
        )
    if log.has("mig") and not spread(cause, log):
        return machine(replace(cause, id="node_misconfigured"), 0.8, "its GPUs are cut into slices")
    if log.has("foreign_process"):
        return machine(
            replace(cause, id="gpu_memory_held_by_other_process"), 0.78, "a process of somebody else holds it"
        )
    for one in cause.findings:
        sizes = [float(size) for size in _EACH_MEMORY.findall(one.text)]
        if len(sizes) > 1 and max(sizes) > 2 * min(sizes):
            return passing(
                cause, "gpu_memory_held_by_other_process", "restart_in_place", 0.74, "another process holds most of it"
            )
        held = _OTHERS_MEMORY.search(one.text)
        if held and float(held[1]) > float(held[2]):
            return passing(
                cause, "gpu_memory_held_by_other_process", "restart_in_place", 0.74, "another process holds most of it"
            )
    if log.has("again") or spread(cause, log):
        return replace(
            cause, id="cuda_oom_deterministic", weight=cause.weight + 0.08, why="it comes again at the same place"
        )
    return cause


def host_memory(cause: Cause, log: Log) -> Cause:
    if "noisy_system_daemon" in log.findings:
        return replace(cause, weight=0.6, why="the killed process was the victim")
    elsewhere = "kernel_memory_leak" in log.findings or log.has("peers_normal")
    if elsewhere and any("memcg" not in one.text.lower() and "cgroup" not in one.text for one in cause.findings):
        return machine(replace(cause, id="host_memory_taken"), 0.8, "the job's processes are as large as everywhere")
    victims = {name for one in cause.findings for name in _VICTIM.findall(one.text)}
    if victims and not any(map(_OWN_PROGRAM.search, victims)):
        if not died(log):
            harm = {"category": "none", "action": "no_action", "transient": False}
            return replace(cause, id="benign_kernel_noise", weight=0.6, why="it was no process of the job", **harm)
        return replace(
            cause, weight=0.6, category="infrastructure", action="isolate_and_verify", why="it was no training process"
        )
    return replace(cause, id="host_out_of_memory")
