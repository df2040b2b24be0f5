"""Codes: every reading of a number, the most likely one first, and each reading by its own prefix."""

from __future__ import annotations

import json

import pytest

from keepstep.cli.main import main
from keepstep.core.diagnose.code_tables import CUDA, EXITS, NCCL, SIGNALS
from keepstep.core.diagnose.codes import driver_name, meanings
from keepstep.core.diagnose.xid_table import SXIDS, XIDS


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("137", ["exit", "xid"]),
        ("79", ["xid", "exit"]),
        ("11", ["signal", "xid", "exit"]),
        ("138", ["exit", "exit", "xid"]),
        ("700", ["cuda"]),
        ("20034", ["sxid"]),
        ("exit:137", ["exit"]),
        ("exit code 137", ["exit"]),
        ("Xid 137", ["xid"]),
        ("xid:137", ["xid"]),
        ("GPU079", ["xid"]),
        ("signal:9", ["signal"]),
        ("-9", ["exit"]),
        ("nccl:6", ["nccl"]),
        ("NCCL error 2", ["nccl"]),
        ("ncclRemoteError", ["nccl"]),
        ("CUDA error 700", ["cuda"]),
        ("cudaErrorIllegalAddress", ["cuda"]),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", ["cuda"]),
        ("kill", ["signal"]),
        ("gpu_fell_off_bus", ["cause"]),
        ("4711", []),
        ("exit 99999", []),
        ("signal 63", []),
        ("hello", []),
    ],
)
def test_readings_come_in_their_order(text: str, kinds: list[str]) -> None:
    assert [one.kind for one in meanings(text)] == kinds


def test_shares_of_a_bare_number_are_ordered_and_add_up() -> None:
    for number in range(-40, 1000):
        shares = [one.likelihood for one in meanings(str(number))]
        assert shares == sorted(shares, reverse=True)
        assert not shares or abs(sum(shares) - 1) < 0.03, number


def test_every_reading_can_be_asked_for_alone() -> None:
    """What a reading says to type leads to the same words again."""
    for number in {*XIDS, *SXIDS, *EXITS, *SIGNALS, *CUDA, *NCCL, 137, 139}:
        for one in meanings(str(number)):
            again = meanings(one.ask.removeprefix("keepstep explain "))
            assert one.what in [other.what for other in again], one.ask
            assert len({other.kind for other in again}) == 1, one.ask


def test_names_of_runtime_and_driver_mean_the_same() -> None:
    for number, (name, _, _) in CUDA.items():
        assert meanings(name) == meanings(driver_name(name)) == meanings(name.lower())
        assert meanings(f"cuda:{number}")[0].what == meanings(name)[0].what


def test_an_xid_outside_of_the_catalogue_says_so() -> None:
    assert "not in the catalogue" in meanings("xid 999")[0].what


def test_the_page_says_which_is_most_likely_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "137"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "exit code 137: SIGKILL  (most likely)"
    assert "Xid 137 NVLINK_PRIV_ERR  (or)" in lines
    assert lines[-1] == "to ask for one reading only: keepstep explain exit:137 | keepstep explain xid:137"
    assert main(["explain", "137", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["meanings"]
    assert [one["kind"] for one in said] == ["exit", "xid"]
    assert said[0]["likelihood"] > said[1]["likelihood"]
