"""Reading the log into findings: which rules matched, where, when, and what else was said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.clocks import Clocks
from keepstep.core.diagnose.prefix import Line, clean, read
from keepstep.core.diagnose.rule import Rule, compiled
from keepstep.core.diagnose.rules import GENERIC, SCANNED, candidates
from keepstep.core.diagnose.scan import Raw, Scanner, shape
from keepstep.core.diagnose.stacks import Frame, Stacks, mentioned, own, reads_data
from keepstep.core.diagnose.structured import Opened, opened
from keepstep.core.diagnose.xid import coded_rule

FINDINGS_PER_RULE = 400
"""Kept in full; further ones are counted."""
TAGS_KEPT = 50
TEXT_KEPT = 400
"""Characters of an evidence line."""
RECORD_KEPT = 4_000
"""Characters of a line that are looked at."""
BORED_AFTER = 200
"""Lines of one shape without any finding, after which the shape is passed over."""
TIMEOUTS_KEPT = 200_000
_HARD_BENIGN = frozenset(
    {"ecc_corrected", "host_memory_ce", "loss_scale_step", "row_remap_clean", "kernel_noise", "pcie_bandwidth_note"}
)
"""Harmless kinds that unsay whatever else a line seems to say."""
_SOFT = frozenset({"symptom", "cascade", "teardown"})
_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch)s?\b\W{0,6}\d+.{0,200}(?:loss|time|tok)|'loss': [\d.]+|\d+/\d+ \[[\d:]+<"
    r"|step \d+ completed|epoch \d+ done",
    re.IGNORECASE,
)
_QUOTED = re.compile(
    r"(?:sample|prompt|completion|response|generat\w+|answer|question|document|instruction|caption|transcript|decoded|output text)s?(?: \d+)? ?[:=>]+ ?([\"'`\u201c].{12,})",
    re.IGNORECASE,
)
"""What a model read or wrote: words in it are no events."""
_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf)\b(?! iterations)", re.IGNORECASE)
_CHANGED = re.compile(r"->|since|raised|changed|config|too high", re.IGNORECASE)
_WORK = re.compile(
    r"SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<in>\d+))?(?:, NumelOut=(?P<out>\d+))?", re.IGNORECASE
)
_LISTING = re.compile(
    r"\branks \d|\b(?:all|every|each) .{0,30}(?:but|except|other than).{0,20}\d|\b\d+ (?:of|/) \d+ ranks", re.IGNORECASE
)
_GROUPS = {
    "count2": "count",
    "count3": "count",
    "count4": "count",
    "node2": "node",
    "node3": "node",
    "node4": "node",
    "link2": "link",
    "link3": "link",
    "thing2": "thing",
    "thing3": "thing",
    "file2": "file",
    "file3": "file",
    "line2": "line",
    "line3": "line",
    "node5": "node",
    "rank2": "rank",
    "rank3": "rank",
    "rank4": "rank",
    "rank5": "rank",
    "rank6": "rank",
}


class Source(Struct, frozen=True, kw_only=True):
    """One file among several: what its name says about lines that say nothing themselves."""

    name: str = ""
    node: str = ""
    rank: int | None = None


class Finding(Struct, kw_only=True):
    """One line that one rule matched.

    Attributes:
        number: place in the whole log, over all its files.
        fields: what the rule's groups caught.
        frame: innermost place in the user's code, when a stack belongs to the line.
        chained: whether it came up while another exception was being handled.
        reading: whether its stack goes through code that reads data.
        source: the file.
        line_number: in that file.
    """

    rule: Rule
    number: int
    text: str
    node: str = ""
    rank: int | None = None
    gpu: str = ""
    time: float | None = None
    fields: dict[str, str] = {}
    frame: Frame | None = None
    chained: bool = False
    reading: bool = False
    source: str = ""
    line_number: int = 0


_NO_SOURCE = Source()


class Work(Struct, frozen=True):
    """A collective that timed out."""

    seq: int
    op: str
    size: str


class Log:
    """Everything that was understood of a log."""

    def __init__(self) -> None:
        self.findings: dict[str, list[Finding]] = {}
        self.counts: Counter[str] = Counter()
        self.tags: dict[str, list[Finding]] = {}
        self.places = where.Places()
        self.clocks = Clocks()
        self.works: dict[int, Work] = {}
        self.first_stop: int | None = None
        self.frames: list[tuple[int, Frame]] = []
        self.tail: list[Line] = []
        self.data_files: list[tuple[int, str]] = []
        self.progress: list[int] = []
        self.lists: list[Line] = []
        self.told: Counter[int] = Counter()
        self.told_nodes: Counter[str] = Counter()
        self.gpus: dict[str, Counter[str]] = {}
        self.last_trouble = 0
        self.source = Source()
        self.offset = 0
        self.lines = 0
        self.bytes = 0
        self._stacks = Stacks()
        self._chained: set[str] = set()
        self._ignored: set[str] = set()

    @property
    def went_on(self) -> bool:
        """Whether training made progress after the last line of trouble."""
        return len(self.progress) > 1 and self.progress[-2] > self.last_trouble

    def has(self, tag: str) -> bool:
        return tag in self.tags

    def role(self, id: str) -> str:
        """What findings of this rule are: initiating, symptom, cascade..."""
        return self.findings[id][0].rule.role

    def take(self, line: Line, rules: tuple[Rule, ...]) -> bool:
        """Learn from one line; whether it mattered."""
        line = self._stacks.stripped(line)
        self.places.learn(line)
        self.clocks.learn(line)
        self.tail.append(line)
        del self.tail[:-20]
        frames = self._stacks.take(line.stream, line.message)
        frame = own(frames) if frames else mentioned(line.text)
        if frame is not None and len(self.frames) < TAGS_KEPT:
            self.frames.append((line.number, frame))
        if len(self.data_files) < TAGS_KEPT and (named := where.data_file(line.text)):
            self.data_files.append((line.number, named))
        matched = _matched(line, rules)
        if "Exception ignored in" in line.message:
            self._ignored.add(line.stream)
        elif line.stream in self._ignored and (frames or any(rule.id == GENERIC for rule, _ in matched)):
            self._ignored.discard(line.stream)  # Python itself passed over it, mostly while it ended.
            return False
        if frames and not any(rule.role in ("initiating", "symptom", "cascade", "teardown") for rule, _ in matched):
            matched.append((_GENERIC_RULE, {"thing": line.message.split(":")[0][:80]}))
        if "exception" in line.message and ("above exception" in line.message):
            self._chained.add(line.stream)
        if _PROGRESS.search(line.text) and not _NOT_A_NUMBER.search(line.text):
            self.progress = [*self.progress[-3:], line.number]
            matched = [(rule, fields) for rule, fields in matched if rule.role not in ("symptom", "cascade")]
            if not _CHANGED.search(line.text):
                matched = [(rule, fields) for rule, fields in matched if rule.id != "bad_hyperparameters"]
        self._learn(line, matched)
        for rule, fields in matched:
            self._note(line, rule, fields, frame, bool(frames) and line.stream in self._chained, reads_data(frames))
        if found := _WORK.search(line.text):
            self._work(line, found)
        return bool(frames) or any(rule.role not in ("benign", "context") for rule, _ in matched)

    def _learn(self, line: Line, matched: list[tuple[Rule, dict[str, str]]]) -> None:
        """Which ranks and GPUs are spoken of one by one, apart from what everybody says."""
        text = line.text
        if len(self.lists) < TAGS_KEPT and _LISTING.search(text):
            self.lists.append(line)
        if any(rule.role in ("cascade", "teardown", "benign") for rule, _ in matched) or (
            self.progress and self.progress[-1] == line.number
        ):
            return
        named = where.ranks(text)
        if line.rank is not None and line.rank not in named:
            named.append(line.rank)
        if len(set(named)) == 1 and not _LISTING.search(text) and len(self.told) < TIMEOUTS_KEPT:
            self.told[named[0]] += 1
        for node in [line.node] if line.node else where.called(text) or where.hosts(text):
            if len(self.told_nodes) < TAGS_KEPT * 20 and not where.is_service(node):
                self.told_nodes[node] += 1
        if line.node and "NCCL INFO" not in text and (one := where.gpu(text)) and len(self.gpus) < TAGS_KEPT * 20:
            self.gpus.setdefault(line.node, Counter())[one] += 1

    def _note(
        self, line: Line, rule: Rule, fields: dict[str, str], frame: Frame | None, chained: bool, reading: bool
    ) -> None:
        finding = _finding(line, rule, fields, frame)
        finding.chained, finding.reading = chained, reading
        finding.source, finding.line_number = self.source.name, line.number - self.offset
        if rule.role == "context":
            kept = self.tags.setdefault(rule.id, [])
            if len(kept) < TAGS_KEPT:
                kept.append(finding)
            return
        self.counts[rule.id] += 1
        if rule.role != "benign":
            self.last_trouble = line.number
        if rule.role == "teardown" and self.first_stop is None:
            self.first_stop = line.number
        kept = self.findings.setdefault(rule.id, [])
        if len(kept) < FINDINGS_PER_RULE:
            kept.append(finding)

    def _work(self, line: Line, found: re.Match[str]) -> None:
        mentioned = where.ranks(line.text)
        rank = line.rank if line.rank is not None else (mentioned[0] if mentioned else None)
        if rank is not None and rank not in self.works and len(self.works) < TIMEOUTS_KEPT:
            self.works[rank] = Work(int(found["seq"]), found["op"].upper(), f"{found['in']}/{found['out']}")


_GENERIC_RULE = next(rule for rule in candidates(b"exception error failure") if rule.id == GENERIC)


def _matched(line: Line, rules: tuple[Rule, ...]) -> list[tuple[Rule, dict[str, str]]]:
    """Rules that match, without those that a better one on the same line makes void."""
    text = line.text
    found: list[tuple[Rule, dict[str, str]]] = []
    if "xid" in text.lower() and not _QUOTED.search(text) and (coded := coded_rule(text)):
        found.append((coded[0], {"gpu": coded[1]} if coded[1] else {}))
        rules = tuple(rule for rule in rules if rule.role == "context")
    quoted = _QUOTED.search(text)
    for rule in rules:
        match = compiled(rule).search(line.message if rule.id == GENERIC else text)
        if match and not (quoted and quoted.start(1) <= match.start() and rule.category not in ("data", "none")):
            fields = {_GROUPS.get(k, k): v for k, v in match.groupdict().items() if v}
            found.append((rule, fields))
    roles = {rule.role for rule, _ in found}
    if "benign" in roles:
        hard = any(rule.id in _HARD_BENIGN for rule, _ in found)
        found = [
            (r, f)
            for r, f in found
            if r.role in ("benign", "context")
            or r.family == "storm"
            or not (hard or r.role in _SOFT or r.id == GENERIC)
        ]
    specific = [r for r, _ in found if r.role in ("initiating", "symptom", "cascade", "teardown") and r.id != GENERIC]
    if specific:
        found = [(r, f) for r, f in found if r.id != GENERIC]
    if any(r.role == "initiating" for r in specific):
        found = [(r, f) for r, f in found if r.role not in ("cascade", "teardown")]
    elif any(r.role == "symptom" for r in specific):
        found = [(r, f) for r, f in found if r.role != "cascade" or r.family == "timeout"]
    return found


def _finding(line: Line, rule: Rule, fields: dict[str, str], frame: Frame | None) -> Finding:
    named = where.called(line.text) or where.hosts(line.text)
    told = fields.get("node", "")
    node = (told if any(map(str.isdigit, told)) else "") or line.node or told or (named[0] if named else "")
    mentioned = where.ranks(line.text)
    rank = line.rank if line.rank is not None else (mentioned[0] if mentioned else None)
    if fields.get("rank", "").isdigit():
        rank = int(fields["rank"])
    text = (
        line.text
        if len(line.text) <= TEXT_KEPT
        else f"{line.text[: TEXT_KEPT // 2]} ... {line.text[-TEXT_KEPT // 2 :]}"
    )
    return Finding(
        rule=rule,
        number=line.number,
        text=text.strip(),
        node=node,
        rank=rank,
        gpu=fields.get("gpu") or where.gpu(line.text) or line.gpu,
        time=line.time,
        fields=fields,
        frame=frame,
    )


def _placed(line: Line, source: Source) -> Line:
    """The line, with what its file's name says where it says nothing itself."""
    if (source.node and not line.node) or (source.rank is not None and line.rank is None):
        own_rank = line.rank if line.rank is not None else source.rank
        return replace(line, node=line.node or source.node, rank=own_rank, stream=line.stream or source.name)
    return line


def _inside(number: int, inside: Opened, source: Source) -> Iterator[Line]:
    """The lines of a wrapped message, with the labels that stood around it."""
    when = read(number, inside.when + " ") if inside.when else None
    for text in inside.lines:
        line = _placed(read(number, text[:RECORD_KEPT]), source)
        yield replace(
            line,
            node=inside.node or line.node,
            rank=inside.rank if inside.rank is not None else line.rank,
            stream=line.stream or f"{inside.node}|{inside.rank}",
            time=line.time if line.time is not None or when is None else when.time,
            dated=line.dated or (when is not None and when.dated),
        )


def observe(pieces: Iterable[bytes], source: Source = _NO_SOURCE, log: Log | None = None) -> Log:
    """Read one file to its end, into ``log`` when there are several."""
    log = log or Log()
    log.source, log.offset = source, log.lines
    scanner = Scanner(SCANNED)
    known: dict[bytes, tuple[Rule, ...]] = {}
    bored: Counter[bytes] = Counter()

    def rules_of(kind: bytes) -> tuple[Rule, ...]:
        rules = known.get(kind)
        if rules is None:
            rules = candidates(kind)
            if len(known) < 20_000:
                known[kind] = rules
        return rules

    def take(raw: Raw) -> None:
        segments = raw.data.split(b"\r") if b"\r" in raw.data else [raw.data]
        kind = shape(raw.data)
        mattered = False
        for segment in segments[-8:]:
            text = clean(segment)
            if not text.strip():
                continue
            if inside := opened(text):
                for line in _inside(log.offset + raw.number, inside, source):
                    mattered = log.take(line, rules_of(shape(line.text.encode()))) or mattered
                continue
            if len(text) > RECORD_KEPT:
                text = text[: RECORD_KEPT * 3 // 4] + " ... " + text[-RECORD_KEPT // 4 :]
            line = _placed(read(log.offset + raw.number, text), source)
            mattered = log.take(line, rules_of(kind if len(segments) == 1 else shape(segment))) or mattered
        if not mattered:
            bored[kind] += 1
            if bored[kind] >= BORED_AFTER:
                scanner.pass_over(kind)

    for piece in pieces:
        for raw in scanner.feed(piece):
            take(raw)
    for raw in scanner.finish():
        take(raw)
    log.lines, log.bytes = log.lines + scanner.lines, log.bytes + scanner.bytes
    return log
