"""The end of a process after its last exchange."""

from __future__ import annotations

import threading

import torch

from keepstep.trainer import exchange_torch


def test_the_end_waits_for_whoever_still_holds_what_was_exchanged() -> None:
    """A view stands for gloo's thread; the wait ends with it, and in any case after its limit."""
    tensor = exchange_torch.keep(torch.zeros(4))
    holds = [tensor.view(2, 2)]
    assert exchange_torch.let_go(0.02) is False
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (exchange_torch.let_go(60.0), over.set()))
    waiting.start()
    holds.clear()
    waiting.join(30.0)
    assert over.is_set()
