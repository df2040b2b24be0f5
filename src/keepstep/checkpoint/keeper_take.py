"""The receiving half of the keeper: other nodes' versions come in, one transfer per rank at a time.

A transfer that has been cut off may still have a thread here when its sender comes back; the newer one ends it and
waits until it has left, so that the two never write into the same memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from keepstep.checkpoint import pair
from keepstep.checkpoint.arrival import MAX_SLOT, Shelf
from keepstep.checkpoint.exceptions import CheckpointError, PeerRefused, PeerUnreachable, SlotDamaged
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.peers import Answer, Put
from keepstep.checkpoint.slot import HEADER, Slot
from keepstep.checkpoint.transfer import receive

TAKEOVER_S = 5.0
"""How long a newer transfer waits for the one it ends."""


class _Transfer:
    def __init__(self, line: Line, put: Put) -> None:
        self.line, self.order = line, (put.epoch, put.version)
        self.ended = threading.Event()


class Inbox:
    """All replicas of one node.

    Args:
        fence: why a request must not be served, in a sentence; asked again before a version counts.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fence: Callable[[Put], str],
        tell: Callable[[Note], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._directory, self._fence, self._tell, self._say = directory, fence, tell, say
        self._lock = threading.Lock()
        self._now: dict[int, _Transfer] = {}
        self._shelves: dict[int, Shelf] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._drop_unsealed()

    def _drop_unsealed(self) -> None:
        """A predecessor ended between adopting a version and sealing it: nobody was told that it is here."""
        for rank in pair.ranks_in(self._directory):
            for _, path in pair.look(self._directory, rank):
                with contextlib.suppress(OSError, CheckpointError), contextlib.closing(Slot(path)) as slot:
                    if not slot.sealed:
                        slot.invalidate()

    def take(self, line: Line, put: Put) -> bool:
        """Serve one ``Put`` whose sender has been let in; true when the line can carry the next one."""
        try:
            if not HEADER < put.size <= MAX_SLOT:
                raise PeerRefused(f"a version of {put.size} bytes cannot be right")
            with self._alone(line, put):
                line.say(Answer(ok=True))
                shelf = self._shelves.setdefault(put.rank, Shelf(self._directory, put.rank))
                receive(line, shelf, put.version, allowed=lambda: self._fence(put))
                return True
        except PeerRefused as error:
            line.say(Answer(ok=False, why=str(error)))
        except PeerUnreachable:
            pass  # the sender is gone: nothing was completed, nobody waits; what has come stays for its next try
        except SlotDamaged as error:
            self._say(f"take {put.rank}", str(error))
            self._tell(Note(what="damaged", tier="peer", step=put.version.step, rank=put.rank, why=str(error)))
        except (CheckpointError, OSError) as error:
            self._say(f"take {put.rank}", str(error))
        return False

    def forget(self, rank: int) -> None:
        """The files of this rank are not wanted here any more."""
        with self._lock:
            if (now := self._now.get(rank)) is not None:
                now.line.cut()
                return
            if (shelf := self._shelves.pop(rank, None)) is not None:
                shelf.close()

    @contextlib.contextmanager
    def _alone(self, line: Line, put: Put) -> Iterator[None]:
        """Be the only one that writes this rank's replicas."""
        mine = _Transfer(line, put)
        while True:
            with self._lock:
                other = self._now.get(put.rank)
                if other is None:
                    self._now[put.rank] = mine
                    break
            if other.order > mine.order:
                raise PeerRefused(f"step {other.order[1].step} of rank {put.rank} is arriving here already")
            other.line.cut()
            if not other.ended.wait(TAKEOVER_S):
                raise PeerRefused(f"another transfer of rank {put.rank} does not end; try again")
        try:
            yield
        finally:
            with self._lock:
                del self._now[put.rank]
            mine.ended.set()
