"""Sockets are found by their marks and ended without being closed."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from keepstep.trainer.sockets import (
    Handle,
    connected,
    has_peer_port,
    has_timeout,
    listening_address,
    open_sockets,
    shut_down,
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            yield near, far


def handle(sock: socket.socket) -> Handle:
    return Handle(sock.fileno(), os.fstat(sock.fileno()).st_ino)


def test_new_sockets_are_seen(listener: socket.socket) -> None:
    """What appears between two looks is what was opened between them."""
    before = open_sockets()
    with socket.create_connection(listener.getsockname()) as near:
        assert handle(near) in open_sockets() - before


def test_shut_down_ends_both_sides_and_closes_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    """Both ends read the end of the stream; the descriptor is still its owner's."""
    near, far = pair
    assert shut_down([handle(near)]) == 1
    assert far.recv(1) == b""
    assert near.recv(1) == b""
    assert near.fileno() >= 0
    os.fstat(near.fileno())


def test_a_listening_socket_is_left_alone(listener: socket.socket) -> None:
    """Gloo ends the process when its listener breaks."""
    assert shut_down([handle(listener)]) == 0
    with socket.create_connection(listener.getsockname()):
        pass


def test_a_reused_descriptor_is_left_alone(listener: socket.socket) -> None:
    """The inode tells that the number now means somebody else's connection."""
    first = socket.create_connection(listener.getsockname())
    listener.accept()[0].close()
    old = handle(first)
    first.close()
    with socket.create_connection(listener.getsockname()) as second:
        far, _ = listener.accept()
        with far:
            stale = Handle(second.fileno(), old.inode)
            assert shut_down([stale]) == 0
            far.sendall(b"x")
            assert second.recv(1) == b"x"


def test_unix_sockets_and_pipes_are_left_alone() -> None:
    """Only TCP is ended: the agent's and the user's other channels stay."""
    near, far = socket.socketpair()
    with near, far:
        assert shut_down([handle(near)]) == 0
        near.sendall(b"x")
        assert far.recv(1) == b"x"


@pytest.mark.parametrize(
    ("set_ms", "asked_ms", "same"), [(30070, 30070, True), (30000, 30070, False), (0, 30070, False)]
)
def test_gloos_timeout_tells_its_connections(
    pair: tuple[socket.socket, socket.socket], set_ms: int, asked_ms: int, same: bool
) -> None:
    """A connection counts only if it carries the timeout that gloo was given."""
    near, _ = pair
    value = struct.pack("ll", set_ms // 1000, set_ms % 1000 * 1000)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    assert (connected([handle(near)], has_timeout(asked_ms)) == (handle(near),)) is same


def test_the_stores_connection_is_told_by_its_port(pair: tuple[socket.socket, socket.socket]) -> None:
    """The far port is the store's; the other end of the same connection does not match."""
    near, far = pair
    wanted = has_peer_port(near.getpeername()[1])
    assert connected([handle(near), handle(far)], wanted) == (handle(near),)


def test_listening_addresses_are_found_in_digits(listener: socket.socket) -> None:
    """Only a listening socket bound to one address has one to tell."""
    assert listening_address(handle(listener)) == "127.0.0.1"
    with socket.create_connection(listener.getsockname()) as near:
        assert listening_address(handle(near)) is None
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert listening_address(handle(everywhere)) is None
