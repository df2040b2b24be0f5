"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

CALM = ("architecture", "core", "diagnosis", "docs")
"""Folders whose tests start no processes and wait for nobody: they come first, beside the static checks."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What measures or waits comes last, when the machine is its own. The order within a folder stays."""
    here = config.rootpath / "tests"

    def restless(item: pytest.Item) -> bool:
        return not any(item.path.is_relative_to(here / name) for name in CALM)

    items.sort(key=restless)


@pytest.fixture(scope="session", autouse=True)
def usual_signals() -> Iterator[None]:
    """A shell starts background commands with SIGINT ignored, nohup with SIGHUP; children would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    if before[signal.SIGINT] == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if before[signal.SIGHUP] == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
