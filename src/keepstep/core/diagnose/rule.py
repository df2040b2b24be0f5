"""The form of a rule: one kind of line, what it means, and what to do when it is the cause."""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from keepstep.core.diagnose.result import Action, Category

Role = Literal["initiating", "symptom", "cascade", "teardown", "benign", "context"]
"""What a line can be. A *symptom* may be the cause when nothing better is found; a *cascade* says that somebody else
failed; *teardown* is what stopping looks like; *benign* lines are never the cause; *context* only colours others."""


class Rule(Struct, frozen=True, kw_only=True):
    """One kind of line.

    Attributes:
        id: the root cause that it names, snake_case.
        pattern: searched in the line, letter case ignored; named groups fill the culprit's fields of these names.
        words: one of them is in every line that the pattern matches; no digits, small letters.
        says: sentence for people; ``{thing}`` and other group names are filled in.
        weight: how strongly such a line speaks for being the cause, 0 to 1.
        family: which refinement of ``refine`` looks at it in the light of the other lines.
        source: where the wording was seen.
        samples: lines that the rule has to match.
    """

    id: str
    role: Role
    category: Category
    pattern: str
    words: tuple[str, ...]
    says: str
    action: Action = "investigate"
    transient: bool | None = None
    weight: float = 0.5
    advice: str = ""
    family: str = ""
    source: str = ""
    samples: tuple[str, ...] = ()


_COMPILED: dict[str, re.Pattern[str]] = {}


def compiled(rule: Rule) -> re.Pattern[str]:
    found = _COMPILED.get(rule.pattern)
    if found is None:
        found = _COMPILED[rule.pattern] = re.compile(rule.pattern, re.IGNORECASE)
    return found


def infra(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    """A fault of a machine: another machine is the way out."""
    return _rule(id, "infrastructure", "replace_node", False, pattern, words, says, more)


def user(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    """A fault of the job's own code or settings."""
    return _rule(id, "user_code", "stop_and_notify_user", False, pattern, words, says, more)


def data(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    """A fault of what is read."""
    return _rule(id, "data", "rollback_checkpoint_and_skip_data", False, pattern, words, says, more)


def passing(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    """A fault that goes away by itself."""
    return _rule(id, "transient", "retry_with_backoff", True, pattern, words, says, more)


def follows(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    """A line that others' failures write."""
    return _rule(id, "unknown", "investigate", None, pattern, words, says, {"role": "cascade", "weight": 0.15, **more})


def harmless(id: str, pattern: str, words: str, says: str, **more: Any) -> Rule:
    return _rule(id, "none", "no_action", False, pattern, words, says, {"role": "benign", "weight": 0.1, **more})


def _rule(
    id: str,
    category: Category,
    action: Action,
    transient: bool | None,
    pattern: str,
    words: str,
    says: str,
    more: dict[str, Any],
) -> Rule:
    samples = more.pop("samples", ())
    defaults: dict[str, Any] = {
        "role": "initiating",
        "action": action,
        "transient": transient,
        "category": category,
        "weight": 0.7,
    }
    return Rule(
        id=id,
        pattern=pattern,
        words=tuple(word.strip() for word in words.split("|")),
        says=says,
        samples=(samples,) if isinstance(samples, str) else tuple(samples),
        **{**defaults, **more},
    )
