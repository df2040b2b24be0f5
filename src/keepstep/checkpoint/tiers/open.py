"""Open: the tier that a path or URL names, or a sentence that says why there is none."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepstep.checkpoint import mounts
from keepstep.checkpoint.exceptions import TierAway, TierDenied
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.checkpoint.tiers.retry import BUDGET_S, Retrying
from keepstep.ports.tier import Tier

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
"""What obstore takes. ``https`` is left out: a plain web server cannot keep objects."""
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_memory: dict[str, MemoryTier] = {}


def open_tier(
    url: str,
    label: str = "remote",
    *,
    create: bool = False,
    seen: bool = False,
    budget_s: float = BUDGET_S,
) -> Tier:
    """A tier that tries again where that helps.

    Args:
        url: a path, ``file://``, ``s3://bucket/prefix``, ``gs://``, ``az://``, or ``memory://name`` of this process.
        create: make a directory that is not there yet; writers do, readers do not.
        seen: this directory has been a tier before, so without its marker it is a mount that went away.
        budget_s: how long one call may try again after its first failure; 0 tries once.

    Raises:
        TierDenied: no such kind of place, a wrong URL, or the extra is not installed.
        TierMissing: no such directory, and ``create`` is not set.
        TierAway, TierFull: the place cannot be used now.
    """
    return Retrying(_open(url, label, create=create, seen=seen, patient=budget_s > 0), budget_s=budget_s)


def is_directory(url: str) -> bool:
    """Whether this names a directory of a file system."""
    return "://" not in url or url.startswith("file://")


def directory(url: str) -> Path:
    """The directory that a path or ``file://`` URL names.

    Raises:
        TierDenied: not such a URL.
    """
    if "://" not in url:
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise TierDenied(f"{url}: a file URL needs an absolute path of this machine: file:///path/to/dir")
    return Path(unquote(parts.path))


def _open(url: str, label: str, *, create: bool, seen: bool, patient: bool) -> Tier:
    if not url:
        raise TierDenied("an empty name is no place for checkpoints; give a path or a URL such as s3://bucket/prefix")
    if is_directory(url):
        if why := mounts.missing(directory(url)):
            raise TierAway(f"{directory(url)} is not what it should be: {why}; mount it, or name another directory")
        return DirectoryTier(directory(url), label, create=create, seen=seen)
    scheme = url.partition("://")[0].lower()
    if scheme == "memory":
        return _memory.setdefault(url, MemoryTier(label, url))
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "file"))
        raise TierDenied(f"{url}: {scheme}:// is not a place for checkpoints; use a path, or one of {known}")
    if not urlsplit(url).netloc:
        raise TierDenied(f"{url}: names no bucket; write {scheme}://bucket/prefix")
    try:
        from keepstep.checkpoint.tiers.remote_obstore import RemoteTier
    except ImportError as error:
        raise TierDenied(f"{url}: needs obstore: pip install 'keepstep[checkpoint]' ({error})") from error
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return RemoteTier(url, label, plain=plain, patient=patient)
