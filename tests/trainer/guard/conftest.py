"""One warm parent for all ranks of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.sdk import fake_agent
from tests.trainer.sdk.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = fake_agent.ZYGOTE = Zygote()
    yield made
    made.close()
