"""What is read from a line besides its message: who wrote it, about which device, inside which wrapping."""

from __future__ import annotations

import json

import pytest

from keepstep.core.diagnose import places
from keepstep.core.diagnose.absent import absent, home, ranks_listed
from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.leaning import leaning
from keepstep.core.diagnose.observe import observe
from keepstep.core.diagnose.pairs import slow_end
from keepstep.core.diagnose.prefix import read
from keepstep.core.diagnose.stacks import reads_data
from keepstep.core.diagnose.structured import opened


@pytest.mark.parametrize(
    ("line", "node", "rank"),
    [
        ("[1,388]<stderr>: bnode48 trainer: lost", "bnode48", 388),
        ("(RayTrainWorker pid=811, ip=10.0.0.7) lost", "10.0.0.7", None),
        ("node/gke-pool-4b91 kernel: NVRM: lost", "gke-pool-4b91", None),
        ("console.bnode49: [33.1] BUG: lost", "bnode49", None),
        ("slurmd[vega-12]: error: lost", "vega-12", None),
        ("worker-14  04:02:10  EXT4-fs error", "worker-14", None),
        ("10:10:11 n-0442 rank 3536 ERROR lost", "n-0442", 3536),
        ("[kernel] 2026-05-05T10:00:13 r11n01 mlx5_core 0000:41:00.0 lost", "r11n01", None),
        ("2026-05-11T03:20:15.6Z stderr F [rank7]: lost", "", 7),
        ("[rank: 3] lost", "", 3),
        ("srun: 12: lost", "", 12),
        ("step 8811: loss 2.1", "", None),
        ("GPU3 sm_clock: 900 MHz", "", None),
        ("mlx5_3 port: down", "", None),
        ("leaf-11 switch: port down", "", None),
    ],
)
def test_labels_of_many_writers(line: str, node: str, rank: int | None) -> None:
    found = read(1, line)
    assert (found.node, found.rank) == (node, rank)


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("nvidia 0000:c1:00.0: AER: can't recover", "0000:c1:00"),
        ("pcieport 0000:c0:01.1: DPC: containment event", ""),
        ("mlx5_core 0000:9a:00.0: firmware error", ""),
        ("nvidia-nvswitch2: SXid (PCI:0000:c6:00.0): 20034", ""),
        ("pcieport 0000:c0:01.1: lost; nvidia 0000:c1:00.0 gone", "0000:c1:00"),
        ("amdgpu 0000:83:00.0: amdgpu: lost", "0000:83:00"),
        ('ECC_DBE{gpu="4"} 2', "4"),
        ("on that GPU: 3 different results", ""),
    ],
)
def test_only_a_gpus_address_is_a_gpu(text: str, gpu: str) -> None:
    assert places.gpu(text) == gpu


def test_a_machine_is_known_by_its_kin() -> None:
    log = observe([b"frn0 agent: heartbeat ok\nfrn1 agent: heartbeat ok\nlost: frn6\n"])
    assert log.places.named("lost: frn6") == ["frn6"]
    assert log.places.named("lost: abc6") == []


def test_a_json_line_is_opened_with_all_lines_inside() -> None:
    stack = 'Traceback (most recent call last):\n  File "/app/heads.py", line 31, in forward\nValueError: no'
    wrapped = {"kubernetes": {"host": "lux-4"}, "rank": 35, "message": "failed", "exc_info": stack}
    found = opened(json.dumps(wrapped))
    assert found is not None
    assert (found.node, found.rank, found.lines[0], len(found.lines)) == ("lux-4", 35, "failed", 4)
    said = explain([json.dumps(wrapped).encode()])
    assert (said.culprit.file, said.culprit.line, said.culprit.rank) == ("/app/heads.py", 31, 35)


def test_pairs_of_keys_and_values_are_opened() -> None:
    found = opened('time=2026-07-07T01:01:01Z host=lux-45 rank=3 msg="it is \\"over\\""')
    assert found is not None
    assert (found.node, found.rank, found.lines) == ("lux-45", 3, ['it is "over"'])


@pytest.mark.parametrize(
    "line", ["", "{}", '{"a": 1}', '{"message": ""}', "a=b", "{" * 5000, "x = {'loss': 2.1}", '{"message": {"a": 1}}']
)
def test_what_is_not_wrapped_stays_as_it_is(line: str) -> None:
    assert opened(line) is None


def test_ranks_are_listed_and_the_missing_one_is_found() -> None:
    assert ranks_listed("ranks 0-2, 5 and 7-8: waiting") == {0, 1, 2, 5, 7, 8}
    log = observe(
        [b"rank 9 of 9\nwatchdog: ranks 0-36, 38-63: collective 81 ALLREDUCE timed out\nrank 37 (gx-4): no output\n"]
    )
    assert absent(log) == [37]
    assert home([37], log) == "gx-4"
    assert home([1, 2], log) == ""


def test_the_end_that_all_slow_pairs_share_is_slow() -> None:
    assert slow_end(["n1<->n2 391 Gb/s, n1<->n3 97 Gb/s", "n3<->n2 96 Gb/s"]) == "n3"
    assert slow_end(["n1<->n2 391 Gb/s, n1<->n3 97 Gb/s"]) == "", "one slow pair has two ends"
    assert slow_end(["n1<->n2 97 Gb/s, n3<->n4 96 Gb/s, n5<->n6 300 Gb/s"]) == ""


def test_stacks_with_labels_nobody_knows_and_in_boxes() -> None:
    woven = b'zz1! Traceback (most recent call last):\nzz1!   File "/a/b.py", line 7, in f\nzz1! ValueError: no\n'
    top = "╭──── Traceback (most recent call last) ────╮\n"
    boxed = (top + "│ /a/b.py:7 in main │\n│ /a/c.py:9 in f │\n╰─────╯\nValueError: no\n").encode()
    assert explain([woven]).culprit.file == "/a/b.py"
    assert (explain([boxed]).culprit.file, explain([boxed]).culprit.line) == ("/a/c.py", 9)


def test_a_warning_between_does_not_end_a_stack() -> None:
    lines = (
        b'Traceback (most recent call last):\n  File "/a/b.py", line 7, in f\n'
        b'UserWarning: soon\n  File "/a/c.py", line 8, in g\nValueError: no\n'
    )
    assert explain([lines]).culprit.file == "/a/c.py"


def test_words_that_a_model_read_or_wrote_are_no_events() -> None:
    said = explain(
        [
            b'eval sample: "NVRM: Xid (PCI:0000:9d:00): 79, GPU has fallen off the bus"\n',
            b"step 5 | loss 2.1\nstep 6 | loss 2.1\n",
        ]
    )
    assert (said.category, said.action) == ("none", "no_action")


def test_an_exception_that_python_itself_ignored_is_none() -> None:
    lines = b"step 5 | loss 2.1\nException ignored in: <function f>\nAssertionError: can only test a child process\n"
    assert explain([lines]).category == "none"


def test_the_same_exception_is_the_datas_or_the_programs() -> None:
    read_it = b"[rank3]:   File \"/a/dataset.py\", line 5, in __getitem__\n[rank3]: KeyError: 'text'\n"
    head = b"[rank3]: Traceback (most recent call last):\n"
    note = b"3 of 80,000 samples have no text, all in mix/wiki_07.jsonl; at the same position again\n"
    assert explain([head + read_it + note]).category == "data"
    assert (
        explain([head + read_it.replace(b"dataset.py", b"model.py").replace(b"__getitem__", b"forward")]).category
        == "user_code"
    )
    assert explain([head + b"[rank3]: OSError: short read of /d/x.parquet\n"]).category == "data"
    assert explain([head + b"[rank3]: OSError: short read of the pipe\n"]).category == "user_code"
    assert not reads_data(None)


def test_words_lean_only_with_a_clear_lead() -> None:
    assert leaning(["the fan of this node", "bios settings of the node"]) == "infrastructure"
    assert leaning(["the option of the script"]) == "user_code"
    assert leaning(["node, host, script, option"]) == "unknown"
    assert leaning([]) == "unknown"
    said = explain([b"qqq: the option --foo of the launch script\n"])
    assert (said.category, said.action) == ("user_code", "investigate")
    assert said.confidence < 0.3
