"""How the demo looks: a live picture on a terminal, plain lines otherwise, nothing but the report with ``--json``."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.demo_faults import Outcome
from keepstep.model.beat import Phase
from keepstep.model.ids import show_epoch

STORY_LINES = 12
REFRESH_HZ = 8.0
TABLE_WIDTH = 120
"""Columns of the report where no terminal says how many there are."""
PLAIN_EVERY_S = 5.0
"""Without a terminal: a line about the progress this often."""


class View:
    """Shows progress on stderr, so that stdout holds only what the demo found out."""

    def __init__(self, *, quiet: bool = False, file: IO[str] | None = None) -> None:
        self.console = Console(file=file, stderr=file is None, highlight=False)
        self.quiet = quiet
        self._live: Live | None = None
        self._story: deque[str] = deque(maxlen=STORY_LINES)
        self._began = time.monotonic()
        self._drawn = 0.0
        self._cluster: Cluster | None = None
        self._total = 0

    def __enter__(self) -> View:
        if self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, refresh_per_second=REFRESH_HZ, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def follow(self, cluster: Cluster | None, total: int = 0) -> None:
        """Show the ranks of this cluster from now on."""
        self._cluster, self._total = cluster, total

    def say(self, text: str) -> None:
        """One more line of the story; it stays on the screen after the end."""
        if self.quiet:
            return
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        self._story.append(line)
        (self._live.console if self._live else self.console).print(Text(line), soft_wrap=True)

    def tick(self) -> None:
        """Called often; draws rarely."""
        now = time.monotonic()
        if self.quiet or self._cluster is None:
            return
        if self._live is not None:
            if now - self._drawn >= 1 / REFRESH_HZ:
                self._drawn = now
                self._live.update(self._picture(self._cluster))
        elif now - self._drawn >= PLAIN_EVERY_S:
            self._drawn = now
            steps = self._cluster.steps()
            if steps:
                self.say("steps " + "  ".join(f"r{rank}:{step}" for rank, step in sorted(steps.items())))

    def _picture(self, cluster: Cluster) -> Group:
        watch = cluster.watch
        epoch = show_epoch(watch.roster.epoch) if watch.roster else "-"
        rows = Table(box=None, padding=(0, 2), show_edge=False)
        for heading in ("rank", "node", "pid", "phase", "step", ""):
            rows.add_column(heading, style="bold" if heading == "rank" else "")
        beats = cluster.beats()
        for member in watch.roster.members if watch.roster else ():
            beat = beats.get(member.rank)
            if beat is None:
                rows.add_row(str(member.rank), member.node, "-", "starting", "-", "")
                continue
            done = int(24 * beat.step / max(1, self._total))
            phase = Phase(beat.phase).name.lower() if beat.phase in set(Phase) else "?"
            rows.add_row(
                str(member.rank), member.node, str(beat.pid), phase, str(beat.step), "█" * done + "░" * (24 - done)
            )
        parked = ", ".join(sorted({node for node, _ in watch.parked})) or "none"
        head = Text(f"job {cluster.job}  {watch.state.lower()}  epoch {epoch}  standbys on: {parked}", style="bold")
        return Group(Text(""), head, rows)


def table(outcomes: list[Outcome]) -> Table:
    """One row per fault."""
    out = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold")
    out.add_column("fault", no_wrap=True)
    for heading in ("detected", "located", "decided", "recovered", "total ms", "kept", "steps lost"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("by", no_wrap=True)
    for o in outcomes:
        times = (o.detected_ms, o.located_ms, o.decided_ms, o.recovered_ms, o.total_ms)
        out.add_row(
            o.title,
            *(f"{ms:.0f}" for ms in times),
            f"{o.kept}/{o.could_keep}",
            str(o.steps_lost),
            o.decided_by,
        )
    return out


def phase_lines(outcomes: list[Outcome]) -> list[str]:
    """Where the recovery of each fault spent its time."""
    lines = []
    for o in outcomes:
        parts = "  ".join(f"{name} {ms:.0f}" for name, ms in o.phases.items())
        if parts:
            lines.append(f"{o.title}: {parts} ms")
    return lines
