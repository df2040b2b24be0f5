"""Heartbeat memory: 32 words of 8 bytes that the trainer stores into and the agent reads. No system call, no lock.

One file per slot under ``<node_dir>/beat/<slot>``, mapped by both. Words are native-endian signed 64-bit integers;
each is written by exactly one thread and read whole, so a reader can be late but never see half a word.
"""

from __future__ import annotations

from enum import IntEnum

WORDS = 32
SIZE = WORDS * 8


class Word(IntEnum):
    """Index of each word."""

    LAYOUT = 0
    """``LAYOUT`` once the trainer has attached; 0 before."""
    PID = 1
    EPOCH = 2
    STEP = 3
    """Committed steps so far."""
    PHASE = 4
    STARTED = 5
    """Collectives launched in this process."""
    FINISHED = 6
    """Collectives completed in this process."""
    BEAT_NS = 7
    """CLOCK_MONOTONIC of the last sign of progress (any store below counts: phase, commit, collective)."""
    COMMIT_NS = 8
    """CLOCK_MONOTONIC of the last commit."""
    STEP_NS = 9
    """Duration of the last step, commit to commit, within one epoch; 0 when unknown."""
    ABORT_NS = 10
    """CLOCK_MONOTONIC at which the main thread was last free again after an abort."""
    ARRIVED = 11
    """Bytes of this rank's state that have arrived in this epoch, from wherever it is restored."""
    RESTORING = 12
    """1 while more of them are to come."""
    FIRST_NS = 13
    """CLOCK_MONOTONIC of the first commit of this epoch; 0 before. All ranks commit at about the same time."""

    # Sums over the life of the process, of steady steps only: from one commit to the next within one epoch, with
    # nothing in between but training. Stored at a commit, all at once.
    PACED = 14
    """Steady steps."""
    PACED_NS = 15
    """Their duration, commit to commit."""
    WAIT_NS = 16
    """Of it, the training thread stood in collectives: it waited for other ranks or for the network."""
    DATA_NS = 17
    """It waited for data."""
    GC_NS = 18
    """Garbage collection by the interpreter."""
    SAVE_NS = 19
    """It was held up by snapshots."""
    SIZE = 20
    """Elements of input, as far as the data set of the SDK shows them."""


LAYOUT = 0x4B53_0002


class Phase(IntEnum):
    """What the rank says it is doing. Limits for silence depend on it."""

    STARTING = 0
    SETUP = 1
    STEP = 2
    EVALUATION = 3
    CHECKPOINT = 4
    COMPILE = 5
    RECOVERING = 6
    PARKED = 7
    DONE = 8
    OTHER = 9
