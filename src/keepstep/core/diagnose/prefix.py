"""What stands before the message: time, node, rank, the program that speaks.

Launchers, schedulers, collectors and loggers each put their own label in front, in any order and number; the labels
are taken off one by one until none is known.
"""

from __future__ import annotations

import calendar
import re

from msgspec import Struct

LABELS = 8
"""Taken off one line at most."""
LONGEST_NODE = 64
_MONTHS = {
    m: i + 1 for i, m in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"])
}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f]")

_ISO = re.compile(
    r"\W{0,2}(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
    r"\s*(Z|UTC|[+-]\d\d:?\d\d)?[\]>)|]?:?[\s-]*"
)
_SYSLOG = re.compile(
    r"\[?(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(?: (\d{4}))?\]?:?\s+"
)
_GLOG = re.compile(r"\[?([IWEF])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+)\s+(?:\d+ )?(?=\S+:\d+\])")
_CLOCK = re.compile(r"\[?(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?Z?\]?:?\s+")
_KERNEL = re.compile(r"(?:<\d+>)?\[\s*(\d+)\.(\d+)\](?:\[\s*[TC]\d+\])?\s*")
_EPOCH = re.compile(r"\[?(1[5-9]\d{8})(?:\.(\d+))?\]?:?\s+")

_RANK = re.compile(
    r"\[?\(?(?:global_?)?(?:[rR]ank|RANK)[ _:=#]{0,2}(\d{1,6})(?:/\d{1,6})?\)?\]?(?=[:\s\]|>,]|$):?[|>,]? ?"
)
_HOLDER = re.compile(
    r"(?:node|host|console|machine|hostname)[/.=]([A-Za-z][\w.-]*\d[\w.-]*?)(?=[:\s,|])[:,]?\s+(?:\| )?"
)
_OF_DAEMON = re.compile(
    r"(?:slurmd|slurmstepd|kubelet|agent|raylet|launcher|torchrun|prolog|epilog)\[([A-Za-z][\w.-]*\d[\w.-]*)\]:?\s+"
)
_TAG = re.compile(r"\[([A-Za-z][\w.-]{1,40})\]:?\s+(?=\S)")
_PIPE = re.compile(r"([A-Za-z][\w./-]{0,60})(?: [a-z]+)?(?: \||>) ")
_BARE = re.compile(
    r"([A-Za-z][\w.-]{0,60}\d[\w.-]{0,60}):?\s{1,3}(?=\d\d:\d\d:\d\d|rank \d|\[?rank\d|[A-Za-z][\w-]{1,30}(?:\[\d+\])?: |(?:INFO|WARN|ERROR|DEBUG)\b|"
    r"(?:mlx[45]_core|nvme|EXT4-fs|XFS|BTRFS|nvidia|amdgpu|NVRM|mce:|EDAC|pcieport|BUG:|Kernel panic|blk_update|Out of memory|nfs:|Lustre|bond\d)\b)"
)
"""A name with a number before a time, a rank, a program or a driver."""
_FILES = (".py", ".cc", ".cpp", ".cu", ".so", ".log", ".sh", ".c", ".h")
_NAME = re.compile(r"([A-Za-z][\w.-]{0,40}\d[\w.-]{0,20}): (?=\S)")
"""A name with a number and a colon: a machine, where it is the first thing in a line."""
_SRUN = re.compile(r"srun: (?=\d{1,6}: )")
_MPI = re.compile(r"\[\d{1,6},(\d{1,6})\]<std(?:err|out)>: ?")
"""Open MPI's ``--tag-output``: job and rank."""
_RAY = re.compile(r"\((?:[\w.<>]+,? )?(?:pid=\d+|(?=ip=))(?:,? ?ip=([\w.:-]+))?[^)]{0,40}\) ?")
_STREAM = re.compile(r"(?:std(?:err|out) [FP] |\[std(?:err|out)\] ?|std(?:err|out): )")
"""Container runtimes' mark of the stream."""
_DEFAULT = re.compile(r"\[(?:default|trainer|worker|\w{0,20}trainer)(\d{1,3})\]: ?")
_SLURM = re.compile(r"\s{0,5}(\d{1,6}): (?=\s*\S)")
_KEEPSTEP = re.compile(r"([A-Za-z0-9][\w.-]{0,63}):r(\d{1,6})\s")
_POD = re.compile(r"\[pod/([\w.-]{1,80})/[\w.-]+\]\s*")
_NCCL = re.compile(
    r"([A-Za-z0-9][\w.-]{0,63}):(\d+):(\d+) (?:\[(\d+)\] )?(?=NCCL|TRACE|\S* ?NET/|RCCL|ncclsysfs|transport|misc/)"
)
_SPEAKER = re.compile(
    r"([A-Za-z0-9][\w.-]{0,63})[: ]\s*(?=(?:kernel|systemd|nvidia\S*|dcgm\S*|slurm\w*|NCCL|sshd|kubelet|"
    r"containerd|dockerd|nv-hostengine|nv-fabricmanager|BMC|bmc|ipmi\S*|redfish|smartd|mcelog|rasdaemon|amdgpu|chronyd|dmesg|journal|"
    r"metadata|ec2-metadata|sar|turbostat|lspci|node-exporter|apt|agent|iostat|smartctl|ibstat\w*|counters|ps|top|free|df|dmidecode|"
    r"ethtool|mst|mlx\w+|perfquery|ipmitool|sensors|uptime|vmstat|mpstat|numactl|cpupower|journalctl|mount\w*|lnet|lustre|"
    r"mmfs\w*|weka|beegfs|ceph|nfs|fio|bench\w*|hwinfo|ulimit|crond?|sudo|auditd|fabricmanager|opensm|ntpd|ptp4l|phc2sys|"
    r"timedatectl|image|preflight|health\w*|selftest|self-test|burn-?in|nvme|rocm-smi|amd-smi|xpu-smi|npu-smi|hl-smi|neuron\w*|raylet|"
    r"SEL|sel|PSU|fan|dcgmi|show_gids|rdma|ip|ifconfig|lldp\w*|firmware|driver|cgroup|agetty|login|rc\.local|cloud-init|"
    r"xfs\w*)\b|\w{2,20}\[\d+\]:|[\w-]{2,30}\.service:|\$ |[EWIF]\d{4} )"
)
_PROGRAM = re.compile(r"(?:(?:kernel|[\w./-]{2,40}\[\d+\]):\s*|[a-z][\w-]{1,20}:\s+(?=\[?rank ?\d))")
_LEVEL = re.compile(r"\W{0,2}(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|debug|info|warn(?:ing)?|error)\b\W{0,3}")
_HOSTISH = re.compile(
    r"\(?((?:node|host|gpu|worker|dgx|hgx|compute|trn|nid|cn|vm|server|trainer|ip|pod|rack|gn|hpc|ml|a100|h100|h200|b200|mi300)"
    r"[\w.-]{0,60}?\d[\w.-]{0,40})\)?(?=[:\s(,]|$)",
    re.IGNORECASE,
)
_NOT_HOST = re.compile(
    r"(?:gpu|ip|ml|worker|pod|vm|rack)[-_ ]?\d{1,2}$|.*\.(?:py|cc|cpp|cu|so|log|sh)$|.*[.:]$|mlx\d\w*$", re.IGNORECASE
)
_NO_SPEAKER = re.compile(
    r"(?:rank|step|epoch|iter\w*|stage|layer|attempt|leaf|spine|switch|tor|sw|bond|eth|mlx\d|nvme|numa|cpu|fan|psu|pdu|dimm|"
    r"task|slot|port|link|shard|batch|part|try|run|job|level|phase|fp|bf|ib|ens\d?\w*|enp\w*|eno|hsn|hsi|docker|sd[a-z]|md|dm|ext|utf|sha|base|s3|"
    r"x86|py|python|cuda|mp|ipv|int|uint|c10d|bert|gpt|llama|qwen|nccl|ucx|log|sample|expert|block|dp|tp|pp|ep|seq|pod)[-_]?\d+(?:_\d+)?$|gpu\d{1,2}$|(?:.*[-_])?(?:shard|tok|part|ckpt|dump|chunk)[-_].*$|(?:mlx\d|nvme\d|i40e|e1000|hfi1|ext4|cxgb4|amdgpu|urllib3|k8s|s3fs|boto3|botocore|log4\w+|aiohttp|numpy|torch|c10d|fsdp|zero|adam)[\w.]*$|v\d(?:\.\d+)*$|\d+(?:[.:]\d+)?[a-z%]{0,3}$",
    re.IGNORECASE,
)
_GENERIC_HOSTS = frozenset(
    {
        "localhost",
        "host",
        "kernel",
        "systemd",
        "slurmstepd",
        "slurmctld",
        "slurmd",
        "srun",
        "dmesg",
        "unknown",
        "error",
        "warning",
        "info",
        "node",
        "root",
        "the",
    }
)


class Line(Struct, frozen=True, kw_only=True):
    """A line with its labels read.

    Attributes:
        text: the whole line, without colours and control characters.
        message: the line without its labels.
        stream: labels of the process that wrote it, so that stacks of many processes can be told apart.
        time: seconds since 1970; only seconds of the day when ``dated`` is false; kernel uptime is no time.
        local: index of the process on its node, where that is all a label tells.
    """

    number: int
    text: str
    message: str
    stream: str = ""
    node: str = ""
    rank: int | None = None
    local: int | None = None
    gpu: str = ""
    time: float | None = None
    dated: bool = False
    zoned: bool = False


def clean(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return _ANSI.sub("", text) if not text.isprintable() else text


def host(text: str) -> str:
    """The host name at the beginning of ``text``, if a word there looks like one; else nothing."""
    found = _HOSTISH.match(text)
    return found[1] if found and is_host(found[1]) else ""


def is_host(name: str) -> bool:
    return (
        0 < len(name) <= LONGEST_NODE
        and not _NOT_HOST.match(name)
        and not name.endswith(("Error", "Exception"))
        and name.lower() not in _GENERIC_HOSTS
        and not name.isdigit()
    )


def is_speaker(name: str) -> bool:
    """Whether a word before a program's name is a machine: most have a number, and none is a switch or a count."""
    return (
        name.lower() not in _GENERIC_HOSTS
        and any(map(str.isdigit, name))
        and not name.replace(":", "").isdigit()
        and not _NO_SPEAKER.match(name)
    )


class _Labels:
    def __init__(self) -> None:
        self.node = ""
        self.rank: int | None = None
        self.local: int | None = None
        self.gpu = ""
        self.time: float | None = None
        self.dated = False
        self.zoned = False


def read(number: int, text: str) -> Line:
    """Take the labels off one line (without its newline)."""
    seen = _Labels()
    at = 0
    stream: list[str] = []
    for _ in range(LABELS):
        end = _time(seen, text, at) or _who(seen, text, at, stream)
        if not end or end <= at:
            break
        at = end
    if not seen.node:
        seen.node = host(text[at:].lstrip("( "))
    return Line(
        number=number,
        text=text,
        message=text[at:] if at < len(text) else "",
        stream="|".join(stream),
        node=seen.node,
        rank=seen.rank,
        local=seen.local,
        gpu=seen.gpu,
        time=seen.time,
        dated=seen.dated,
        zoned=seen.zoned,
    )


def _who(seen: _Labels, text: str, at: int, stream: list[str]) -> int:
    """Position after a label of node, rank or program at ``at``; 0 when there is none."""
    if found := _KEEPSTEP.match(text, at):
        seen.node, seen.rank = found[1], int(found[2])
    elif found := _RANK.match(text, at):
        seen.rank = int(found[1])
    elif found := _DEFAULT.match(text, at):
        seen.local = int(found[1])
    elif found := _MPI.match(text, at):
        seen.rank = int(found[1])
    elif (found := _HOLDER.match(text, at)) or (found := _OF_DAEMON.match(text, at)):
        seen.node = found[1]
    elif found := _RAY.match(text, at):
        seen.node = found[1] or seen.node
    elif found := _STREAM.match(text, at):
        return found.end()
    elif found := _POD.match(text, at):
        seen.node = found[1]
    elif found := _NCCL.match(text, at):
        seen.node = found[1]
        seen.gpu = found[4] or seen.gpu
    elif (
        (not seen.node and (found := _SPEAKER.match(text, at)) and is_speaker(found[1]))
        or (
            not seen.node
            and (found := _BARE.match(text, at))
            and is_speaker(found[1])
            and not found[1].endswith(_FILES)
        )
        or (
            not seen.node
            and not stream
            and (found := _NAME.match(text, at))
            and is_speaker(found[1])
            and not found[1].endswith(_FILES)
        )
    ):
        seen.node = found[1]
    elif (found := _TAG.match(text, at)) or (found := _PIPE.match(text, at)):
        seen.node = seen.node or host(found[1])
    elif found := _SRUN.match(text, at):
        return found.end()
    elif not seen.node and seen.rank is None and (found := _SLURM.match(text, at)):
        seen.rank = int(found[1])
    elif (found := _PROGRAM.match(text, at)) or (found := _LEVEL.match(text, at)):
        return found.end()
    else:
        return 0
    stream.append(found[0].strip())
    return found.end()


def _time(seen: _Labels, text: str, at: int) -> int:
    """Position after a time at ``at``; 0 when there is none."""
    if found := _ISO.match(text, at):
        y, mo, d, h, m, s, fraction, zone = found.groups()
        _set(seen, int(y), int(mo), int(d), (h, m, s, fraction), zone)
    elif found := _SYSLOG.match(text, at):
        month = _MONTHS.get(found[1].lower())
        if month is None:
            return 0
        year = int(found[7]) if found[7] else 2000
        _set(seen, year, month, int(found[2]), (found[3], found[4], found[5], found[6]), None)
    elif found := _GLOG.match(text, at):
        _set(seen, 2000, int(found[2]), int(found[3]), (found[4], found[5], found[6], found[7]), None)
    elif found := _EPOCH.match(text, at):
        seen.time, seen.dated, seen.zoned = float(f"{found[1]}.{found[2] or 0}"), True, True
    elif found := _KERNEL.match(text, at):
        pass
    elif found := _CLOCK.match(text, at):
        if seen.time is None:
            seen.time = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0) + float(f"0.{found[4] or 0}")
    else:
        return 0
    return found.end()


def _set(
    seen: _Labels, year: int, month: int, day: int, clock: tuple[str, str, str, str | None], zone: str | None
) -> None:
    """Years that a format leaves out are taken as 2000: only differences are used."""
    if seen.dated and year == 2000:
        return
    hours, minutes, seconds = (int(part) for part in clock[:3])
    if not (
        1 <= month <= 12 and 1 <= day <= 31 and hours < 24 and minutes < 60 and seconds < 62 and 1970 <= year < 2200
    ):
        return
    at = calendar.timegm((year, month, day, hours, minutes, seconds)) + float(f"0.{clock[3] or 0}")
    if zone and zone[0] in "+-":
        at -= (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    seen.time, seen.dated, seen.zoned = at, year != 2000, zone is not None
