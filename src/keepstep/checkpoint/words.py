"""Words: what people write for a checkpoint policy (``24h``, ``1%``, ``500MB/s``, ``s3://bucket/run``), judged alike.

``keepstep run --ckpt-every``, ``KEEPSTEP_CKPT_EVERY`` and ``keepstep.Checkpoint(every=...)`` come here; only the name
by which a setting is called in an error differs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from keepstep.checkpoint.exceptions import BadSetting
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout

SCHEMES = ("file", "s3", "gs", "az")
"""Of the shared tier; a text without a scheme is a path."""
MAX_OVERHEAD = 0.5
"""Share of a step above which a budget cannot be meant."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B|bit)(?:/s)?")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

DEFAULTS: dict[str, Any] = {
    "dir": "",
    "local_dir": "",
    "every": 100,
    "full_every": 1,
    "keep": 3,
    "keep_every": 0,
    "keep_for": "",
    "sdc_window": "",
    "overhead": "",
    "rate_peer": "",
    "rate_local": "",
    "rate_remote": "",
}
"""Every setting of a policy, under the name that people give it."""


def policy(said: Mapping[str, Any], name: Callable[[str], str], *, resume: bool = True) -> CheckpointPolicy:
    """The policy that was meant.

    Args:
        said: by the names of ``DEFAULTS``; what is left out has its default.
        name: how a setting is called where it was said.

    Raises:
        BadSetting: names the setting, its value and the way out.
    """
    found = {**DEFAULTS, **said}
    for key, least in (("every", 1), ("full_every", 1), ("keep", 1), ("keep_every", 0)):
        value = found[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadSetting(f"{name(key)} {value} must be {least} or more", f"for example {name(key)} {least or 1000}")
    shared, own = place(found["dir"], name("dir")), local_place(found["local_dir"], name("local_dir"))
    if shared and shared == own:
        raise BadSetting(
            f"{name('dir')} and {name('local_dir')} are both {own}: one is shared by all nodes, the other is not",
            "leave one out",
        )
    return CheckpointPolicy(
        overhead=share(found["overhead"], name("overhead")),
        dir=shared,
        local_dir=own,
        every=found["every"],
        full_every=found["full_every"],
        keep=found["keep"],
        keep_every=found["keep_every"],
        keep_s=duration(found["keep_for"], name("keep_for")),
        sdc_window_s=duration(found["sdc_window"], name("sdc_window")),
        peer_rate=rate(found["rate_peer"], name("rate_peer")),
        local_rate=rate(found["rate_local"], name("rate_local")),
        remote_rate=rate(found["rate_remote"], name("rate_remote")),
        resume=resume,
    )


def share(value: str | float, name: str) -> float:
    """``1%`` or ``0.01``; 0 where nothing was said."""
    text = str(value).strip()
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-\d+)?)\s*(%?)", text)
    number = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= number <= MAX_OVERHEAD:
        raise BadSetting(f"{name} {text!r} is no share between 0% and {MAX_OVERHEAD:.0%}", f"for example {name} 1%")
    return number


def duration(value: str | float, name: str) -> float:
    """``90s``, ``30m``, ``24h``, ``7d``, or a number of seconds that is no text; 0 where nothing was said."""
    if not isinstance(value, str):
        text = f"{value:g}s"
    else:
        text = value.strip()
    if text in ("", "0"):
        return 0.0
    found = _DURATION.fullmatch(text)
    if not found:
        raise BadSetting(f"{name} {text!r} is not a duration", f"for example {name} 24h (s, m, h and d are known)")
    return float(found[1]) * _SECONDS[found[2]]


def rate(value: str | float, name: str) -> int:
    """``500MB/s``, ``2GiB/s``, ``25Gbit/s`` or a number in bytes per second; 0, no limit, where nothing was said."""
    text = value.strip() if isinstance(value, str) else f"{value:.0f}B"
    if text in ("", "0", "0B"):
        return 0
    found = _RATE.fullmatch(text)
    number = 0
    if found:
        base = 1024 if found[3] else 1000
        number = int(float(found[1]) * base ** _POWER[found[2]] / (8 if found[4] == "bit" else 1))
    if number <= 0:
        raise BadSetting(
            f"{name} {text!r} is not a rate",
            f"for example {name} 500MB/s, 2GiB/s or 25Gbit/s; leave it out for no limit",
        )
    return number


def place(text: str | os.PathLike[str], name: str) -> str:
    """A path, made absolute, or a URL of a known scheme."""
    text = os.fspath(text)
    if not text:
        return ""
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise BadSetting(f"{name} {text!r}: there is no {parts.scheme}:// here", f"a path, or one of {known}")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or len(parts.path) < 2:
            raise BadSetting(f"{name} {text!r} names no directory of this machine", "for example file:///data/ckpt")
        return os.path.abspath(unquote(parts.path))
    if not parts.netloc:
        raise BadSetting(f"{name} {text!r} names no bucket", f"for example {parts.scheme}://bucket/prefix")
    return text.rstrip("/")


def local_place(text: str | os.PathLike[str], name: str) -> str:
    """A path of this node, made absolute."""
    found = place(text, name)
    if "://" in found:
        raise BadSetting(
            f"{name} {str(text)!r} is not on this node's disk", "give a URL as the shared tier, or a path here"
        )
    return found


def layout(text: str, name: str) -> Layout | None:
    """``tp=8,pp=8,dp=32``; what is left out is 1, but for ``dp``: 0, the rest of the world (see ``fit``)."""
    if not text:
        return None
    sizes = {"dp": 0}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", item)
        if not found or found[1] not in ("tp", "pp", "dp") or int(found[2]) < 1:
            raise BadSetting(
                f"{name} {text!r}: {item.strip()!r} is none of tp=N, pp=N, dp=N", f"for example {name} tp=8,pp=8,dp=32"
            )
        sizes[found[1]] = int(found[2])
    return Layout(**sizes)


def fit(wanted: Layout | None, world: int, name: str) -> Layout:
    """The layout for a world of that size.

    Raises:
        BadSetting: the world cannot be arranged so.
    """
    if wanted is None:
        return Layout()
    inner = wanted.tp * wanted.pp
    dp = wanted.dp or world // inner
    if inner * dp != world:
        sizes = (("tp", wanted.tp), ("pp", wanted.pp), ("dp", wanted.dp))
        product = " x ".join(f"{which} {size}" for which, size in sizes if size)
        raise BadSetting(
            f"{name}: {product} does not make the {world} ranks of this job",
            "tp x pp x dp must be nodes x ranks per node; dp may be left out",
        )
    return Layout(tp=wanted.tp, pp=wanted.pp, dp=dp)
