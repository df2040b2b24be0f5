"""Gloo listens where people say, with the variable that torch's own groups obey."""

from __future__ import annotations

import pytest

from keepstep.trainer import gloo_torch
from keepstep.trainer.sockets import listening_address, open_sockets


@pytest.fixture(autouse=True)
def first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_torch, "_address", None)


def test_the_interface_that_is_named_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several; later devices use its address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    before = open_sockets()
    devices = [gloo_torch.gloo_device(), gloo_torch.gloo_device()]
    found = {listening_address(one) for one in open_sockets() - before} - {None}
    assert found == {"127.0.0.1"}
    assert len(devices) == 2


def test_an_interface_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not silently another one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(RuntimeError, match="eth77"):
        gloo_torch.gloo_device()
