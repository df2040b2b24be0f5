"""Keepers: a version reaches the buddy node whole or not at all, and comes back from there."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import PeerRefused, PeerUnreachable
from keepstep.checkpoint.peers import PeerClient
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.sums import CHUNK
from keepstep.model.env import SNAP_DIR
from keepstep.model.ids import JobId
from tests.checkpoint.fleet import TOKEN, Fleet, content, fleet, until
from tests.checkpoint.test_slot import fill

__all__ = ["fleet"]

SIZE = CHUNK + 12345


def test_a_version_travels_to_the_buddy_and_back(fleet: Fleet, tmp_path: Path) -> None:
    """A rung bell brings the newest version to the buddy; the acknowledged step appears in the trainer's own slot;
    a newcomer on a third node fetches the same bytes."""
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    for step in (4, 5):
        slot = both.slots[both.target(step)]
        fill(slot, Version(step, 1), step, SIZE)
        fleet.ring("a", f"0 {step}".encode())
        until(lambda s=slot, n=step: s.acked == n, f"step {step} to be acknowledged")
    client = fleet.client("b")
    assert client.have(0) == (Version(5, 1), Version(4, 1))
    path = client.fetch(0, Version(4, 1), tmp_path)
    assert content(path) == bytes([4]) * SIZE
    assert [v for v, _ in pair.look(tmp_path, 0)] == [Version(4, 1)]


def test_a_restarted_keeper_goes_on_where_files_are(fleet: Fleet) -> None:
    """kill -9 of both keepers loses nothing: same port, versions still served, what was written meanwhile is sent."""
    fleet.announce(fleet.roster())
    port = fleet.port("a")
    fleet.kill("a")
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(7, 1), 7, 1000)
    fleet.start("a")
    until(lambda: both.slots[0].acked == 7, "the restarted keeper to send")
    assert fleet.port("a") == port
    fleet.kill("b")
    fleet.start("b")
    until(lambda: fleet.client("b").have(0) == (Version(7, 1),) if reachable(fleet.port("b")) else False, "b to serve")


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("epoch", "key", "token", "why"),
    [
        (1, "e1/controller", TOKEN, "fenced off"),
        (2, "e2/other", TOKEN, "rival"),
        (2, "e2/controller", "wrong", "wrong token"),
    ],
)
def test_strangers_and_the_past_are_refused(fleet: Fleet, epoch: int, key: str, token: str, why: str) -> None:
    """An older epoch, a rival roster of the same epoch, and a wrong token each get a sentence instead of data."""
    fleet.announce(fleet.roster(epoch=2))
    until(lambda: asks(fleet) == "ok", "the roster to be read")
    with pytest.raises(PeerRefused, match=why):
        fleet.client("b", epoch=epoch, key=key, token=token).have(0)


def asks(fleet: Fleet) -> str:
    try:
        fleet.client("b", epoch=1).have(0)
    except PeerRefused:
        return "ok"
    return "not yet"


def test_a_new_buddy_gets_everything_again(fleet: Fleet) -> None:
    """When the ring changes, the acknowledgement is taken back until the new buddy has the version: it is down yet."""
    fleet.nodes = ("a", "b", "c")
    (fleet.root / "c" / SNAP_DIR).mkdir(parents=True)
    fleet.start("c")
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, 1000)
    fleet.ring("a", b"0 1")
    until(lambda: fleet.client("b").have(0) == (Version(1, 1),), "b to have it")
    until(lambda: both.slots[0].acked == 1, "the first acknowledgement")
    fleet.nodes = ("a", "c")
    newer = fleet.roster(epoch=2)
    fleet.kill("c")
    fleet.announce(newer)
    until(lambda: both.slots[0].acked == -1, "the acknowledgement to be taken back")
    fleet.start("c")
    until(lambda: reachable(fleet.port("c")), "c to be back")
    until(lambda: fleet.client("c", epoch=2, key="e2/controller").have(0) == (Version(1, 1),), "c to have it")
    until(lambda: both.slots[0].acked == 1, "the new acknowledgement")
    fleet.nodes = ("a", "b", "c")


def test_a_silent_keeper_does_not_hold_a_newcomer_up() -> None:
    """A port that accepts and says nothing ends the request as soon as the caller has something better to do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = threading.Event()
        client = PeerClient(
            host="127.0.0.1",
            port=server.getsockname()[1],
            job=JobId("job"),
            token="",
            epoch=1,
            key="",
            stop=lambda: asked.set() or True,
        )
        with pytest.raises(PeerUnreachable, match="no longer needed"):
            client.have(0)
        assert asked.is_set()
    with pytest.raises(PeerUnreachable, match="cannot be reached"):
        client.have(0)
