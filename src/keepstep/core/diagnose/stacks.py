"""Python tracebacks, also those of many processes woven into each other."""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.diagnose.prefix import Line

STREAMS = 4_096
"""Processes whose stacks are put together at the same time."""
FRAMES = 400
"""Kept of one stack."""

_FRAME = re.compile(r'\s*File "([^"\n]{1,500})", line (\d{1,9})(?:, in (\S+))?')
_BOXED = re.compile(r"\s*\u2502 ([^\u2502\s]+\.py):(\d{1,9}) in (\S+)")
"""A frame in a stack that rich has drawn a box around."""
_BOX_HEAD = re.compile(r"\s*\u256d\u2500+ Traceback \(most recent call last\)")
_SHORT = re.compile(r"([\w./-]{1,200}\.py)(?::|, line | line |\", line )(\d{1,9})\b")
_WOVEN = re.compile(r"(\S.{0,79}?)(?:Original )?Traceback \(most recent call last\)")
_LOG_PLACE = re.compile(r"[IWEFD]\d{4} [\d:.]+.{0,40}?[\w./-]+\.\w+:\d+\]|^\S{0,40}\s?(?:INFO|DEBUG)\b")
"""The place of a logging call, which says nothing about a fault."""
_READER = re.compile(
    r"data_?loader|dataset|/data/|data_?pipe|data_?utils|collat|sampler|reader|webdataset|tokeniz|preprocess|augment|transforms|"
    r"torch/utils/data|_utils/(?:fetch|worker|collate)|streaming/|tfrecord|parquet|decod|loader\.py",
    re.IGNORECASE,
)
_READS = re.compile(
    r"__getitem__|__getitems__|__next__|_worker_loop|\w*collate|"
    r"_?(?:load|read|parse|decode|tokeni[sz]e|fetch)_?(?:sample|item|record|row|batch|image|audio|video|shard|file|line|text|example|doc|json)\w*"
)
WAYS_WOVEN = 64
"""Prefixes nobody knows, before stacks of different processes."""
_HEAD = re.compile(r"\s*(?:Original )?Traceback \(most recent call last\)|\s*Thread 0x\w+|\s*Current thread 0x")
_END = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:(?![A-Z]+\b)[A-Z]\w*(?<!Warning)|error|timeout|gaierror)(?::(?: |$)|$)|[A-Za-z_][\w.]*(?:Error|Exception)\b"
)
"""An exception's name, which ends a stack; a warning that stands between does not."""
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|/python3\.\d+/|<frozen|<string>|<stdin>|^(?:\.\.\./)?torch/|/torch/(?:nn|utils|distributed|_|optim|"
    r"autograd|serialization|storage|multiprocessing|cuda)|multiprocessing/|concurrent/futures|importlib|runpy\.py|threading\.py|queue\.py|"
    r"socket\.py|ssl\.py|selectors\.py|contextlib\.py|subprocess\.py|pickle\.py|zipfile|tarfile\.py|gzip\.py|json/|codecs\.py|"
    r"torch_worker|distributed_c10d|dataloader\.py$|serialization\.py$|deepspeed/|megatron/core|lightning/|transformers/|accelerate/|nemo/|jax/|flax/|ray/|datasets/(?:iter|arrow|builder|load|table)|fsspec/|botocore/|"
    r"/opt/conda/lib|/usr/lib|/usr/local/lib|train_torch_elastic"
)


class Frame(Struct, frozen=True):
    file: str
    line: int
    function: str


def own(frames: list[Frame]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in reversed(frames) if not _LIBRARY.search(frame.file)), None)


def reads_data(frames: list[Frame] | None) -> bool:
    """Whether the stack goes through code that reads samples, by the names of its files and functions."""
    return any(_READER.search(one.file) or _READS.match(one.function) for one in (frames or [])[-8:])


def mentioned(text: str) -> Frame | None:
    """A place in user code that the text names by itself, as in ``train.py:212`` or ``File "x.py", line 8``."""
    if _LOG_PLACE.match(text):
        return None
    if found := _FRAME.match(text):
        frame = Frame(found[1], int(found[2]), found[3] or "")
        return None if _LIBRARY.search(frame.file) else frame
    for name, line in _SHORT.findall(text) if ".py" in text else ():
        if not _LIBRARY.search(name):
            return Frame(name, int(line), "")
    return None


class Stacks:
    """Open stacks by stream."""

    def __init__(self) -> None:
        self._open: dict[str, list[Frame]] = {}
        self.chained: set[str] = set()
        self._woven: dict[int, set[str]] = {}

    def stripped(self, line: Line) -> Line:
        """The line without a label that is only known from standing before the beginning of a stack."""
        text = line.message
        if "\u256d" not in text and (found := _WOVEN.match(text)) and sum(map(len, self._woven.values())) < WAYS_WOVEN:
            self._woven.setdefault(len(found[1]), set()).add(found[1])
        for length, labels in self._woven.items():
            if text[:length] in labels:
                return replace(line, message=text[length:], stream=f"{line.stream}|{text[:length]}")
        return line

    def take(self, stream: str, message: str) -> list[Frame] | None:
        """Feed a line; the finished stack when this line is the exception that ends one."""
        if _HEAD.match(message) or _BOX_HEAD.match(message):
            if len(self._open) < STREAMS:
                self._open[stream] = []
            return None
        frames = self._open.get(stream)
        found = _FRAME.match(message) or _BOXED.match(message)
        if found:
            if frames is None:
                if len(self._open) >= STREAMS:
                    return None
                frames = self._open[stream] = []
            frames.append(Frame(found[1], int(found[2]), found[3] or ""))
            del frames[:-FRAMES]
            return None
        if not frames or not _END.match(message):
            return None
        del self._open[stream]
        return frames
