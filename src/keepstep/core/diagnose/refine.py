"""Second thoughts: what a fault means in the light of the other lines.

The same line can be a broken machine, a broken program or a passing cloud. Each family of rules has one function here,
which looks at how far the fault reached, whether it came again, and whether it went away. When a line speaks equally
for machine and user, nobody is evicted.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from keepstep.core.diagnose import refine_network as network
from keepstep.core.diagnose import refine_numbers as numbers
from keepstep.core.diagnose import refine_storage as storage
from keepstep.core.diagnose.cause import Cause, died, machine, passing, spread, users
from keepstep.core.diagnose.observe import Log
from keepstep.core.diagnose.refine_python import python

SEVERAL_JOBS = 3
"""Jobs in which the same GPU faults, after which it is not the jobs' programs."""
_JOB = re.compile(r"\b(?:job|user)[ =#]?(\w{1,12})", re.IGNORECASE)
_AWAY = re.compile(r"spot|interrupt|reclaim|preempt|terminat|retire|maintenance|shutting down|TERMINATE", re.IGNORECASE)
_OFF = re.compile(r"power off/down|state (?:is )?off|powered off|outage|power (?:loss|cut)", re.IGNORECASE)
_NO_SUCH_NAME = re.compile(
    r"Name or service not known|NXDOMAIN|Errno -2|no such host|nodename nor servname", re.IGNORECASE
)
_OF_SETTINGS = re.compile(
    r"load_config|\bconf(?:ig)?s?/|\bds_\w+\.json|config\w*\.json|settings\.\w+|\.ya?ml\b|hparams", re.IGNORECASE
)
_OF_CHECKPOINT = re.compile(
    r"\bckpt|checkpoint|\bstep_\d+ loads|load of step_|global_step\d|\biter_\d{4,}", re.IGNORECASE
)
_OF_SAMPLES = re.compile(
    r"\b(?:sample|record|document|row|shard|jsonl|parquet|dataset)s?\b|__getitem__|__iter__", re.IGNORECASE
)
NEAR_LINES = 3
"""Lines around a fault that may say which file it is."""
_SKIPS = re.compile(r"\bskipp(?:ed|ing)\b|on_error|ignor(?:ed|ing)|fall(?:ing|s)? back|substitut", re.IGNORECASE)
"""A bad sample that the program itself passed over."""
_REGISTRY_AWAY = re.compile(
    r"i/o timeout|TLS handshake|connection (?:refused|reset)|toomanyrequests|too many requests|\b50[234]\b|unexpected EOF|deadline exceeded|temporar",
    re.IGNORECASE,
)
_START_UP = frozenset({"scope", "rendezvous", "gpu_oom", "names", "credentials"})
"""Faults at start that may be gone at the next attempt."""
_SLOW_OR_NUMERIC = frozenset({"nan", "sdc", "scope_one", "ecc", "link", "cable", "storage_stall", "data_value"})
"""Faults with which training may well go on."""


def refine(cause: Cause, log: Log) -> Cause:
    family = next((one.rule.family for one in cause.findings if one.rule.family), "")
    think = _FAMILIES.get(family)
    thought = think(cause, log) if think else cause
    if (
        thought.category == "user_code"
        and family in _START_UP
        and log.has("recovered")
        and (
            ((log.has("restarted") or log.has("retried")) and family != "credentials")
            or "certificate" in thought.findings[0].text.lower()
        )
    ):
        return passing(thought, thought.id, "retry_with_backoff", thought.weight, "the next attempt came up")
    return thought if family in _SLOW_OR_NUMERIC or not log.went_on else _survived(thought, log)


def _survived(cause: Cause, log: Log) -> Cause:
    """Training went on: an exception that was caught, a try that was repeated."""
    if log.has("restarted"):
        if cause.category in ("user_code", "unknown") or cause.id in ("object_store_unreachable", "bad_rendezvous"):
            return passing(cause, cause.id, "restart_in_place", cause.weight, "the next attempt went on")
        return cause
    skipped = cause.category == "data" and any(_SKIPS.search(one.text) for one in cause.findings)
    handled = cause.category == "user_code" or skipped or (cause.category == "transient" and log.has("retried"))
    if handled and not died(log):
        return replace(
            cause,
            category="none",
            action="no_action",
            transient=True,
            weight=min(cause.weight, 0.7),
            why="training went on after it",
        )
    return cause


def _scope(cause: Cause, log: Log) -> Cause:
    """A missing or wrong thing: of the image or settings when it is so everywhere, of the machine when only there."""
    if cause.id == "name_resolution" and (log.has("recovered") or log.went_on):
        return passing(cause, cause.id, "retry_with_backoff", cause.weight, "such failures pass")
    if log.has("only_here") and not spread(cause, log):
        return machine(cause, cause.weight + 0.05, "only one machine is affected")
    if cause.id == "name_resolution" and spread(cause, log):
        forever = log.has("again") or any(map(_NO_SUCH_NAME.search, [one.text for one in cause.findings]))
        if forever:
            return users(cause, cause.weight, "nobody can resolve it, at any time, so the name is wrong")
        return replace(cause, action="retry_with_backoff", transient=True, why="it is the same everywhere")
    if spread(cause, log):
        if cause.category == "infrastructure" and cause.id not in ("name_resolution", "storage_read_only"):
            return users(cause, cause.weight, "it is the same everywhere, so it is not one machine")
        return replace(cause, weight=cause.weight + 0.05, why="it is the same everywhere")
    gone = log.has("recovered") or log.went_on or any("emporary" in one.text for one in cause.findings)
    if cause.id == "name_resolution" and gone:
        return passing(cause, cause.id, "retry_with_backoff", cause.weight, "such failures pass")
    if cause.category == "infrastructure" and cause.id in (
        "name_resolution",
        "clock_skew",
        "container_runtime",
        "storage_read_only",
    ):
        return replace(cause, action="replace_node" if cause.nodes or len(log.told_nodes) == 1 else "investigate")
    return cause


def _scope_one(cause: Cause, log: Log) -> Cause:
    if cause.id == "slow_link" and not cause.nodes and log.has("recovered"):
        return passing(cause, "network_congestion", "retry_with_backoff", cause.weight, "it went away by itself")
    if log.has("only_here"):
        return replace(cause, weight=cause.weight + 0.08, why="its peers are well")
    return replace(cause, action="isolate_and_verify") if spread(cause, log) else cause


def _app_fault(cause: Cause, log: Log) -> Cause:
    """Illegal accesses are the program's, unless one GPU alone makes them again and again."""
    if spread(cause, log) or any(one.frame for one in cause.findings):
        return replace(
            cause,
            weight=cause.weight + 0.12,
            why="the same on every rank" if spread(cause, log) else "a line of the user's code makes it",
        )
    jobs = {job for one in cause.findings for job in _JOB.findall(one.text)}
    places = {(one.node, one.gpu) for one in cause.findings if one.node and one.gpu}
    if len(jobs) >= SEVERAL_JOBS and len(places) == 1 and not log.has("everywhere"):
        return machine(
            replace(cause, id="illegal_memory_access_one_gpu"),
            cause.weight + 0.1,
            f"one GPU alone, in {len(jobs)} jobs",
            "isolate_and_verify",
        )
    repeated = log.has("again") or log.has("many_times") or log.counts["graphics_exception"] > 1
    if log.has("only_here") and repeated:
        return machine(
            replace(cause, id="illegal_memory_access_one_gpu"),
            cause.weight + 0.1,
            "only this GPU makes it, again and again",
            "isolate_and_verify",
        )
    return cause


def _data_value(cause: Cause, log: Log) -> Cause:
    return replace(cause, weight=cause.weight + 0.05) if log.has("elsewhere_too") or log.has("again") else cause


def _suspect(cause: Cause, log: Log) -> Cause:
    """Another machine gives another result: a sign against this one, where only one rank is odd."""
    return cause if log.has("only_here") else replace(cause, weight=0.3)


def _around(cause: Cause, log: Log) -> list[str]:
    """The lines of the cause, and those close to them."""
    first = cause.findings[0].number
    near = [line.text for line in log.tail if abs(line.number - first) <= NEAR_LINES]
    return [*(one.text for one in cause.findings[:5]), *near]


def _taken(cause: Cause, log: Log) -> Cause:
    """A machine that is taken away has to be replaced, although nothing is wrong with it."""
    named = [one for one in cause.findings if one.node and _AWAY.search(one.text)]
    return replace(cause, action="replace_node") if named else cause


def _power(cause: Cause, log: Log) -> Cause:
    """Half of the power gone is slow, all of it is dead."""
    brake = any("brake" in one.text.lower() for one in log.findings.get("thermal_straggler", ()))
    if brake and not any(_OFF.search(one.text) for one in cause.findings):
        return replace(cause, id="power_brake_slowdown", says="the machine lost a part of its power, and slows down")
    return cause


def _data_file(cause: Cause, log: Log) -> Cause:
    if any(map(_OF_SETTINGS.search, _around(cause, log))) and not any(map(_OF_SAMPLES.search, _around(cause, log))):
        return users(replace(cause, id="bad_arguments"), cause.weight, "it is a file of settings")
    if cause.id == "corrupt_shard" and any(map(_OF_CHECKPOINT.search, _around(cause, log))):
        return replace(cause, id="truncated_checkpoint", action="use_previous_checkpoint")
    if cause.id == "missing_shard" and spread(cause, log):
        return users(replace(cause, id="wrong_data_path"), cause.weight, "no rank finds it")
    return cause


def _recent_change(cause: Cause, log: Log) -> Cause:
    if cause.id == "script_missing" and log.has("only_here") and not spread(cause, log):
        return machine(cause, cause.weight, "only one machine lacks it")
    if log.has("recent_change"):
        return replace(cause, action="rollback_code", why="the code had changed just before")
    return cause


def _port(cause: Cause, log: Log) -> Cause:
    if log.has("own_other_job"):
        return users(cause, cause.weight, "another job of the same user has the port")
    return (
        replace(cause, weight=cause.weight + 0.06, why="an older process was seen")
        if log.has("stale_process")
        else cause
    )


def _shm(cause: Cause, log: Log) -> Cause:
    if log.has("stale_process"):
        return passing(
            cause, "stale_shared_memory", "restart_in_place", cause.weight, "an earlier attempt left it full"
        )
    if log.has("only_here"):
        return machine(cause, cause.weight, "only one machine is affected")
    return cause


def _logging(cause: Cause, log: Log) -> Cause:
    """An experiment tracker that is away stops no training."""
    if not died(log) and (log.went_on or log.has("recovered") or log.progress):
        return replace(cause, category="none", action="no_action", transient=True, why="training went on")
    return cause


def _cpu_heat(cause: Cause, log: Log) -> Cause:
    if not died(log) and "straggler" not in log.findings and (log.went_on or log.has("recovered")):
        return replace(cause, category="none", action="no_action", why="nothing became slower")
    return cause


def _crash(cause: Cause, log: Log) -> Cause:
    if log.has("only_here") and log.has("again"):
        return machine(cause, cause.weight + 0.05, "only this machine, again and again", "isolate_and_verify")
    return cause


def _loader_killed(cause: Cause, log: Log) -> Cause:
    return replace(cause, id="host_out_of_memory")


def _rendezvous(cause: Cause, log: Log) -> Cause:
    if log.has("pulling_image") or (log.has("restarted") and log.has("recovered")) or log.went_on:
        return passing(cause, "rendezvous_timeout_once", "restart_in_place", 0.62, "a node was late")
    if any(re.search(r"nnodes|world.?size|MASTER_|config|expected, but", one.text) for one in cause.findings):
        return cause
    if any(re.search(r"joined|arrived|connected", one.text) for one in cause.findings):
        return passing(cause, "rendezvous_timeout", "retry_with_backoff", 0.5, "some nodes were late or missing")
    return cause


def _image(cause: Cause, log: Log) -> Cause:
    """A registry that does not answer is no missing image."""
    told = " ".join(one.text for one in cause.findings[:20])
    if log.has("pulling_image") or log.has("recovered") or _REGISTRY_AWAY.search(told):
        return passing(cause, "image_pull", "retry_with_backoff", cause.weight, "the registry did not answer in time")
    return _scope(cause, log)


def _storm(cause: Cause, log: Log) -> Cause:
    """Corrected errors are no fault, unless there are so many that the machine falls behind."""
    if "straggler" in log.findings or (log.has("only_here") and not log.has("finished")):
        return replace(cause, weight=cause.weight + 0.06, why="the machine falls behind its peers")
    return replace(cause, category="none", action="no_action", weight=0.4, why="every one of them was corrected")


def _time_limit(cause: Cause, log: Log) -> Cause:
    if log.has("saved") or log.has("finished"):
        return replace(cause, category="none", action="no_action", transient=False, why="the job had saved before")
    return cause


def _killed(cause: Cause, log: Log) -> Cause:
    return replace(cause, category="unknown", action="investigate", transient=None)


def _long_work(cause: Cause, log: Log) -> Cause:
    late = "collective_timeout" in log.findings or any(re.search(r"time[sd]? out", one.text) for one in cause.findings)
    return replace(cause, weight=0.66) if late else replace(cause, weight=0.3)


def _evicted(cause: Cause, log: Log) -> Cause:
    if any(
        re.search(r"low on resource: ?\S*(?:ephemeral|storage|disk)", one.text, re.IGNORECASE) for one in cause.findings
    ):
        return replace(cause, id="storage_full", category="infrastructure", action="free_storage_then_resume")
    return cause


def _ecc(cause: Cause, log: Log) -> Cause:
    """CUDA says the same for contained and uncontained errors; the driver knows which it was."""
    return (
        replace(cause, weight=0.6, why="the driver says that it was contained")
        if "ecc_contained" in log.findings
        else cause
    )


def _reboot(cause: Cause, log: Log) -> Cause:
    if "maintenance" in log.findings:
        return replace(cause, weight=0.6, why="it was planned")
    return cause


_FAMILIES: dict[str, Callable[[Cause, Log], Cause]] = {
    "app_fault": _app_fault,
    "assertion": _app_fault,
    "cable": network.cable,
    "checkpoint": storage.checkpoint,
    "congestion": network.congestion,
    "cpu_heat": _cpu_heat,
    "data_file": _data_file,
    "data_value": _data_value,
    "ecc": _ecc,
    "evicted": _evicted,
    "fabric": network.fabric,
    "fs_slow": storage.fs_slow,
    "full": storage.full,
    "gpu_oom": numbers.gpu_memory,
    "host_oom": numbers.host_memory,
    "image": _image,
    "killed": _killed,
    "link": network.link,
    "loader_killed": _loader_killed,
    "logging": _logging,
    "long_work": _long_work,
    "names": _scope,
    "nan": numbers.nan,
    "native_crash": _crash,
    "port": _port,
    "power": _power,
    "quota": storage.quota,
    "python": python,
    "reboot": _reboot,
    "recent_change": _recent_change,
    "remote_service": storage.remote,
    "rendezvous": _rendezvous,
    "throttle": storage.throttle,
    "taken": _taken,
    "time_limit": _time_limit,
    "scope": _scope,
    "scope_io": storage.io_error,
    "scope_one": _scope_one,
    "sdc": numbers.sdc,
    "shm": _shm,
    "storage_stall": storage.stall,
    "storm": _storm,
    "suspect": _suspect,
    "switch": network.switch,
    "unreachable": network.unreachable,
}
