"""What can go wrong with snapshots, in words a reader can act on."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Base of all errors of this package."""


class BadSetting(CheckpointError):
    """A setting cannot be meant; ``help`` is the way out."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.help}"


class SlotInvalid(CheckpointError):
    """A snapshot file is incomplete, torn or not one of ours; another holder has to be asked."""


class SlotDamaged(SlotInvalid):
    """Bytes of a snapshot differ from their checksums: memory, a wire or a program has changed them."""


class VersionGone(SlotInvalid):
    """A version was overwritten while it was being read; its writer has a newer one."""


class SlotFull(CheckpointError):
    """The memory-backed directory has no room for this version; the older one is untouched."""


class NotEnoughMemory(CheckpointError):
    """The run would need more memory for snapshots than there is; nothing was started."""


class PeerRefused(CheckpointError):
    """A keeper answered, and said no; its sentence is the message."""


class PeerUnreachable(CheckpointError):
    """A keeper could not be reached or the transfer broke off."""


class ManifestDamaged(CheckpointError):
    """A manifest or part description is not what was written; the generation cannot be trusted."""


class PayloadDamaged(CheckpointError):
    """Bytes of a durable part differ from their checksums; another holder has to be asked."""


class GenerationIncomplete(CheckpointError):
    """Not all parts of a generation are there; it does not exist yet, or will never."""


class BaseDamaged(GenerationIncomplete):
    """What a difference rests on was found damaged: it will never be complete, and is not waited for."""


class LayoutMismatch(CheckpointError):
    """The pieces of a checkpoint do not make up what a rank wants; names the tensor and the region."""


class TierError(CheckpointError):
    """A durable tier could not do what was asked; training goes on without it."""


class TierMissing(TierError):
    """There is no object of that name."""


class TierFull(TierError):
    """No room: the disk is full, or a quota is used up. Free space, or keep fewer generations."""


class TierDenied(TierError):
    """The place is read-only, or the credentials do not suffice; trying again is pointless."""


class TierAway(TierError):
    """The place does not answer, or is too slow: a vanished mount, a network, a throttling server. May come back."""


class TierHeld(TierError):
    """Another run writes there now. Its place is not written to until that run has ended."""
