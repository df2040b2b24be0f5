"""Text that no program would write must cost no more than text: the engine also runs inside the controller."""

from __future__ import annotations

import base64
import importlib
import pkgutil
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import keepstep.core.diagnose
from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.rule import compiled
from keepstep.core.diagnose.rules import RULES
from keepstep.core.diagnose.scan import garbled, shape

LENGTH = 1_200
"""Characters; what takes its square is fast enough at this length, what doubles with each character is not."""
CPU_S = 1.0
FELL = b"node-017 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=x, GPU has fallen off the bus."
UNITS = (
    "a",
    "1",
    " ",
    "-",
    "a-",
    "1-",
    "a1",
    "a1-",
    "/a",
    ".a",
    "a.b ",
    ":",
    "0:",
    "[ ",
    "x=",
    "'a' ",
    "node-",
    "rank 1 ",
)
UNITS += ("GPU 1 ", 'File "a", line 1 ', "ab:cd:ef ", "timeout ", "link 1 ")


def hostile() -> list[str]:
    made = [(unit * LENGTH)[:LENGTH] for unit in UNITS] + [f"vm{'a' * LENGTH}", f"node{'a1-' * (LENGTH // 3)}!"]
    luck = random.Random(7)
    return [*made, base64.b64encode(luck.randbytes(LENGTH * 3 // 4)).decode(), luck.randbytes(LENGTH // 2).hex()]


def patterns() -> dict[str, re.Pattern[Any]]:
    """Every pattern of the engine, by name."""
    found: dict[str, re.Pattern[Any]] = {rule.id: compiled(rule) for rule in RULES if rule.pattern}
    for module in pkgutil.iter_modules(keepstep.core.diagnose.__path__):
        for name, value in vars(importlib.import_module(f"keepstep.core.diagnose.{module.name}")).items():
            if isinstance(value, re.Pattern):
                found[f"{module.name}.{name}"] = value
    return found


class TooSlow(Exception):
    """A search was cut off."""


@contextmanager
def cpu_limit(what: str) -> Iterator[None]:
    def over(*_: object) -> None:
        raise TooSlow(f"more than {CPU_S} s of CPU: {what}")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_no_pattern_explodes() -> None:
    """Backtracking doubles its time with each character where two ways lead to the same match."""
    texts = hostile()
    slow: list[str] = []
    for name, pattern in patterns().items():
        for text in texts:
            try:
                with cpu_limit(f"{name} on {text[:20]!r}"):
                    pattern.search(text.encode() if isinstance(pattern.pattern, bytes) else text)
            except TooSlow as error:
                slow.append(str(error))
    assert not slow


def test_binary_data_is_no_evidence_and_takes_no_time() -> None:
    """Any short word turns up in enough random bytes; a real line between them is still found."""
    began = time.process_time()
    for seed in range(10):
        data = random.Random(seed).randbytes(200_000)
        assert explain([data]).category == "unknown", seed
        for middle in (b"\n" + FELL + b"\n", FELL):
            assert explain([data[:100_000] + middle + data[100_000:]]).root_cause.startswith("gpu_fell_off_bus"), seed
    assert time.process_time() - began < 20.0


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "shift-jis", "euc-kr", "cp1251"])
def test_text_of_any_encoding_is_text(encoding: str) -> None:
    words = {"latin-1": "größere Störung", "cp1251": "ошибка памяти", "euc-kr": "오류 발생"}.get(
        encoding, "日本語のエラー"
    )
    line = f"{words}: RuntimeError: CUDA error: uncorrectable ECC error encountered\n".encode(encoding)
    assert not garbled(shape(line))
    assert explain([line]).category == "infrastructure"
