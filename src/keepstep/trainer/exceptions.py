"""Errors of the trainer: what can go wrong inside the training process, each with its way out."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all errors that the trainer raises on purpose."""


class CommunicationAborted(TrainerError, RuntimeError):
    """A collective was ended from outside because the epoch is over; the loop goes round again after recovery."""


class GroupsAborted(CommunicationAborted):
    """Building communicators was ended by a newer abort: a second fault. Build again for the newest epoch."""


class RebuildTimeout(TrainerError, TimeoutError):
    """Communicators did not come together within their limit; the message names the ranks that are missing."""


class RebuildFailed(TrainerError, RuntimeError):
    """Communicators could not be built: a member went away while connecting, or the store does not answer."""


class GroupsUnsupported(TrainerError, RuntimeError):
    """This process has communication that cannot be rebuilt in process; the message says which and what to do."""


class FrameworkUnsupported(TrainerError, RuntimeError):
    """The state of DDP or FSDP2 cannot be brought back to idle here (unknown torch version or unknown layout)."""


class StepMisused(TrainerError, RuntimeError):
    """``ks.steps``, ``with step`` and ``step.commit`` were not used the way the loop needs; the message shows how."""


class StateNotPlain(TrainerError, TypeError):
    """A registered object's ``state_dict`` holds something that cannot be kept without pickle; names object and key."""


class StateMismatch(TrainerError, RuntimeError):
    """A snapshot does not fit the model, optimizer or data that this process has built; names what differs."""


class ReplayRefused(TrainerError, RuntimeError):
    """A step cannot be replayed bit for bit, or not here; the message says why and what to do instead."""


class ReplayDiffers(TrainerError, RuntimeError):
    """A replayed step did not come out as it was when it was kept; names the tensors. Nothing live was changed."""


class CannotResume(TrainerError, RuntimeError):
    """In-process recovery has come to its end here; a higher rung of the ladder has to take over."""


class InjectedFault(TrainerError, RuntimeError):
    """Asked for by a person (``keepstep inject exception``), to see what the job makes of it."""


class StepUndone(TrainerError):
    """The guard has put an older state back on all ranks; ``with step`` swallows this, the loop goes on from there."""


class GuardStopped(TrainerError, RuntimeError):
    """The guard has ended training: what it found cannot be mended here; the message says what and the way out."""
