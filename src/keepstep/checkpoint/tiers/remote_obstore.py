"""Remote: a tier in an object store (S3, GCS, Azure and what speaks like them) through obstore.

An object store shows an object when its upload is complete, so no temporary names are needed. What an interrupted
multipart upload leaves behind is invisible and costs money: a lifecycle rule of the bucket has to end such uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import MemoryStore, ObjectStore, from_url

from keepstep.checkpoint.exceptions import TierAway, TierDenied, TierError, TierFull, TierMissing

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

SINGLE_PUT = 8 * 1024 * 1024
"""Objects up to this size go in one request; larger ones in parts of this size."""
PARTS_AT_ONCE = 4
"""Parts in flight; bounds memory to so many parts."""
MAX_PARTS = 10_000
"""What S3 accepts for one upload; parts grow where an object comes near that. Chunks may say ``size_hint``."""
REQUEST_S = 60.0
"""One request takes no longer; a slower link than a part per minute cannot hold a checkpoint."""
CONNECT_S = 5.0
STORE_RETRIES = 1
"""Tries inside the library; patience beyond that is the tier's own (``retry``)."""
PART_RETRIES = 8
"""The same for each part of an upload: a store that throttles in the middle costs that part anew, not all before it."""
PART_PAUSE_S = 5.0
"""Longest pause before a part is sent again; they grow, and are drawn at random."""
_FULL = ("insufficientstorage", "507 insufficient", "quotaexceeded", "quota exceeded", "no space left")
_DENIED = ("403 forbidden", "401 unauthorized", "accessdenied", "nosuchbucket", "invalidaccesskeyid", "301 moved")
Config = dict[str, str]


class RemoteTier:
    """Objects below the URL's prefix.

    Args:
        config: the store's settings as obstore names them; the environment's where left out.
        plain: an endpoint without TLS is meant.
        patient: parts of an upload are sent again and again.

    Raises:
        TierDenied: the URL or the store's settings cannot be right.
    """

    def __init__(
        self,
        url: str,
        label: str = "remote",
        *,
        config: Config | None = None,
        plain: bool = False,
        patient: bool = True,
    ) -> None:
        self.label, self.where = label, url.rstrip("/")
        options: ClientConfig = {
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": plain,
        }
        once: RetryConfig = {"max_retries": STORE_RETRIES, "retry_timeout": timedelta(seconds=REQUEST_S)}
        often: RetryConfig = {
            "max_retries": PART_RETRIES,
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=PART_PAUSE_S),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=REQUEST_S),
        }
        make: Callable[..., ObjectStore] = from_url  # its overloads want the kind of store known beforehand
        try:
            stores: list[ObjectStore] = (
                [MemoryStore()]
                if url.startswith("memory:")
                else [
                    make(url, config=config, client_options=options, retry_config=retry)
                    for retry in ((once, often) if patient else (once,))
                ]
            )
        except (BaseError, ValueError) as error:
            raise TierDenied(
                f"{url}: {_first_line(error)}; the store's settings come from the environment (AWS_..., GOOGLE_..., "
                f"AZURE_STORAGE_ACCOUNT_NAME)"
            ) from error
        self._store, self._uploads = stores[0], stores[-1]

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        part = max(SINGLE_PUT, -(-2 * int(getattr(chunks, "size_hint", 0)) // MAX_PARTS))
        source = iter(chunks)
        head: list[bytes] = []
        size = 0
        for chunk in source:
            head.append(bytes(chunk))
            size += len(head[-1])
            if size > SINGLE_PUT:
                break
        try:
            if size <= SINGLE_PUT:
                obstore.put(self._store, name, b"".join(head))
                return size
            counter = _Counter(head, source)
            obstore.put(
                self._uploads,
                name,
                iter(counter),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=PARTS_AT_ONCE,
            )
            return counter.size
        except (BaseError, OSError) as error:
            raise self._explain(error, name, writing=True) from error

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            if start == 0 and length is None:
                return bytes(obstore.get(self._store, name).bytes())
            wanted = max(0, self.size(name) - start) if length is None else length
            if wanted == 0:
                return b""
            data = bytes(obstore.get_range(self._store, name, start=start, length=wanted))
        except (BaseError, OSError) as error:
            found = self._explain(error, name)
            if isinstance(found, TierAway) and length and start + length > self.size(name):  # how stores say it differs
                data = b""
            else:
                raise found from error
        if len(data) < wanted:
            raise TierMissing(f"{self.where}/{name}: ends before byte {start + wanted}, which was expected")
        return data

    def size(self, name: str) -> int:
        try:
            return obstore.head(self._store, name)["size"]
        except (BaseError, OSError) as error:
            raise self._explain(error, name) from error

    def names(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        try:
            found = [meta["path"] for batch in obstore.list(self._store, folder or None) for meta in batch]
        except (BaseError, OSError) as error:
            raise self._explain(error, prefix) from error
        return iter(sorted(name for name in found if name.startswith(prefix)))

    def remove(self, name: str) -> None:
        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._explain(error, name) from error

    def path(self, name: str) -> Path | None:
        return None

    def sweep(self, older_than_s: float) -> int:
        return 0

    def _explain(self, error: Exception, name: str, *, writing: bool = False) -> TierError:
        text = f"{self.where}/{name}: {_first_line(error)}"
        lower = str(error).lower()
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
            return TierDenied(f"{text}; check the credentials and the bucket's policy")
        if isinstance(error, InvalidPathError | UnknownConfigurationKeyError):
            return TierDenied(text)
        if isinstance(error, FileNotFoundError):
            return TierDenied(f"{text}; is there such a bucket?") if writing else TierMissing(text)
        if any(word in lower for word in _FULL):
            return TierFull(f"{text}; free space there, or keep fewer generations")
        if any(word in lower for word in _DENIED):
            return TierDenied(f"{text}; check the URL, the region and the credentials")
        return TierAway(f"{text}; is the store reachable, or throttling?")


class _Counter:
    """What was read ahead, then the rest, counted. Each chunk is copied: parts are sent while the next is made."""

    def __init__(self, head: list[bytes], rest: Iterator[bytes | memoryview]) -> None:
        self._head, self._rest, self.size = head, rest, 0

    def __iter__(self) -> Iterator[bytes]:
        while self._head:
            chunk = self._head.pop(0)
            self.size += len(chunk)
            yield chunk
        for piece in self._rest:
            self.size += len(piece)
            yield bytes(piece)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
