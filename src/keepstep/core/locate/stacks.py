"""Stack consensus: thousands of stacks, a handful of places, and who is not where the others are.

Ranks of one program stand in the same few places. Stacks are brought into a form in which they compare (no addresses,
no line numbers of libraries, nothing of what started the program), those that are equal are put together, and each
place is named by what one waits for there. Aggregation and the minority as suspect: ByteRobust,
https://arxiv.org/abs/2509.16293, section 5.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Rank
from keepstep.model.stacks import Frame, ProcessStacks
from keepstep.model.topology import fold_ranks

Waits = Literal["collective", "data", "storage", "lock", "sleep", "stopped", "ended", "computing", "unknown"]
"""What a place is, seen from training: where one stands when one waits for other ranks, for data, for a file..."""

SHOWN = 3
"""Frames by which a place is told to people."""

_LIBRARY = re.compile(r"^.*(?:^|/)(?:site-packages|dist-packages|lib/python3\.\d+|src(?=/keepstep/))/(.+)$")
_STARTER = re.compile(r"keepstep/agent/|(?:^|/)runpy\.py$|<frozen runpy>|/multiprocessing/(?:process|popen|spawn|fork)")
"""Files of what has started a program or a thread; they are the same everywhere."""
_COLLECTIVE = re.compile(
    r"(all_|i?barrier|monitored_barrier|broadcast|gather|scatter|reduce|recv|send|wait_tensor|batch_isend_irecv)"
)
"""Functions of ``torch.distributed`` in which one waits for others."""
_HANDLE = re.compile(r"(?:^|/)keepstep/trainer/circuit_torch\.py$")
"""Where one waits for an operation by its handle."""
_BACKWARD = re.compile(r"torch/autograd/")
"""A backward pass that sleeps waits for its gradients' reduction."""
_DATA = re.compile(r"torch/utils/data/|torchdata/|webdataset/|datasets/iterable_dataset|streaming/base")
_STORAGE_FILE = re.compile(r"torch/serialization|safetensors/|fsspec/|s3fs/|gcsfs/|torch/distributed/checkpoint/")
_STORAGE_CALL = re.compile(r"open|read|readinto|readline|write|flush|fsync|stat|listdir|scandir|mkdir")
_STORAGE_SLEEP = re.compile(
    r"nfs|rpc_wait|^ll_|request_wait|lustre|ptlrpc|ceph|fuse|io_schedule|wait_on_page|folio_wait|jbd2|xfs_|ext4_|blk_|gpfs|cifs"
)
"""Kernel functions in which a process sleeps that waits for a file system or a device."""
_STORAGE_ASLEEP = re.compile(
    r"^(?:request_wait_answer|fuse_|nfs|rpc_wait|ll_|cl_|ptlrpc|ceph|gpfs|cifs|smb|wait_on_page|folio_wait"
    r"|locks_lock_inode|posix_lock|flock|nlm)"
)
"""The same for a process that can be woken by a signal: servers of files, and locks on files."""
_NO_STORAGE = re.compile(r"pipe|sock|skb|unix_|poll|futex|tty")
"""Kernel functions in which a call that reads waits for another process."""
_LOCK = re.compile(r"wait|acquire|join|__enter__|_wait_for_tstate_lock|lock")


class Place(Struct, frozen=True, kw_only=True):
    """Where some ranks stand.

    Attributes:
        frames: the comparable form, outermost first.
        shown: its innermost calls, for people.
    """

    waits: Waits
    ranks: tuple[Rank, ...]
    frames: tuple[str, ...]
    shown: str

    @property
    def doing(self) -> str:
        """``waits in a collective``, or ``wait`` where there are several."""
        one, several = _WORDS[self.waits]
        return one if len(self.ranks) == 1 else several

    @property
    def who(self) -> str:
        return f"rank{'s' if len(self.ranks) > 1 else ''} {fold_ranks(self.ranks)}"

    @property
    def line(self) -> str:
        return f"{self.who} {self.doing}: {self.shown or 'no stack'}"


_WORDS: dict[Waits, tuple[str, str]] = {
    "collective": ("waits in a collective", "wait in a collective"),
    "data": ("waits for data", "wait for data"),
    "storage": ("waits for a file system or a device", "wait for a file system or a device"),
    "lock": ("waits for a lock", "wait for a lock"),
    "sleep": ("sleeps", "sleep"),
    "stopped": ("has been stopped by a signal", "have been stopped by a signal"),
    "ended": ("has ended", "have ended"),
    "computing": ("computes", "compute"),
    "unknown": ("stands somewhere unknown", "stand somewhere unknown"),
}


class Consensus(Struct, frozen=True, kw_only=True):
    """Attributes:
    places: the one with most ranks first.
    odd: ranks outside the place of the majority; empty where there is no majority.
    storage: all stand, or a child of each stands, in a wait for storage: nobody's node is guilty.
    """

    places: tuple[Place, ...]
    odd: tuple[Rank, ...]
    storage: bool

    @property
    def reason(self) -> str:
        """In one sentence who stands where."""
        return "; ".join(place.line for place in self.places[:4])


def consensus(processes: Iterable[ProcessStacks]) -> Consensus:
    """Put together what was seen of a job's ranks at about the same time."""
    trainers, children = _by_rank(processes)
    groups: dict[tuple[Waits, tuple[str, ...]], list[Rank]] = {}
    shown: dict[tuple[Waits, tuple[str, ...]], str] = {}
    for rank, process in sorted(trainers.items()):
        key = waits_for(process), comparable(process)
        groups.setdefault(key, []).append(rank)
        shown.setdefault(key, tell(process))
    places = [
        Place(waits=waits, ranks=tuple(ranks), frames=frames, shown=shown[waits, frames])
        for (waits, frames), ranks in groups.items()
    ]
    places.sort(key=lambda place: (-len(place.ranks), place.ranks))
    stuck = [rank for rank, process in trainers.items() if _on_storage(process, children.get(rank, ()))]
    return Consensus(places=tuple(places), odd=_odd(places), storage=bool(trainers) and len(stuck) == len(trainers))


def _odd(places: Sequence[Place]) -> tuple[Rank, ...]:
    """Ranks that do not wait in a collective while more than half do, else those outside the largest place."""
    world = sum(len(place.ranks) for place in places)
    waiting = [place for place in places if place.waits == "collective"]
    together = sum(len(place.ranks) for place in waiting)
    if together * 2 > world:
        outside = [rank for place in places if place.waits != "collective" for rank in place.ranks]
        if outside:
            return tuple(sorted(outside))
    if places and len(places[0].ranks) * 2 > world:
        return tuple(sorted(rank for place in places[1:] for rank in place.ranks))
    return ()


def on_storage(processes: Iterable[ProcessStacks]) -> set[Rank]:
    """Ranks that wait for a file system or a device, themselves or by way of what they have started."""
    trainers, children = _by_rank(processes)
    return {rank for rank, process in trainers.items() if _on_storage(process, children.get(rank, ()))}


def _by_rank(
    processes: Iterable[ProcessStacks],
) -> tuple[dict[Rank, ProcessStacks], dict[Rank, list[ProcessStacks]]]:
    trainers: dict[Rank, ProcessStacks] = {}
    children: dict[Rank, list[ProcessStacks]] = {}
    for process in processes:
        if process.role == "trainer":
            trainers[process.rank] = process
        else:
            children.setdefault(process.rank, []).append(process)
    return trainers, children


def _on_storage(process: ProcessStacks, children: Sequence[ProcessStacks]) -> bool:
    if waits_for(process) == "storage":
        return True
    return waits_for(process) == "data" and any(waits_for(child) == "storage" for child in children)


# -------------------------------------------------------------------- one stack


def waits_for(process: ProcessStacks) -> Waits:
    """What the main thread waits for, as far as the kernel and its calls tell."""
    if process.state in "ZX":
        return "ended"
    if process.state in "Tt":
        return "stopped"
    if process.state == "D" and (not process.wchan or _STORAGE_SLEEP.search(process.wchan)):
        return "storage"
    if _STORAGE_ASLEEP.match(process.wchan):
        return "storage"
    thread = process.main
    if thread is None or not thread.frames:
        return "unknown"
    if found := _by_calls(thread.frames, process.wchan):
        return found
    if process.state == "R":
        return "computing"
    if _BACKWARD.search(short(thread.frames[0].file)):
        return "collective"
    return "sleep"


def _by_calls(frames: Sequence[Frame], wchan: str) -> Waits | None:
    """The innermost call that says what is waited for."""
    for number, frame in enumerate(frames):
        file, name = short(frame.file), _last(frame)
        reads = number == 0 and _STORAGE_CALL.fullmatch(name) and not _NO_STORAGE.search(wchan)
        if reads or _STORAGE_FILE.search(file):
            return "storage"
        if ("torch/distributed/" in file and _COLLECTIVE.match(name)) or (_HANDLE.search(file) and "wait" in name):
            return "collective"
        if _DATA.search(file):
            return "data"
    if short(frames[0].file).endswith(("threading.py", "queue.py")) and _LOCK.fullmatch(_last(frames[0])):
        return "lock"
    return None


def _last(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1]


def comparable(process: ProcessStacks) -> tuple[str, ...]:
    """The main thread's calls, outermost first, in a form that is equal on all ranks that stand in the same place."""
    thread = process.main
    if thread is None:
        return ()
    return tuple(called(frame) for frame in reversed(without_starters(thread.frames)))


def tell(process: ProcessStacks) -> str:
    """The innermost calls, for people: ``file:line function < caller``."""
    thread = process.main
    if thread is None or not thread.frames:
        return process.why
    own = [frame for frame in thread.frames if short(frame.file) == frame.file and not _starts(frame)]
    inner = thread.frames[0]
    chosen = [inner, *[frame for frame in own if frame is not inner]][:SHOWN]
    return " < ".join(f"{frame.function} ({short(frame.file)}:{frame.line})" for frame in chosen)


def without_starters(frames: Sequence[Frame]) -> list[Frame]:
    """The calls of the program itself."""
    return [frame for frame in frames if not _starts(frame)]


def short(file: str) -> str:
    """A library's file from the library's name on; others as they are."""
    found = _LIBRARY.search(file)
    return found[1] if found else file


def called(frame: Frame) -> str:
    """One call in a form that is equal on all ranks that have made it in the same place."""
    file = short(frame.file)
    # A line of a library says which version it is; a line of the user's own code says which of two loops.
    return f"{file}:{frame.function}" if file != frame.file else f"{file}:{frame.line}:{frame.function}"


def _starts(frame: Frame) -> bool:
    """Whether the frame belongs to what started the program, and says nothing of where it stands."""
    return bool(_STARTER.search(frame.file))
