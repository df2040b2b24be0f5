"""Streams of JSON lines: nothing blocks, nothing is lost or torn, and nobody can fill our memory."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.agent import lines
from keepstep.agent.lines import Lines


class Ends:
    """A stream, the socket at its other end, and what it has said to its owner."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.heard: list[dict[str, Any]] = []
        self.ended = 0
        self.stream = Lines(ours, self.selector, on_message=self.heard.append, on_end=self._on_end)

    def _on_end(self, stream: Lines) -> None:
        assert stream is self.stream
        self.ended += 1

    def turn(self) -> None:
        """Serve whatever is ready, until nothing is."""
        while found := self.selector.select(0):
            for key, mask in found:
                assert key.data is self.stream
                self.stream.serve(mask)

    def close(self) -> None:
        self.theirs.close()
        self.stream.sock.close()
        self.selector.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    one = Ends()
    yield one
    one.close()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(said=st.lists(st.dictionaries(st.text(), st.text()), max_size=8), cuts=st.lists(st.integers(1, 40), max_size=30))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(said: list[dict[str, str]], cuts: list[int]) -> None:
    """The bytes come in pieces of any size; the messages are those that were sent."""
    ends = Ends()
    try:
        data = b"".join(json.dumps(one).encode() + b"\n" for one in said)
        for cut in [*cuts, len(data)]:
            if piece := data[:cut]:
                ends.theirs.sendall(piece)
                data = data[cut:]
                ends.turn()
        assert ends.heard == said
        assert ends.ended == 0
    finally:
        ends.close()


def test_what_does_not_fit_now_is_sent_when_there_is_room(ends: Ends) -> None:
    """A reader that is late gets everything; meanwhile nobody waits for it."""
    said = [{"n": n, "pad": "x" * 50_000} for n in range(40)]
    for one in said:
        ends.stream.say(one)
    got = bytearray()
    while got.count(b"\n") < len(said):
        got += ends.theirs.recv(1 << 20)
        for key, mask in ends.selector.select(0):
            key.data.serve(mask)
    assert [json.loads(line) for line in got.splitlines()] == said
    assert ends.selector.get_key(ends.stream.sock).events == selectors.EVENT_READ, "no busy loop afterwards"


def test_who_does_not_read_is_cut_off(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is bounded: then the stream ends, once, and the selector forgets it."""
    monkeypatch.setattr(lines, "OUT_BYTES", 1_000_000)
    while not ends.ended:
        ends.stream.say({"pad": "x" * 100_000})
    assert ends.ended == 1
    assert not ends.selector.get_map()


def test_a_line_without_end_is_cut_off(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can make us keep bytes for ever."""
    monkeypatch.setattr(lines, "LINE_BYTES", 10_000)
    ends.theirs.sendall(b"x" * 10_001)
    ends.turn()
    assert (ends.ended, ends.heard) == (1, [])


def test_the_end_of_the_other_side_is_told_once(ends: Ends) -> None:
    """What was sent before it still counts."""
    ends.theirs.sendall(b'{"op": "leave"}\n')
    ends.theirs.close()
    ends.turn()
    assert (ends.ended, ends.heard) == (1, [{"op": "leave"}])
