"""``keepstep ckpt plan``: where copies would lie, what they and each loss would cost, before there is a run.

Nothing is looked up and nothing is touched: the answer follows from the arguments, on any machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from keepstep.checkpoint import forecast, words
from keepstep.checkpoint.exceptions import BadSetting
from keepstep.checkpoint.forecast import BYTES_PER_PARAM, Cluster, TierForecast
from keepstep.cli.ckpt_plan_page import Answer, page, span, steps
from keepstep.cli.errors import UsageError, closest
from keepstep.cli.render import Column, check_form, fold_nodes, show
from keepstep.cli.show import hint
from keepstep.model.ids import NodeId
from keepstep.model.placement import NAMES, Host, Placement, domains, place
from keepstep.model.topology import Layout

MAX_NODES = 20_000
"""More than any job has, and still answered within seconds."""
MAX_PER_NODE = 1024
"""Ranks; the largest servers have a few dozen."""
MAX_BYTES = 10**15
"""State of one rank."""
LEAST_GBPS, MOST_GBPS = 1e-3, 1e6
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
ASSUMED_RANK_BYTES = 10 * 10**9
ASSUMED_RATES = {"memory": 160.0, "peer": 25.0, "local": 16.0, "remote": 4.0}
"""Gbit/s: PCIe 4 per device, and one ordinary network card, one NVMe disk and a busy shared store per node."""
GBIT = 10**9 // 8
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kKMBGT]?)")
_TIMES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
NODE_COLUMNS = (
    Column("NODE", "node"),
    Column("RACK", "rack"),
    Column("RANKS", "ranks"),
    Column("COPIES ON", "buddy"),
    Column("RACK THERE", "buddy_rack"),
)


class Question(Struct, frozen=True, kw_only=True):
    """The arguments as they were given; ``None`` and empty words stand for what was left out."""

    nodes: int
    tp: int = 1
    pp: int = 1
    dp: int = 0
    gpus_per_node: int = 8
    racks: int = 0
    rack_size: int = 0
    params: str = ""
    bytes_per_rank: str = ""
    optimizer: str = "adam"
    dtype: str = "bf16"
    replicated: bool = False
    step_s: float | None = None
    device_gbps: float | None = None
    peer_gbps: float | None = None
    local_gbps: float | None = None
    remote_gbps: float | None = None
    overhead: str = "1%"
    every: int = 0
    full_every: int = 1
    mtbf: str = ""


def show_plan(question: Question, output: str) -> int:
    form = check_form(output)
    found = answer(question)
    if form in ("json", "jsonl", "csv"):
        whole = {"schema": "keepstep.v1/CheckpointPlan", **msgspec.to_builtins(found)}
        whole["memory"]["total"] = found.memory.total
        show(whole, found.nodes, NODE_COLUMNS, form)
        return 0
    print("\n".join(page(found, every_node=form == "wide")))
    for line in found.warnings:
        print(f"warning: {line}", file=sys.stderr)
    hint("next: keepstep run --layout tp=..,pp=.. --rack NAME --ckpt-dir URL ..., with these numbers")
    return 0


def answer(question: Question) -> Answer:
    """Work everything out.

    Raises:
        UsageError: numbers that cannot be together, with the way out.
    """
    _check(question)
    layout, assumed = _layout(question), list[str]()
    cluster = _cluster(question, assumed)
    hosts = _hosts(question)
    placement, found = place(hosts, layout), domains(hosts, layout)
    tiers = forecast.tiers(cluster)
    return Answer(
        layout=layout,
        cluster=cluster,
        assumed=tuple(assumed),
        pattern=placement.pattern,
        shortfalls=tuple(_shortfalls(placement)),
        nodes=tuple(_rows(hosts, placement)),
        memory=forecast.memory(cluster),
        tiers=tiers,
        losses=forecast.losses(cluster, hosts, layout, placement, found, tiers),
        warnings=tuple(_warnings(cluster, tiers)),
    )


# ---------------------------------------------------------------- arguments


def _check(question: Question) -> None:
    least = {"nodes": 1, "tp": 1, "pp": 1, "dp": 0, "gpus_per_node": 1, "racks": 0, "rack_size": 0}
    for name, bound in {**least, "every": 0, "full_every": 1}.items():
        value = getattr(question, name)
        if value < bound:
            raise UsageError(f"{_flag(name)} {value} must be {bound} or more", help=f"for example {_flag(name)} 8")
    for name in ("step_s", "device_gbps", "peer_gbps", "local_gbps", "remote_gbps"):
        value, zero = getattr(question, name), name not in ("step_s", "device_gbps")
        low, high = (LEAST_STEP_S, MOST_STEP_S) if name == "step_s" else (LEAST_GBPS, MOST_GBPS)
        if value is not None and not (low <= value <= high or (zero and value == 0)):
            hint_ = "; 0 leaves the tier out" if zero else ""
            must = f"be at most {high:g}" if value > high else f"be above 0, {low:g} at least"
            raise UsageError(f"{_flag(name)} {value:g} must {must}", help=f"for example {_flag(name)} 25{hint_}")
    for name, bound in {
        "gpus_per_node": MAX_PER_NODE,
        "full_every": words.MAX_FULL_EVERY,
        "every": words.MAX_COUNT,
    }.items():
        if (value := getattr(question, name)) > bound:
            raise UsageError(f"{_flag(name)} {value} must be {bound} or less", help=f"for example {_flag(name)} 8")
    if question.nodes > MAX_NODES:
        raise UsageError(f"--nodes {question.nodes} is more than {MAX_NODES}", help="ask about one job, not the fleet")
    if question.racks and question.rack_size:
        raise UsageError("--racks and --rack-size say the same thing twice", help="leave one out")
    if question.racks > question.nodes:
        raise UsageError(
            f"--racks {question.racks} is more than --nodes {question.nodes}", help=f"at most --racks {question.nodes}"
        )
    if not question.bytes_per_rank:
        _optimizer(question)
    if question.params and question.bytes_per_rank:
        raise UsageError("--params and --bytes-per-rank say the same thing twice", help="leave one out")


def _layout(question: Question) -> Layout:
    world = question.nodes * question.gpus_per_node
    inner = question.tp * question.pp
    dp = question.dp or max(1, world // inner)
    if inner * dp != world:
        given = f"tp {question.tp} x pp {question.pp}" + (f" x dp {question.dp}" if question.dp else "")
        ways = [f"--dp {world // inner}"] if world % inner == 0 else []
        if inner * dp % question.gpus_per_node == 0:
            ways.append(f"--nodes {inner * dp // question.gpus_per_node}")
        if inner * dp % question.nodes == 0:
            ways.append(f"--gpus-per-node {inner * dp // question.nodes}")
        raise UsageError(
            f"{given} does not make {question.nodes} nodes x {question.gpus_per_node} GPUs = {world} ranks",
            help=" or ".join(ways) or "tp x pp x dp must be nodes x GPUs per node; --dp may be left out",
        )
    return Layout(tp=question.tp, pp=question.pp, dp=dp) if inner > 1 or question.dp else Layout()


def _cluster(question: Question, assumed: list[str]) -> Cluster:
    world = question.nodes * question.gpus_per_node
    copies = world // (question.tp * question.pp) if question.replicated else 1
    rates = {}
    for tier, usual in ASSUMED_RATES.items():
        flag = "device_gbps" if tier == "memory" else f"{tier}_gbps"
        said = getattr(question, flag)
        if said is None:
            assumed.append(f"{usual:g} Gbit/s {'per device' if tier == 'memory' else f'to {tier}'} ({_flag(flag)})")
        if said != 0:
            rates[tier] = (usual if said is None else said) * GBIT
    if question.step_s is None:
        assumed.append("10 s per step (--step-s)")
    with_words = {"overhead": (words.share, question.overhead), "mtbf": (words.duration, question.mtbf)}
    numbers = {}
    for name, (read, text) in with_words.items():
        try:
            numbers[name] = read(text, _flag(name))
        except BadSetting as error:
            raise UsageError(str(error.args[0]), help=error.help) from error
    return Cluster(
        nodes=question.nodes,
        ranks_per_node=question.gpus_per_node,
        rank_bytes=_rank_bytes(question, world // copies, assumed),
        step_s=10.0 if question.step_s is None else question.step_s,
        rates=rates,  # type: ignore[arg-type]
        copies=copies,
        overhead=numbers["overhead"],
        every=question.every,
        full_every=question.full_every,
        delta_share=forecast.DELTA_SHARES.get(question.dtype, max(forecast.DELTA_SHARES.values())),
        mtbf_s=numbers["mtbf"],
    )


def _rank_bytes(question: Question, shards: int, assumed: list[str]) -> int:
    if question.bytes_per_rank:
        return _size(question.bytes_per_rank)
    if not question.params:
        assumed.append(f"{ASSUMED_RANK_BYTES // 10**9} GB of state per rank (--params or --bytes-per-rank)")
        return ASSUMED_RANK_BYTES
    per_param = BYTES_PER_PARAM[_optimizer(question), question.dtype]
    return max(1, int(_number(question.params) * per_param / shards))


def _optimizer(question: Question) -> str:
    """As the table names it; checks the type of numbers, too."""
    optimizer = "adam" if question.optimizer == "adamw" else question.optimizer
    if (optimizer, question.dtype) not in BYTES_PER_PARAM:
        known = {"--optimizer": {"adamw", *(o for o, _ in BYTES_PER_PARAM)}, "--dtype": {d for _, d in BYTES_PER_PARAM}}
        flag, said = ("--dtype", question.dtype) if optimizer in known["--optimizer"] else ("--optimizer", optimizer)
        near = closest(said, known[flag])
        options = ", ".join(sorted(known[flag]))
        raise UsageError(
            f"{flag} {said!r} is not known here",
            help=(f"did you mean {near}? " if near else "") + f"known are {options}; or say --bytes-per-rank",
        )
    return optimizer


def _number(text: str) -> float:
    found = _COUNT.fullmatch(text.strip())
    number = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 0 < number < 1e18:
        raise UsageError(f"--params {text!r} is no number of parameters", help="for example --params 70e9 or 70B")
    return number


def _size(text: str) -> int:
    found = words.size(text)
    if not found or not 1 <= found <= MAX_BYTES or "bit" in text or "/s" in text:
        raise UsageError(f"--bytes-per-rank {text!r} is no size", help="for example --bytes-per-rank 12GB or 900MiB")
    return int(found)


def _hosts(question: Question) -> list[Host]:
    width, per_node = len(str(question.nodes - 1)), question.gpus_per_node
    return [
        Host(NodeId(f"node{i:0{width}}"), tuple(range(i * per_node, (i + 1) * per_node)), _rack(question, i))
        for i in range(question.nodes)
    ]


def _rack(question: Question, index: int) -> str:
    """Neighbours share racks; ``--racks`` of equal sizes as far as that goes."""
    if question.rack_size:
        return f"rack{index // question.rack_size}"
    return f"rack{index * question.racks // question.nodes}" if question.racks else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------- rows


def _rows(hosts: Sequence[Host], placement: Placement) -> list[dict[str, Any]]:
    rack = {host.node: host.rack for host in hosts}
    rows = []
    for host in hosts:
        home = placement.buddy[host.node]
        rows.append(
            {
                "node": host.node,
                "rack": host.rack or None,
                "ranks": f"{host.ranks[0]}-{host.ranks[-1]}",
                "buddy": home,
                "buddy_rack": (rack[home] or None) if home is not None else None,
            }
        )
    return rows


def _shortfalls(placement: Placement) -> list[dict[str, Any]]:
    return [
        {"domain": NAMES[short.kind], "nodes": fold_nodes(short.nodes), "count": len(short.nodes), "why": short.why}
        for short in placement.shortfalls
    ]


def _warnings(cluster: Cluster, tiers: Sequence[TierForecast]) -> list[str]:
    lines = [
        f"--every {tier.every} is more than the {tier.tier} tier can take: one takes {span(tier.save_s)}, so at most "
        f"every {steps(tier.least_every)} (--every {tier.least_every})"
        for tier in tiers
        if not tier.keeps_up
    ]
    lines += [
        f"--full-every {cluster.full_every} does not pay in the {tier.tier} tier: packing takes longer than writing all"
        for tier in tiers
        if tier.tier in ("local", "remote") and cluster.full_every > 1 and not tier.deltas
    ]
    if cluster.nodes > 1 and "peer" not in cluster.rates:
        lines.append("without the peer tier a lost node's memory is lost with it")
    if not cluster.durable:
        lines.append("without a durable tier nothing outlives the memory of the job's nodes")
    return lines
