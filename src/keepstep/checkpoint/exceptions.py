"""What can go wrong with snapshots, in words a reader can act on."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Base of all errors of this package."""


class SlotInvalid(CheckpointError):
    """A snapshot file is incomplete, torn or not one of ours; another holder has to be asked."""


class SlotFull(CheckpointError):
    """The memory-backed directory has no room for this version; the older one is untouched."""


class NotEnoughMemory(CheckpointError):
    """The run would need more memory for snapshots than there is; nothing was started."""


class PeerRefused(CheckpointError):
    """A keeper answered, and said no; its sentence is the message."""


class PeerUnreachable(CheckpointError):
    """A keeper could not be reached or the transfer broke off."""
