"""Whole logs: the first cause and not the loudest line."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.diagnose.explain import explain, explain_files
from keepstep.core.diagnose.observe import Source
from keepstep.core.diagnose.result import Diagnosis
from keepstep.core.diagnose.scan import LONGEST_LINE

TIMEOUT = (
    "[rank{r}]:[E ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum=18342, OpType=ALLREDUCE, NumelIn=4194304, NumelOut=4194304, Timeout(ms)=600000) ran for 600021 milliseconds"
)
FELL = "node-017 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=x, GPU has fallen off the bus."
BUG = [
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/job/train.py", line 88, in <module>',
    "[rank3]:     main()",
    '[rank3]:   File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl',
    "[rank3]:     return forward_call(*args, **kwargs)",
    '[rank3]:   File "/job/model.py", line 12, in forward',
    "[rank3]:     return table[key]",
    "[rank3]: KeyError: 'w'",
]
FULL = "OSError: [Errno 28] No space left on device: '/ckpt/step_100.tmp'"
CASES: dict[str, list[str]] = {"fell": [FELL], "bug": BUG, "full": [FULL]}


def say(lines: list[str]) -> Diagnosis:
    return explain([("\n".join(lines) + "\n").encode()])


def verdict(said: Diagnosis) -> tuple[object, ...]:
    return said.category, said.root_cause.partition(":")[0], said.action, said.transient


def timeouts(ranks: range) -> list[str]:
    return [TIMEOUT.format(r=rank) for rank in ranks]


def test_a_gpu_that_is_gone_explains_the_time_outs_of_all_others() -> None:
    said = say([*timeouts(range(64)), FELL])
    assert verdict(said) == ("infrastructure", "gpu_fell_off_bus", "replace_node", False)
    assert said.culprit.node == "node-017"
    assert said.culprit.gpu == "0000:9d:00"
    assert said.evidence[0].line_number == 65
    assert said.cascade == {"collective_timeout": 64}


def test_an_exception_is_blamed_on_the_innermost_line_of_the_users_own_code() -> None:
    said = say([*BUG, *timeouts(range(4, 64))])
    assert said.category == "user_code"
    assert (said.culprit.file, said.culprit.line, said.culprit.rank) == ("/job/model.py", 12, 3)
    assert said.action == "stop_and_notify_user"


def test_tracebacks_of_many_ranks_woven_into_each_other_are_told_apart() -> None:
    other = [
        line.replace("rank3", "rank9").replace("model.py", "loss.py").replace("KeyError", "IndexError") for line in BUG
    ]
    woven = [line for pair in zip(BUG, other, strict=True) for line in pair]
    said = say(woven)
    assert (said.culprit.rank, said.culprit.file) in {(3, "/job/model.py"), (9, "/job/loss.py")}


def test_one_rank_missing_among_the_time_outs_is_the_suspect_and_nobody_is_evicted() -> None:
    said = say([*timeouts(range(21)), *timeouts(range(22, 64))])
    assert (said.category, said.action, said.culprit.rank) == ("infrastructure", "investigate", 21)
    assert said.confidence < 0.5


def test_different_sizes_at_the_same_number_are_the_users_mistake() -> None:
    said = say([*timeouts(range(7)), TIMEOUT.format(r=7).replace("NumelIn=4194304", "NumelIn=11")])
    assert (said.category, said.culprit.rank) == ("user_code", 7)


def test_only_consequences_name_nobody() -> None:
    said = say(
        ["[rank1]: torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error"]
    )
    assert (said.category, said.action) == ("unknown", "investigate")


def test_an_exception_that_was_caught_is_no_incident() -> None:
    said = say([*BUG, *(f"step {i} | loss 2.{i} | tok/s 300" for i in range(20))])
    assert (said.category, said.action) == ("none", "no_action")


def test_one_node_that_waits_for_storage_is_told_from_all_nodes_that_wait() -> None:
    stall = "node-{n:03} kernel: nfs: server fs01 not responding, still trying"
    one = say([stall.format(n=4), "other nodes: no nfs messages"])
    assert (one.category, one.action, one.culprit.node) == ("infrastructure", "replace_node", "node-004")
    everybody = say([stall.format(n=n) for n in range(8)])
    assert everybody.action == "retry_with_backoff"
    assert everybody.culprit.node in {"", *(f"node-{n:03}" for n in range(8))}


@pytest.mark.parametrize(
    ("flaps", "action"), [(1, "restart_in_place"), (6, "replace_node")], ids=["one flap passes", "many blame the cable"]
)
def test_how_often_a_link_flaps_decides(flaps: int, action: str) -> None:
    pair = [
        "node-052 kernel: mlx5_core 0000:5e:00.0 mlx5_3: Port: 1 Link DOWN",
        "node-052 kernel: mlx5_core mlx5_3: Port: 1 Link ACTIVE",
    ]
    assert say(pair * flaps).action == action


def test_nothing_is_unknown_and_a_healthy_log_is_none() -> None:
    assert explain([]).category == "unknown"
    assert say(["step 1 loss 2.0", "step 2 loss 1.9"]).category == "none"


def test_files_tell_node_and_rank_by_their_names() -> None:
    bare = [line.replace("[rank3]: ", "") for line in BUG]
    said = explain_files(
        [
            (Source(name="rank_0.err", node="node-1", rank=0), [b"NCCL error: unhandled system error\n"]),
            (Source(name="rank_5.err", node="node-2", rank=5), ["\n".join(bare).encode()]),
        ]
    )
    assert (said.culprit.node, said.culprit.rank) == ("node-2", 5)
    assert (said.evidence[0].source, said.evidence[0].line_number) == ("rank_5.err", 8)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=3_000))
def test_any_bytes_are_a_legal_log(data: bytes) -> None:
    explain([data])


TOKENS = st.sampled_from(
    [
        FELL,
        FULL,
        *BUG,
        TIMEOUT.format(r=1),
        "Xid",
        "SXid (PCI:",
        "Process 1 has 1.0 GiB",
        "\r",
        "\x1b[31m",
        "\0",
        "run A nan, run B",
        "[rank",
        "rank 99999999999",
        "2026-99-99T99:99:99",
        'File "',
        "node-",
        "99999999-1",
        "exitcode : -9",
        "(\u0661)",
        "nan",
    ]
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.sampled_from([" ", "\n", ": ", ""])), max_size=40))
def test_no_mixture_of_known_words_raises(parts: list[tuple[str, str]]) -> None:
    explain(["".join(text + gap for text, gap in parts).encode()])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(min_value=1, max_value=4_000), max_size=6))
def test_the_cuts_between_pieces_do_not_matter(case: str, cuts: list[int]) -> None:
    data = "\r\n".join([*timeouts(range(8)), *CASES[case], "x" * 40_000]).encode()

    def pieces() -> Iterator[bytes]:
        at = 0
        for size in cuts:
            yield data[at : at + size]
            at += size
        yield data[at:]

    assert explain(pieces()) == explain([data])


NOISE = st.lists(
    st.sampled_from(
        [
            "step 12 loss 2.1 lr 1e-4",
            "[W ProcessGroupNCCL.cpp] Warning: WARNING: destroy_process_group() was not called before program exit",
            "UserWarning: something is deprecated",
            "node-3 kernel: EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
            "eval error_rate 0.03, 0 errors",
            *timeouts(range(100, 110)),
        ]
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CASES)), NOISE)
def test_noise_before_the_cause_does_not_change_the_verdict(case: str, noise: list[str]) -> None:
    assert verdict(say([*noise, *CASES[case]])) == verdict(say(CASES[case]))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(min_value=0, max_value=8), max_size=20))
def test_time_outs_between_the_lines_do_not_change_the_verdict(case: str, places: list[int]) -> None:
    lines = list(CASES[case])
    for number, place in enumerate(places):
        lines.insert(min(place, len(lines)), TIMEOUT.format(r=100 + number))
    assert verdict(say(lines)) == verdict(say(CASES[case]))


def test_utf16_colours_and_progress_bars_hide_nothing() -> None:
    filler = "\n".join(f"plain text {i}" for i in range(200))
    assert explain([f"{filler}\n{FELL}\n{filler}".encode("utf-16")]).culprit.node == "node-017"
    assert say([f"\x1b[31m{FELL}\x1b[0m"]).culprit.node == "node-017"
    bar = "".join(f"\r {i}%|#| {i}/100 [00:01<00:02]" for i in range(100))
    assert say([f"{bar}\r{FELL}"]).culprit.node == "node-017"


def test_a_line_without_an_end_needs_no_memory() -> None:
    """16 MiB without a newline; what is held of it is a few blocks."""
    piece = zlib.compress(b"") * 4096

    def endless() -> Iterator[bytes]:
        yield FELL.encode() + b"\n"
        for _ in range((16 << 20) // len(piece)):
            yield piece.replace(b"\n", b" ")

    said = explain(endless())
    assert said.root_cause.startswith("gpu_fell_off_bus")
    assert all(len(one.text) < LONGEST_LINE for one in said.evidence)


def test_a_cause_deep_in_a_large_log_is_found_and_numbered() -> None:
    healthy = "".join(f"[rank{i % 8}] step {i} loss {i % 7}.{i % 10} tok/s {i}\n" for i in range(20_000)).encode()
    said = explain([healthy, FELL.encode() + b"\n", healthy])
    assert said.evidence[0].line_number == 20_001
    assert said.root_cause.startswith("gpu_fell_off_bus")
