"""From findings to one answer: weigh the candidates, name the culprit, say why the loud ones are not it."""

from __future__ import annotations

import re
from collections import Counter

from msgspec.structs import replace

from keepstep.core.diagnose.absent import absent, home
from keepstep.core.diagnose.cause import Cause
from keepstep.core.diagnose.culprit import culprit_of
from keepstep.core.diagnose.leaning import leaning
from keepstep.core.diagnose.observe import Finding, Log
from keepstep.core.diagnose.order import ENOUGH, earliest_first, put_first, recent
from keepstep.core.diagnose.refine import refine
from keepstep.core.diagnose.result import Alternative, Category, Culprit, Diagnosis, Evidence, Rejected

SHORT = 200
"""Lines; the words of a longer log are about everything."""
_ABOUT = {
    "infrastructure": "machines",
    "user_code": "the program and its settings",
    "data": "data",
    "transient": "something that passes",
}
SURE = 0.85
"""Weight of a fault on one machine alone, from which on the user's errors are its consequences."""
EVIDENCE_LINES = 8
OTHERS_NAMED = 4
SHARPNESS = 9.0
"""How fast probability falls with weight; 0.1 of weight is a factor of 2.5."""
_PROGRESS = re.compile(r"\b(?:step|iter(?:ation)?|epoch|loss|it/s|s/it)\b", re.IGNORECASE)


def decide(log: Log) -> Diagnosis:
    causes = _causes(log)
    real = [cause for cause in causes if cause.weight >= ENOUGH]
    cascade = {id: count for id, count in sorted(log.counts.items()) if log.role(id) in ("cascade", "teardown")}
    finished = log.has("finished")
    serious = any((cause.weight >= 0.8 and cause.nodes) or cause.category == "transient" for cause in real)
    if finished and not serious and not cascade.get("collective_timeout"):
        return _nothing(log, cascade, "the job finished", 0.85)
    if real:
        return _named(real, log, cascade)
    return _unnamed(log, cascade, finished)


def _causes(log: Log) -> list[Cause]:
    made = []
    for id, findings in log.findings.items():
        best = max(findings, key=lambda one: one.rule.weight)
        rule = best.rule
        if rule.role in ("cascade", "teardown") or (rule.role == "benign"):
            continue
        for part in _parts(id, earliest_first(findings, log)):
            made.append(
                refine(
                    Cause(
                        id=id,
                        category=rule.category,
                        action=rule.action,
                        transient=rule.transient,
                        says=rule.says,
                        weight=max(one.rule.weight for one in part),
                        findings=tuple(part),
                    ),
                    log,
                )
            )
    mismatch = _mismatch(log)
    if mismatch is not None and "collective_mismatch" not in log.findings:
        made.append(mismatch)
    made = put_first(recent(made), log)
    return sorted(made, key=lambda cause: (-cause.weight, cause.findings[0].number, cause.id))


def _parts(id: str, findings: list[Finding]) -> list[list[Finding]]:
    """Exceptions of different kinds are different candidates; everything else is one."""
    if id != "python_exception":
        return [findings]
    kinds: dict[str, list[Finding]] = {}
    for one in findings:
        kinds.setdefault(one.fields.get("thing", ""), []).append(one)
    return list(kinds.values())


def _mismatch(log: Log) -> Cause | None:
    """Ranks that waited in different collectives at the same number."""
    by_seq: dict[int, Counter[tuple[str, str]]] = {}
    for work in log.works.values():
        by_seq.setdefault(work.seq, Counter())[work.op, work.size] += 1
    for seq, kinds in by_seq.items():
        ops = {op for op, _ in kinds}
        different = len(ops) > 1 or (
            len(kinds) > 1 and ops <= {"ALLREDUCE", "BROADCAST", "REDUCE"} and "None/None" not in {s for _, s in kinds}
        )
        if different:
            timeouts = log.findings.get("collective_timeout", [])
            odd = min(kinds, key=lambda kind: kinds[kind])
            rank = next((r for r, w in log.works.items() if (w.op, w.size) == odd and w.seq == seq), None)
            chosen = [one for one in timeouts if one.rank == rank] or timeouts
            if chosen:
                return Cause(
                    id="collective_mismatch",
                    category="user_code",
                    action="stop_and_notify_user",
                    transient=False,
                    says=f"at collective {seq} the ranks call different operations or sizes",
                    weight=0.86,
                    findings=tuple(chosen),
                )
    return None


def _named(causes: list[Cause], log: Log, cascade: dict[str, int]) -> Diagnosis:
    best, others = causes[0], _distinct(causes)
    culprit = culprit_of(best, log)
    total = sum(2.718281828 ** (SHARPNESS * (cause.weight - best.weight)) for cause in others)
    share = 1.0 / total
    if best.action == "replace_node" and _doubtful(best, causes):
        best = replace(best, action="isolate_and_verify" if best.category == "infrastructure" else "investigate")
    id = best.id
    if (
        id in ("node_power_loss", "host_crash", "node_failed", "node_rebooted")
        and log.counts["store_lost"]
        and _hosts_store(best)
    ):
        id = "store_host_lost"
    sentence = f"{best.says}{_where(culprit)}" + (f"; {best.why}" if best.why else "")
    return Diagnosis(
        category=best.category,
        root_cause=f"{id}: {sentence}",
        summary=_summary(best.category, sentence),
        transient=best.transient,
        action=best.action,
        advice=advice(best.action, best.id, culprit),
        culprit=culprit,
        confidence=round(min(0.99, max(0.05, min(best.weight, 0.97) * (0.55 + 0.45 * share))), 2),
        evidence=_evidence(best, causes, log),
        cascade=cascade,
        alternatives=tuple(
            Alternative(
                root_cause=cause.id,
                probability=round(share * 2.718281828 ** (SHARPNESS * (cause.weight - best.weight)), 3),
            )
            for cause in others[1 : OTHERS_NAMED + 1]
        ),
        rejected=_rejected(best, others, log),
    )


def _doubtful(best: Cause, causes: list[Cause]) -> bool:
    """Whether the user's code or data is nearly as likely: then no machine is thrown out."""
    if best.weight >= SURE and any(word in best.why for word in ("only one machine", "peers are well")):
        return False
    rivals = [cause.weight for cause in causes if cause.category in ("user_code", "data") and cause.id != best.id]
    strong = max((w for w in rivals if w >= 0.7), default=0.0)
    return strong > best.weight - 0.04


def _hosts_store(cause: Cause) -> bool:
    return any(re.search(r"rdzv|endpoint|rank 0\b|store|master", one.text, re.IGNORECASE) for one in cause.findings)


def _distinct(causes: list[Cause]) -> list[Cause]:
    seen: dict[str, Cause] = {}
    for cause in causes:
        seen.setdefault(cause.id, cause)
    return list(seen.values())


def _where(culprit: Culprit) -> str:
    parts = []
    if culprit.node:
        parts.append(f"on {culprit.node}")
    if culprit.gpu:
        parts.append(f"GPU {culprit.gpu}")
    if culprit.rank is not None:
        parts.append(f"(rank {culprit.rank})")
    if culprit.link:
        parts.append(f"link {culprit.link}")
    if culprit.file and culprit.file not in " ".join(parts):
        parts.append(f"in {culprit.file}" + (f":{culprit.line}" if culprit.line else ""))
    if culprit.thing:
        parts.append(f"[{culprit.thing}]")
    if culprit.peer:
        parts.append(f"towards {culprit.peer}")
    return (" " + " ".join(parts)) if parts else ""


_WHOSE: dict[Category, str] = {
    "infrastructure": "A machine is at fault",
    "user_code": "The job's own code or settings are at fault",
    "data": "The data is at fault",
    "transient": "A passing fault",
    "none": "Nothing is wrong",
    "unknown": "The cause is not certain",
}


def _summary(category: Category, sentence: str) -> str:
    return f"{_WHOSE[category]}: {sentence}."


def advice(action: str, id: str, culprit: Culprit) -> str:
    """What to do, as a sentence."""
    node = culprit.node or "the node"
    return {
        "replace_node": f"Take {node} out, put a standby in, test {node} before it comes back.",
        "restart_in_place": "Restart on the same machines; look closer if it comes again.",
        "retry_with_backoff": "Try again after a pause that grows; nobody is evicted.",
        "isolate_and_verify": f"Keep {node} out of the job while it is tested; decide then.",
        "stop_and_notify_user": "Stop and tell the job's owner; no machine is evicted, no blind retry.",
        "rollback_code": "Go back to the code that ran before, or stop and tell the job's owner.",
        "rollback_checkpoint_and_skip_data": "Go back to the checkpoint before it, skip the data, tell their owner.",
        "use_previous_checkpoint": "Mark this checkpoint as invalid and resume from the one before it.",
        "free_storage_then_resume": "Free storage or raise the limit, then resume; no machine is evicted.",
        "no_action": "Nothing has to be done.",
        "investigate": "Look at the stacks and the logs of the machines; evict nobody for this.",
    }[action]


def evidence_of(finding: Finding) -> Evidence:
    return Evidence(
        line_number=finding.line_number,
        rank=finding.rank,
        node=finding.node,
        time=finding.time,
        text=finding.text,
        source=finding.source,
    )


def _evidence(best: Cause, causes: list[Cause], log: Log) -> tuple[Evidence, ...]:
    chosen: dict[int, Finding] = {one.number: one for one in best.findings[:3]}
    for cause in causes:
        if cause is not best and (cause.category == best.category or cause.nodes & best.nodes):
            chosen.setdefault(cause.findings[0].number, cause.findings[0])
    for found in log.tags.values():
        chosen.setdefault(found[0].number, found[0])
    leading = list(dict.fromkeys([one.number for one in best.findings[:3]]))
    rest = sorted(number for number in chosen if number not in leading)
    return tuple(evidence_of(chosen[number]) for number in (leading + rest)[:EVIDENCE_LINES])


def _rejected(best: Cause, others: list[Cause], log: Log) -> tuple[Rejected, ...]:
    given = [
        Rejected(
            root_cause=cause.id,
            why=cause.why
            if cause.weight < 0.65 and cause.why
            else f"explained by {best.id}, which is more specific or came first",
        )
        for cause in others[1:]
        if cause.weight < best.weight - 0.1
    ]
    for id in sorted(log.counts):
        if log.role(id) == "cascade":
            given.append(
                Rejected(root_cause=id, why=f"{log.findings[id][0].rule.says}; such lines follow a fault elsewhere")
            )
    return tuple(given[:OTHERS_NAMED])


def _nothing(log: Log, cascade: dict[str, int], why: str, confidence: float) -> Diagnosis:
    noise = [found[0] for id, found in log.findings.items() if log.role(id) in ("benign", "symptom", "initiating")]
    noise += [found[0] for tag, found in log.tags.items() if tag == "finished"]
    return Diagnosis(
        category="none",
        root_cause=f"benign_noise: {why}; what the log complains about did no harm",
        summary=f"Nothing is wrong: {why}.",
        transient=False,
        action="no_action",
        advice=advice("no_action", "", Culprit()),
        confidence=confidence,
        evidence=tuple(evidence_of(one) for one in sorted(noise, key=lambda one: one.number)[:EVIDENCE_LINES]),
        cascade=cascade,
    )


def _unnamed(log: Log, cascade: dict[str, int], finished: bool) -> Diagnosis:
    """No candidate: only noise, only consequences, or nothing that any rule knows."""
    purposeful = log.findings.get("user_cancelled")
    failed = any(log.role(id) == "cascade" for id in log.counts)
    if not failed and not purposeful:
        benign = any(log.role(id) == "benign" for id in log.counts)
        progress = any(_PROGRESS.search(line.text) for line in log.tail)
        if finished or benign or progress:
            return _nothing(log, cascade, "no line tells of a failure", 0.8 if finished else 0.6)
    if failed and (log.went_on or log.has("recovered")):
        lines = [found[0] for id, found in log.findings.items() if log.role(id) == "cascade"]
        return Diagnosis(
            category="transient",
            root_cause="start_up_delay: an attempt failed, the next one came up on its own",
            summary="A passing fault: an attempt failed, the next one came up on its own.",
            transient=True,
            action="restart_in_place",
            advice=advice("restart_in_place", "", Culprit()),
            confidence=0.55,
            evidence=tuple(evidence_of(one) for one in lines[:EVIDENCE_LINES]),
            cascade=cascade,
        )
    missing = absent(log)
    guess = leaning(line.text for line in log.tail) if log.lines <= SHORT else "unknown"
    consequences = [found[0] for id, found in log.findings.items() if log.role(id) == "cascade"]
    peers = Counter(one.fields["peer"] for one in log.findings.get("peer_lost", ()) if one.fields.get("peer"))
    peer = peers.most_common(1)[0][0] if peers else ""
    rank = missing[0] if len(missing) == 1 else None
    what = "unknown: no line of this log names a cause"
    node = home(missing, log) if missing else ""
    if guess != "unknown":
        what = f"unknown: no line of this log names a cause; its words are about {_ABOUT[guess]}"
    if missing:
        what = f"rank_never_arrived: rank {', '.join(map(str, missing))} is missing among those that waited"
    elif peer:
        what = f"peer_died: {peer} went away first; its own log holds the cause"
    elif consequences:
        what = "only_consequences: the lines are consequences of a fault that this log does not show"
    return Diagnosis(
        category="infrastructure" if missing else guess,
        root_cause=what,
        summary=f"The cause is not certain: {what.partition(': ')[2]}.",
        transient=None,
        action="isolate_and_verify" if len(missing) > 1 and node else "investigate",
        advice=advice("investigate", "", Culprit()),
        culprit=Culprit(rank=rank, node=node, peer=peer),
        confidence=0.4 if missing else 0.2 if consequences else 0.05,
        evidence=tuple(evidence_of(one) for one in consequences[:EVIDENCE_LINES])
        or tuple(
            Evidence(
                line_number=line.number - log.offset,
                rank=line.rank,
                node=line.node,
                time=line.time,
                text=line.text[:200],
            )
            for line in log.tail[-3:]
        ),
        cascade=cascade,
    )
