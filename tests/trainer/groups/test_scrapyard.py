"""The scrapyard: old communication is destroyed where nobody waits, on a bounded number of threads."""

from __future__ import annotations

import threading

import pytest

from keepstep.trainer import scrapyard
from keepstep.trainer.scrapyard import Scrapyard


class Item:
    def __init__(self, gate: threading.Event) -> None:
        self.name = "item"
        self.gone = threading.Event()
        self._gate = gate

    def scrap(self) -> None:
        self._gate.wait(10)
        self.gone.set()


def test_what_gets_stuck_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may be stuck; a third item is kept for ever. Once they are free again, items go as before."""
    monkeypatch.setattr(scrapyard, "MAX_SCRAPPERS", 2)
    gate, yard = threading.Event(), Scrapyard()
    items = [Item(gate) for _ in range(3)]
    yard.take(items)
    assert (yard.busy(), yard.parked) == (2, 1)
    gate.set()
    for item in items[:2]:
        assert item.gone.wait(10)
    while yard.busy():
        threading.Event().wait(0.001)
    late = Item(gate)
    yard.take([late])
    assert late.gone.wait(10)
    assert not items[2].gone.is_set()
    assert yard.parked == 1
