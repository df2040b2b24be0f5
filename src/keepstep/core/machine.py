"""Transition tables: which moves a machine has, why each exists, and the diagram that the docs show of it."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.core.exceptions import IllegalMove


class Machine:
    """A named table ``{state: {next state: when}}``. States without a way out are final.

    Args:
        name: shown in errors and diagrams.
        initial: the state in which a new one starts.
        moves: every legal transition with the reason for which it is taken.
    """

    def __init__(self, name: str, *, initial: str, moves: Mapping[str, Mapping[str, str]]) -> None:
        self.name = name
        self.initial = initial
        self.moves = moves
        unknown = {to for row in moves.values() for to in row} - set(moves)
        assert not unknown, f"{name}: no row for {sorted(unknown)}"
        assert initial in moves, f"{name}: no row for {initial}"

    @property
    def final(self) -> frozenset[str]:
        return frozenset(state for state, row in self.moves.items() if not row)

    def check(self, before: str, after: str) -> None:
        """Raise ``IllegalMove`` unless the table has this transition."""
        if after not in self.moves.get(before, {}):
            legal = ", ".join(self.moves.get(before, {})) or "none, it is final"
            raise IllegalMove(f"{self.name} cannot move from {before} to {after}; legal from {before}: {legal}")

    def mermaid(self) -> str:
        """The table as a mermaid state diagram."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        for state, row in self.moves.items():
            lines += [f"    {state} --> {to}: {when}" for to, when in row.items()]
            if not row:
                lines.append(f"    {state} --> [*]")
        return "\n".join(lines)
