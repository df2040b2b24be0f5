"""The answer of ``keepstep ckpt plan``, and its page for people."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from keepstep.checkpoint.forecast import Cluster, Loss, Memory, TierForecast
from keepstep.checkpoint.room import show as size_text
from keepstep.cli.render import fold_nodes, paint
from keepstep.model.placement import NAMES
from keepstep.model.topology import Layout

PAGE = 110
"""Characters of a line of text, where the terminal has so many."""


class Answer(Struct, frozen=True, kw_only=True):
    """Everything that ``--json`` prints."""

    layout: Layout
    cluster: Cluster
    assumed: tuple[str, ...]
    pattern: str
    shortfalls: tuple[dict[str, Any], ...]
    nodes: tuple[dict[str, Any], ...]
    memory: Memory
    tiers: tuple[TierForecast, ...]
    losses: tuple[Loss, ...]
    warnings: tuple[str, ...] = ()


def page(found: Answer, *, every_node: bool = False) -> list[str]:
    """The whole answer as lines."""
    layout, cluster = found.layout, found.cluster
    world = cluster.nodes * cluster.ranks_per_node
    shape = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}" if layout.known else "one group, no layout given"
    racks = len({row["rack"] for row in found.nodes if row["rack"]})
    held = f"{size_text(cluster.rank_bytes)} of state per rank"
    lines = [
        f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks = {world} ranks: {shape}"
        + (f"; {racks} racks" if racks else "; racks not known"),
        f"{held}, {size_text(cluster.node_bytes)} per node; {cluster.step_s:g} s per step",
        *_wrapped(f"assumed: {', '.join(found.assumed)}" if found.assumed else ""),
        "",
        *_section(f"Placement: {found.pattern}"),
        *_placement_lines(found, every_node=every_node),
        "",
        *_section(f"Host memory per node: {size_text(found.memory.total)}"),
        *_table([], [[size_text(size), what] for what, size in found.memory.lines]),
        "",
        *_section("Tiers"),
        *_table(*_tier_table(found)),
        "",
        *_section("What each loss would cost"),
        *_table(*_loss_table(found)),
    ]
    return [line.rstrip() for line in lines]


def _wrapped(text: str) -> list[str]:
    width = min(PAGE, shutil.get_terminal_size((PAGE, 0)).columns)
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _section(title: str) -> list[str]:
    return [paint(title, "bold")]


def _placement_lines(found: Answer, *, every_node: bool) -> list[str]:
    if every_node:
        titles = ["node", "rack", "ranks", "copies on", "rack there"]
        return _table(titles, [[str(value or "-") for value in row.values()] for row in found.nodes])
    lines = ["  " + line for line in fold_homes([(row["node"], row["buddy"]) for row in found.nodes])]
    for short in found.shortfalls:
        lines.append(f"  shares its {short['domain']}: {short['nodes']} ({short['why']})")
    if not found.shortfalls and found.cluster.nodes > 1:
        kinds = [name for name, known in (("group", found.layout.known), ("rack", found.nodes[0]["rack"])) if known]
        lines.append(f"  the loss of any one {' or '.join(['node', *kinds])} leaves a copy of everything")
    return lines


def fold_homes(homes: Sequence[tuple[str, str | None]]) -> list[str]:
    """``node[00-15] <-> node[64-79]``: neighbours whose homes are neighbours, too, on one line; pairs once."""
    number = {node: index for index, (node, _) in enumerate(homes)}
    there = [number.get(home, -1) if home is not None else -1 for _, home in homes]
    runs: list[list[int]] = []
    for index, home in enumerate(there):
        if home >= 0 and there[home] == index and home < index:
            continue  # the pair has been named already
        mutual = home >= 0 and there[home] == index
        if runs:
            first, last, to, both = runs[-1]
            if home >= 0 and last == index - 1 and home == to + 1 and both == mutual and not first <= home <= index:
                runs[-1][1:3] = [index, home]
                continue
        runs.append([index, index, home, int(mutual)])
    names = [node for node, _ in homes]
    lines = []
    for first, last, to, both in runs:
        if to < 0:
            lines.append(f"{fold_nodes(names[first : last + 1])} -> nowhere: there is no other node")
            continue
        sign = "<->" if both else "->"
        lines.append(f"{fold_nodes(names[first : last + 1])} {sign} {fold_nodes(names[to - (last - first) : to + 1])}")
    return lines


def _tier_table(found: Answer) -> tuple[list[str], list[list[str]]]:
    titles = ["tier", "per node", "takes", "every", "training waits", "again at most", "restored in"]
    known = found.cluster.mtbf_s > 0
    rows = []
    for tier in found.tiers:
        every = steps(tier.every) + ("" if tier.keeps_up else "!")
        row = [tier.tier, size_text(tier.bytes), span(tier.save_s), every]
        row += [
            f"{span(tier.stall_s)} ({tier.mode})" if tier.mode else "0 s",
            steps(tier.rpo_steps),
            span(tier.restore_s),
        ]
        rows.append(row + ([steps(tier.young_daly_every) if tier.young_daly_every else "-"] if known else []))
    return titles + (["best if it blocked (Daly)"] if known else []), rows


def _loss_table(found: Answer) -> tuple[list[str], list[list[str]]]:
    rows = []
    for loss in found.losses:
        name = NAMES.get(loss.kind, loss.kind)
        rows.append(
            [
                f"any {name}" if loss.kind in NAMES else name,
                str(loss.nodes or "-"),
                {"live": "a live replica", "memory": "memory of the node", "peer": "the buddy's memory"}.get(
                    loss.source or "", f"the {loss.source} tier" if loss.source else "nowhere: starts anew"
                ),
                "all" if loss.steps is None else str(loss.steps),
                "-" if loss.seconds is None else span(loss.seconds),
            ]
        )
    return ["lost at once", "nodes", "comes back from", "steps again", "until caught up"], rows


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    all_rows = [[title.upper() for title in titles], *rows] if titles else list(rows)
    widths = [max(len(row[i]) for row in all_rows) for i in range(len(all_rows[0]))] if all_rows else []
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in all_rows]


def steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def span(seconds: float) -> str:
    """``0.4 s``, ``12 min``, ``3.1 h``."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
