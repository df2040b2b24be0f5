"""Target: a durable tier as the archiver sees it: opened when it can be, its troubles told when they begin and end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import CheckpointError, TierFull
from keepstep.checkpoint.files import write_atomic
from keepstep.checkpoint.lease import Claim
from keepstep.checkpoint.notes import TierLabel
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.checkpoint.trouble import Trouble
from keepstep.ports.tier import Tier

SEEN_FILE = "archiver.tiers"
"""In the node directory: directories that have been tiers of this job. One without its marker is a lost mount."""
PATIENCE_S = 30.0
"""How long one operation of a tier that does not answer is tried again; then this generation is skipped there."""
Say = Callable[[str], None]


class Seen:
    """Directories that this node has used, across restarts of the archiver."""

    def __init__(self, node_dir: Path) -> None:
        self._path = node_dir / SEEN_FILE
        self._urls: set[str] = set()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._urls = set(msgspec.json.decode(self._path.read_bytes(), type=list[str]))

    def __contains__(self, url: str) -> bool:
        return url in self._urls

    def add(self, url: str) -> None:
        if url not in self._urls:
            self._urls.add(url)
            with contextlib.suppress(OSError):
                write_atomic(self._path, msgspec.json.encode(sorted(self._urls)))


class Target:
    """One tier of the job's policy.

    Attributes:
        by_itself: a node's own disk: each part counts by itself, and this node removes what is too old.
        last: newest version of each rank that is whole here; a difference may rest on it.
        claim: on the right to write here.
    """

    def __init__(
        self,
        url: str,
        label: TierLabel,
        rate: float,
        seen: Seen,
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self.label = url, label
        self.by_itself = label == "local"
        self.pace = Pace(rate)
        self.last: dict[int, Version] = {}
        self.claim = Claim()
        self._tier: Tier | None = None
        self._seen, self._say, self._clock = seen, say, clock
        self._missed: dict[int, CheckpointError] = {}
        """Why ranks of this node have no part in the generation that is being written."""
        self._error: CheckpointError | None = None
        """The last failure; a pause repeats it."""
        self._writing, self._removing = Trouble(f"{label} tier {url}"), Trouble(f"{label} tier {url}, removing")

    def open(self) -> Tier:
        """Raises ``TierError`` while it cannot be used."""
        if self._tier is None:
            self._tier = open_tier(self.url, self.label, create=True, seen=self.url in self._seen, budget_s=PATIENCE_S)
            self._seen.add(self.url)
        return self._tier

    def admitted(self) -> Tier:
        """The same for writers: raises ``TierHeld``, too, while another run writes there."""
        tier = self.open()
        self.claim.admit(tier)
        return tier

    def renew(self) -> None:
        """Say that this run still writes here, if it does and that is due."""
        if self._tier is not None and self.claim.due:
            with contextlib.suppress(CheckpointError):
                self.claim.admit(self._tier)

    def release(self) -> None:
        """Nothing more is written here."""
        if self._tier is not None:
            with contextlib.suppress(CheckpointError):
                self.claim.release(self._tier)

    # ---------------------------------------------------------------- troubles

    @property
    def pause_s(self) -> float:
        """How long it is left alone, after several failures in a row; 0 when it may be tried."""
        return self._writing.pause_s(self._clock())

    def hurry(self) -> None:
        """The job ends: what is left is tried without pauses."""
        self._writing.hurry()

    @property
    def refusal(self) -> CheckpointError | None:
        """Why no part is written now: there is a pause, or another rank's is missing already and all would be in vain.

        On a node's own disk each part counts by itself.
        """
        if self.pause_s > 0:
            return self._error
        return None if self.by_itself else next(iter(self._missed.values()), None)

    def missed(self, rank: int, error: CheckpointError) -> None:
        """A rank's part could not be written."""
        self._missed.setdefault(rank, error)

    def settle(self, version: Version, ranks: Collection[int]) -> bool:
        """All of this node's parts of a generation have been tried.

        Returns:
            Whether there was no room for one of them: what nobody needs any more may be in the way.
        """
        missed, self._missed = self._missed, {}
        if not missed:
            self._writing.holds()
            return False
        now, error = self._clock(), next(iter(missed.values()))
        if self.pause_s == 0:
            self._writing.failed(now)
            self._error = error
        who = f"the parts of {len(missed)} of {len(ranks)} ranks on this node"
        self._tell(self._writing.begins(error, now, step=version.step, who=who))
        return any(isinstance(one, TierFull) for one in missed.values())

    def failed(self, error: CheckpointError, *, again: bool = False) -> None:
        """It could not be looked at, or a generation not be completed. ``again``: there are pauses between tries."""
        now = self._clock()
        if again:
            self._writing.failed(now)
            self._error = error
        self._tell(self._writing.begins(error, now))

    def worked(self, version: Version) -> None:
        """A generation is complete."""
        self._tell(self._writing.works(version.step, self._clock()))

    def kept(self, error: CheckpointError) -> None:
        """What retention lets go could not be removed."""
        self._tell(self._removing.begins(error, self._clock()))

    def removed(self, version: Version) -> None:
        """What retention lets go is gone."""
        self._tell(self._removing.works(version.step, self._clock()))

    def _tell(self, sentence: str | None) -> None:
        if sentence:
            self._say(sentence)


def targets(config: CheckpointConfig, seen: Seen, say: Say, before: Collection[Target] = ()) -> list[Target]:
    """The tiers of the policy, the nearest first; those that are the same as before stay as they are."""
    policy = config.policy
    wanted: list[tuple[str, TierLabel, int]] = []
    if policy.local_dir:
        wanted.append((policy.local_dir, "local", policy.local_rate))
    if policy.dir:
        wanted.append((policy.dir, "remote", policy.remote_rate))
    found = []
    for url, label, rate in wanted:
        old = next((target for target in before if (target.url, target.label) == (url, label)), None)
        target = old or Target(url, label, rate, seen, say)
        target.pace.set_rate(rate)
        target.claim.belongs(config.job, config.run)
        found.append(target)
    return found
