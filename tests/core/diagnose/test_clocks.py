"""Clocks that are minutes apart do not turn cause and consequence round."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.diagnose.clocks import LONGEST_S, SHARED_S, TOLD_S, Clocks
from keepstep.core.diagnose.explain import explain, explain_files
from keepstep.core.diagnose.observe import Source
from keepstep.core.diagnose.prefix import read

NOON = 12 * 3600


def at(seconds: float) -> str:
    whole = int(NOON + seconds)
    return f"2026-05-11 {whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def step(node: str, seconds: float, number: int) -> bytes:
    return f"{at(seconds)} {node} trainer: step {number} | loss 2.1\n".encode()


def panic(node: str, seconds: float) -> bytes:
    return f"{at(seconds)} {node} kernel: Kernel panic - not syncing: Fatal exception\n".encode()


def fell(node: str, seconds: float) -> bytes:
    text = "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=python, GPU has fallen off the bus."
    return f"{at(seconds)} {node} kernel: {text}\n".encode()


def clocks(lines: list[bytes]) -> Clocks:
    made = Clocks()
    for number, line in enumerate(lines):
        made.learn(read(number, line.decode()))
    return made


def test_a_step_that_two_machines_end_tells_how_their_clocks_differ() -> None:
    made = clocks([step("node-1", n, n) for n in range(5)] + [step("node-2", 360 + n, n) for n in range(5)])
    assert made.corrected("node-2", 1000.0) - made.corrected("node-1", 1000.0) == -360.0
    assert made.tolerance("node-1", "node-2") == SHARED_S
    assert made.tolerance("node-1", "node-9") == TOLD_S


def test_machines_that_share_nothing_are_joined_over_a_third_one() -> None:
    made = clocks([step("node-1", 0, 1), step("node-2", 100, 1), step("node-2", 200, 2), step("node-3", 500, 2)])
    assert made.corrected("node-3", 500.0) - made.corrected("node-1", 0.0) == 100.0


def test_a_day_between_two_times_is_a_missing_date_and_no_clock() -> None:
    made = clocks([step("node-1", 0, 1), b"2026-06-20 12:00:00 node-2 trainer: step 1 | loss 2.1\n"])
    assert made.offset("node-2") is None
    assert LONGEST_S > 24 * 3600  # Time zones are no missing dates.


def test_the_first_of_two_panics_is_the_first_by_corrected_time() -> None:
    """The clock of node-2 is six minutes ahead. Its panic came first, and seems to come five minutes late."""
    ahead = 360
    lines = [
        *(step("node-1", n, n) for n in range(3)),
        *(step("node-2", ahead + n, n) for n in range(3)),
        panic("node-1", 100),
        panic("node-2", ahead + 40),
    ]
    assert explain(lines).culprit.node == "node-2"
    assert explain([*lines[:3], *lines[6:]]).culprit.node == "node-1", "without shared steps the times are believed"


def test_causes_of_different_kinds_are_put_in_order_too() -> None:
    behind = -400
    lines = [
        *(step("node-1", n, n) for n in range(3)),
        *(step("node-2", behind + n, n) for n in range(3)),
        fell("node-2", behind + 300),
        panic("node-1", 100),
    ]
    assert explain(lines).culprit.node == "node-1"


def test_the_order_of_files_does_not_decide() -> None:
    one = [step("node-1", 5, 5), panic("node-1", 200)]
    two = [step("node-2", 5, 5), panic("node-2", 100)]
    files = [(Source(name="node-1.log", node="node-1"), one), (Source(name="node-2.log", node="node-2"), two)]
    assert explain_files(files).culprit.node == explain_files(files[::-1]).culprit.node == "node-2"


@given(st.integers(-3000, 3000), st.integers(-3000, 3000), st.integers(0, 2**31))
def test_whatever_the_clocks_the_first_is_found(one: int, two: int, seed: int) -> None:
    luck = Random(seed)
    late = luck.randrange(60, 600)
    lines = [
        *(step("node-1", one + n, n) for n in range(4)),
        *(step("node-2", two + n, n) for n in range(4)),
        panic("node-1", one + 50 + late),
        panic("node-2", two + 50),
    ]
    assert explain(lines).culprit.node == "node-2"
