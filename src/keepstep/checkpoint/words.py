"""Words: what people write for a checkpoint policy (``24h``, ``1%``, ``500MB/s``, ``s3://bucket/run``), judged alike.

``keepstep run --ckpt-every``, ``KEEPSTEP_CKPT_EVERY`` and ``keepstep.Checkpoint(every=...)`` come here; only the name
by which a setting is called in an error differs.
"""

from __future__ import annotations

import math
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
UNSAID = ("", "none")
"""What a duration or a limit says that is as good as left out; ``none`` outdoes an environment variable."""
MAX_COUNT = 10**12 - 1
"""Of steps and generations: the largest step that the name of a generation has room for."""
MAX_FULL_EVERY = 200
"""Differences that may rest on each other. Each makes a restore longer, and none of them may be lost."""
MAX_DURATION_S = 100 * 365 * 86400.0
LEAST_RATE, MOST_RATE = 100_000, 10**15
"""Bytes per second: no generation would ever be complete at less, and no machine has more."""
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
    for key, least, most in (
        ("every", 1, MAX_COUNT),
        ("full_every", 1, MAX_FULL_EVERY),
        ("keep", 1, MAX_COUNT),
        ("keep_every", 0, MAX_COUNT),
    ):
        value = found[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadSetting(f"{name(key)} {value} must be {least} or more", f"for example {name(key)} {least or 1000}")
        if value > most:
            raise BadSetting(f"{name(key)} {value} must be {most} or less", f"for example {name(key)} {min(most, 100)}")
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
    if not 0 < number <= MAX_OVERHEAD:
        raise BadSetting(
            f"{name} {text!r} is no share above 0%, at most {MAX_OVERHEAD:.0%}",
            f"for example {name} 1%, or leave it out",
        )
    return number


def duration(value: str | float, name: str) -> float:
    """``90s``, ``30m``, ``24h``, ``7d``, or a number of seconds that is no text; 0 where nothing was said."""
    if not isinstance(value, str):
        text, seconds = str(value), math.nan if isinstance(value, bool) else float(value)
    elif (text := value.strip()) in UNSAID:
        return 0.0
    elif found := _DURATION.fullmatch(text):
        seconds = float(found[1]) * _SECONDS[found[2]]
    else:
        seconds = 0.0 if re.fullmatch(r"0+(\.0+)?", text) else math.nan
    if seconds == 0:
        raise BadSetting(f"{name} {text!r} must be above 0", f"for example {name} 24h, or leave it out")
    if not 0 < seconds <= MAX_DURATION_S:  # nor is it NaN
        raise BadSetting(
            f"{name} {text!r} is not a duration", f"for example {name} 24h (s, m, h and d are known, 100 years at most)"
        )
    return seconds


def rate(value: str | float, name: str) -> int:
    """``500MB/s``, ``2GiB/s``, ``25Gbit/s`` or a number in bytes per second; 0, no limit, where nothing was said."""
    if isinstance(value, str) and value.strip() in UNSAID:
        return 0
    number = size(value)
    way_out = f"for example {name} 500MB/s, 2GiB/s or 25Gbit/s; leave it out, or say none, for no limit"
    said = value.strip() if isinstance(value, str) else value
    if number is None:
        raise BadSetting(f"{name} {said!r} is not a rate", way_out)
    if number == 0:
        raise BadSetting(f"{name} {said!r} would let nothing through", way_out)
    if not LEAST_RATE <= number <= MOST_RATE:
        raise BadSetting(f"{name} {said!r} is not between 100 kB/s and 1000 TB/s", way_out)
    return int(number)


def size(value: str | float) -> float | None:
    """Bytes, or bytes per second, as they were said; ``None`` for what is neither."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) or not 0 <= value < math.inf else value
    text = value.strip()
    if re.fullmatch(r"0+(\.0+)?", text):
        return 0
    found = _RATE.fullmatch(text)
    if not found:
        return None
    base = 1024 if found[3] else 1000
    power: int = base ** _POWER[found[2]]
    return float(found[1]) * power / (8 if found[4] == "bit" else 1)


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
