"""``keepstep explain`` at the door: cut files, empty names, several codes."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from keepstep.cli.errors import UsageError
from keepstep.cli.explain import show_explanation


def test_a_packed_file_that_was_cut_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(5)
    whole = gzip.compress("".join(f"step {draw.random()}\n" for _ in range(2000)).encode())
    log = tmp_path / "log.gz"
    for data, cut in ((whole, False), (whole + whole, False), (whole[:-300], True), (whole + whole[:900], True)):
        log.write_bytes(data)
        assert show_explanation([str(log)], as_json=True, jsonl=False) == 0
        assert (f"{log} is truncated or damaged" in capsys.readouterr().err) is cut


@pytest.mark.parametrize("what", [[""], ["137", ""], [" "]])
@pytest.mark.parametrize("jsonl", [False, True])
def test_an_empty_name_is_refused(what: list[str], jsonl: bool) -> None:
    with pytest.raises(UsageError, match="names no file and no code"):
        show_explanation(what, as_json=False, jsonl=jsonl)


def test_codes_are_known_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    def meant(*what: str) -> list[object]:
        assert show_explanation(list(what), as_json=True, jsonl=False) == 0
        found: list[object] = json.loads(capsys.readouterr().out)["meanings"]
        return found

    assert meant("137", "138") == meant("137") + meant("138")
    assert meant("xid", "79")
