"""The state machines of the mind as tables and drawings, made from the transition tables that the code runs on.

A drawing is a column of states with an arc per transition: those on the right go down, those on the left go back up.
No drawing tool is needed for it, and a changed table shows as a small change of the file.
"""

from __future__ import annotations

from html import escape

from keepstep.core.decide.proposal_machine import PROPOSAL
from keepstep.core.health.machine import NODE
from keepstep.core.locate.investigation_machine import INVESTIGATION
from keepstep.core.machine import Machine
from keepstep.core.recover.incident import INCIDENT
from keepstep.core.recover.jobrun import JOBRUN
from keepstep.core.standby.machine import STANDBY

MACHINES = (JOBRUN, INCIDENT, NODE, STANDBY, PROPOSAL, INVESTIGATION)

ROW, BOX_WIDTH, BOX_HEIGHT, ARC = 58, 132, 28, 26


def pages(note: str) -> dict[str, str]:
    """The page with the tables, and one drawing per machine."""
    out = [
        "# State machines",
        "",
        "Drawn from the transition tables of `keepstep.core`; a move that is not here is refused.",
        "",
    ]
    for machine in MACHINES:
        out += [f"## {machine.name.capitalize()}", "", f"![{machine.name}]({file_of(machine)})", ""]
        out += ["| from | to | when |", "|---|---|---|"]
        for state, row in machine.moves.items():
            out += [f"| {state} | {to} | {when} |" for to, when in row.items()]
            if not row:
                out.append(f"| {state} | | final |")
        out.append("")
    return {"machines.md": note + "\n".join(out)} | {file_of(m): drawing(m) for m in MACHINES}


def file_of(machine: Machine) -> str:
    return f"machine-{machine.name.replace(' ', '-')}.svg"


def drawing(machine: Machine) -> str:
    """An SVG that reads on light and on dark pages."""
    states = list(machine.moves)
    index = {state: i for i, state in enumerate(states)}
    moves = [(index[a], index[b]) for a, row in machine.moves.items() for b in row]
    reach = {
        side: max((abs(b - a) for a, b in moves if (b > a) == side and abs(b - a) > 1 - (not side)), default=1)
        for side in (True, False)
    }
    left = 24 + ARC * reach[False]
    width, height = left + BOX_WIDTH + 24 + ARC * reach[True], ROW * len(states) + 12
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(machine.name)} state machine" font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#6b7280"/></marker></defs>',
    ]
    out += [arrow(a, b, left) for a, b in sorted(moves)]
    for state, i in index.items():
        final = not machine.moves[state]
        frame = 'stroke-width="2.5"' if final or state == machine.initial else 'stroke-width="1"'
        fill = "#d1d5db" if final else "#dbeafe"
        out.append(
            f'<rect x="{left}" y="{ROW * i + 12}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#374151" {frame}/>'
        )
        out.append(
            f'<text x="{left + BOX_WIDTH / 2:g}" y="{ROW * i + 31}" text-anchor="middle" fill="#111827">{escape(state)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def arrow(a: int, b: int, left: int) -> str:
    style = 'fill="none" stroke="#6b7280" stroke-width="1.3" marker-end="url(#tip)"'
    if b == a + 1:
        x = left + BOX_WIDTH / 2
        return f'<path d="M{x:g},{ROW * a + 12 + BOX_HEIGHT} L{x:g},{ROW * b + 11}" {style}/>'
    down = b > a
    x = left + BOX_WIDTH if down else left
    bend = x + ARC * abs(b - a) * (1 if down else -1) * 1.25
    start, end = ROW * a + 12 + BOX_HEIGHT * (0.7 if down else 0.3), ROW * b + 12 + BOX_HEIGHT * (0.3 if down else 0.7)
    return f'<path d="M{x},{start:g} C{bend:g},{start:g} {bend:g},{end:g} {x},{end:g}" {style}/>'
