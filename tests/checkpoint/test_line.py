"""Lines: bulk arrives whole whatever its size, a reader never waits for more than is to come, silence has a limit."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.exceptions import PeerUnreachable, SlotInvalid
from keepstep.checkpoint.line import WAKE_BYTES, Line


@contextlib.contextmanager
def connection() -> Iterator[tuple[Line, Line, socket.socket]]:
    """Both ends of a TCP connection over loopback, and the receiving end's socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with Line(near, "receiver") as sender, Line(far, "sender") as receiver:
        yield sender, receiver, far


def low_water(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.parametrize("size", [1, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1, 5 * WAKE_BYTES + 12_345])
def test_a_file_arrives_as_it_is_and_words_after_it_are_heard(tmp_path: Path, size: int) -> None:
    """Also what comes after a bulk: a reader that went on waiting for a large helping would not hear one byte."""
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(b"head" + data + b"tail")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with connection() as (sender, receiver, sock), contextlib.closing(os.fdopen(fd)):
        failed: list[BaseException] = []

        def give() -> None:
            try:
                sender.send_file(fd, 4, 4 + size)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=give)
        thread.start()
        receiver.expect(size)
        got = bytearray(size)
        half = size // 2
        with memoryview(got) as view:
            receiver.read_into(view[:half])
            receiver.read_into(view[half:])
        thread.join(20)
        assert not failed
        assert bytes(got) == data
        sender.send(b"!")
        assert receiver.read(1) == b"!"
        assert low_water(sock) == 1


def test_large_helpings_are_asked_for_only_while_so_much_is_to_come() -> None:
    """Linux wakes no reader before the low-water mark: at the end of a bulk it has to be down again."""
    with connection() as (sender, receiver, sock):
        marks: list[int] = []
        receiver.expect(2 * WAKE_BYTES)
        sender.send(bytes(100))
        receiver.read_into(memoryview(bytearray(100)))
        marks.append(low_water(sock))
        sender.send(bytes(WAKE_BYTES))
        receiver.read_into(memoryview(bytearray(WAKE_BYTES)))
        sender.send(bytes(1))
        receiver.read_into(memoryview(bytearray(1)))
        marks.append(low_water(sock))
        assert marks == [WAKE_BYTES, 1]


def test_a_file_that_became_shorter_is_no_bulk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with connection() as (sender, _, _), contextlib.closing(os.fdopen(fd)):
        with pytest.raises(SlotInvalid, match="ends at byte 10, not 20"):
            sender.send_file(fd, 0, 20)


def test_a_sender_that_stops_in_mid_bulk_is_given_up() -> None:
    """What did arrive is taken, the rest is waited for no longer than was said."""
    with connection() as (sender, receiver, _):
        receiver.expect(4 * WAKE_BYTES)
        sender.send(bytes(WAKE_BYTES + 5))
        got = bytearray(4 * WAKE_BYTES)
        with pytest.raises(PeerUnreachable, match="went silent"):
            receiver.read_into(memoryview(got), patience_s=0.3)


def test_a_receiver_that_is_gone_ends_the_sending(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 << 20)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with connection() as (sender, receiver, _), contextlib.closing(os.fdopen(fd)):
        receiver.cut()
        with pytest.raises(PeerUnreachable, match="broke off"):
            sender.send_file(fd, 0, 64 << 20)
