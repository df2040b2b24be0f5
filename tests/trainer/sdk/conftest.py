"""One warm parent for all workers of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.sdk import fake_agent
from tests.trainer.sdk.zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def warm_parent() -> Iterator[None]:
    fake_agent.ZYGOTE = Zygote()
    yield
    fake_agent.ZYGOTE.close()
