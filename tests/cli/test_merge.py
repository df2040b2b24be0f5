"""Output of many ranks in the order of time, as far as lines tell it."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.cli import logs
from keepstep.cli.merge import Merged, merge
from keepstep.cli.stamps import stamp

YEAR = 2026


def told(*streams: dict[int, list[str]]) -> list[str]:
    return [f"{','.join(map(str, one.ranks))} {one.line}" for one in merge(*streams, year=YEAR)]


def at(second: float) -> str:
    return datetime.fromtimestamp(1_790_000_000 + second).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def test_lines_with_times_come_in_their_order() -> None:
    """Whatever rank wrote them, and on whichever stream."""
    out = {0: [f"{at(1)} a", f"{at(4)} d"], 1: [f"{at(2)} b"]}
    err = {1: [f"{at(3)} c"], 0: [f"{at(5)} e"]}
    assert [line[-1] for line in told(out, err)] == ["a", "b", "c", "d", "e"]


def test_a_line_without_a_time_stays_with_its_neighbour() -> None:
    """A traceback belongs to the line before it, a banner to the line behind it."""
    outputs = {
        0: ["banner 0", f"{at(3)} failed", "Traceback:", "  boom", f"{at(9)} end"],
        1: ["banner 1", f"{at(1)} one", f"{at(4)} two"],
    }
    assert told(outputs) == [
        "1 banner 1", f"1 {at(1)} one", "0 banner 0", f"0 {at(3)} failed", "0 Traceback:", "0   boom",
        f"1 {at(4)} two", f"0 {at(9)} end",
    ]  # fmt: skip


def test_outputs_without_any_time_come_last_and_stdout_before_stderr() -> None:
    """Nobody knows when they were written; what is an end, such as a traceback, is not shown as the beginning."""
    out = {0: [f"{at(1)} step"], 1: ["plain"]}
    err = {0: ["Traceback:", "  boom"], 1: ["bye"]}
    assert told(out, err) == [f"0 {at(1)} step", "1 plain", "0 Traceback:", "0   boom", "1 bye"]


def test_equal_lines_fold_with_times_too() -> None:
    """Ranks that say the same at the same time are one line."""
    outputs = {rank: [f"{at(1)} start", f"{at(2)} rank {rank}"] for rank in range(3)}
    assert next(iter(merge(outputs, year=YEAR))) == Merged((0, 1, 2), f"{at(1)} start")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 5), window=st.integers(1, 70))
def test_order_of_time_loses_and_reorders_nothing(seed: int, ranks: int, window: int) -> None:
    """Each rank's lines come out complete and in order; lines that all carry times come out sorted by them."""
    luck = random.Random(seed)
    outputs = {
        r: [f"{at(t)} x{luck.randrange(2)}" for t in sorted(luck.choices(range(99), k=30))] for r in range(ranks)
    }
    merged = list(merge(outputs, window=window, year=YEAR))
    for rank, lines in outputs.items():
        assert [one.line for one in merged if rank in one.ranks] == lines
    shown = [one.line[:23] for one in merged]
    assert shown == sorted(shown)


LOCAL = datetime(2026, 11, 30, 21, 0, 1, 250_000).timestamp()
ZONED = datetime(2026, 11, 30, 21, 0, 1, 250_000, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("2026-11-30 21:00:01,250 INFO step", LOCAL),
        ("[2026-11-30T21:00:01.250000] step", LOCAL),
        ("[rank3]: [2026/11/30 21:00:01.25] step", LOCAL),
        ("INFO 2026-11-30T21:00:01.250Z step", ZONED),
        ("2026-11-30T23:00:01.250+02:00 step", ZONED),
        ("2026-11-30T15:30:01.250123456-0530 step", ZONED + 0.000123),
        ("[rank0]:[W1130 21:00:01.250000 ProcessGroup.cpp:1] warn", LOCAL),
        ("step 3 loss 0.5", None),
        ("2026-02-31 21:00:01 no such day", None),
        ("resumed from a checkpoint with a very long name that was written at 2026-11-30 21:00:01", None),
        ("dataset-2026-11-30 21 files", None),
    ],
)
def test_times_are_found_where_they_stand_in_front(line: str, found: float | None) -> None:
    """Forms of logging, ISO 8601 and c10; the rest is text."""
    assert stamp(line, YEAR) == (None if found is None else pytest.approx(found, abs=1e-4))


def test_the_command_shows_both_streams_of_all_ranks_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of two ranks, one of which was held by two processes; what follows later is in order as well."""
    folder = tmp_path / "0" / "n0"
    folder.mkdir(parents=True)
    (folder / "rank_0.out").write_text(f"{at(1)} a\n{at(6)} f\n")
    (folder / "rank_0.err").write_text(f"{at(3)} c\n")
    (folder / "rank_1.out").write_text(f"{at(2)} b\n")
    (folder / "rank_1.s4.out").write_text(f"{at(4)} d\n{at(5)} e\n")
    files = logs.find_files([tmp_path])
    logs._print_all(files)
    shown = capsys.readouterr().out.splitlines()
    assert [line[-1] for line in shown] == list("abcdef")
    assert shown[1].startswith("n0:r1 ")
    tails = [logs.Tail(one) for one in files]
    logs._print_together([(tail.one, tail.more()) for tail in tails])
    for tail in tails:
        tail.close()
    assert [line[-1] for line in capsys.readouterr().out.splitlines()] == list("abcdef")
