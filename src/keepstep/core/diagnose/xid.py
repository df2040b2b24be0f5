"""Rules for Xid and SXid codes, made from their catalogue."""

from __future__ import annotations

import functools
import re
from typing import Any

from keepstep.core.diagnose.rule import Rule
from keepstep.core.diagnose.xid_table import SXIDS, XIDS

XID_LINE = re.compile(
    r"(?<!no )\bXid\b ?(?:\(PCI:(?P<gpu>[\da-fA-F:.]+)[^)]*\))?:? ?(?:error )?(?P<code>\d{1,3})\b(?P<rest>.*)",
    re.IGNORECASE,
)
SXID_LINE = re.compile(
    r"SXid\b ?(?:\(PCI:(?P<gpu>[\da-fA-F:.]+)[^)]*\))?:? ?(?P<code>\d{5})\b(?P<rest>.*)"
    r"|NVSwitch (?P<rest2>(?:non-)?fatal) error (?P<code2>\d{5})",
    re.IGNORECASE,
)
NAMES = {
    13: "graphics_exception",
    31: "illegal_memory_access",
    43: "gpu_stopped_by_software",
    45: "gpu_cleanup",
    48: "ecc_uncorrectable",
    62: "gpu_microcontroller_halt",
    63: "row_remap_event",
    64: "row_remap_failure",
    74: "nvlink_fatal",
    79: "gpu_fell_off_bus",
    92: "ecc_corrected",
    94: "ecc_contained",
    95: "ecc_uncontained",
    119: "gsp_timeout",
    120: "gsp_error",
    136: "nvlink_fatal",
    140: "ecc_unrecovered",
    143: "gpu_init_failed",
    154: "gpu_recovery_action",
    167: "pcie_fault",
    171: "ecc_uncorrectable",
    172: "ecc_uncorrectable",
    173: "gpu_cpu_link_fatal",
}
MEANINGS = {
    13: "the graphics engine met an exception, mostly an error of the application",
    31: "a GPU kernel touched memory that is not mapped, mostly an error of the application",
    43: "the GPU stopped one program after that program's error; the GPU is healthy",
    45: "clean-up after another error",
    48: "uncorrectable error in GPU memory",
    63: "the GPU replaced a bad memory row",
    64: "the GPU could not replace a bad memory row",
    74: "an NVLink failed",
    79: "the GPU no longer answers on the PCIe bus",
    94: "uncorrectable memory error, contained: only one process is affected",
    95: "uncorrectable memory error, not contained: the GPU needs a reset",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    154: "the driver says what the GPU needs to recover",
}
_HARDWARE = frozenset(
    {"RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR"}
)
_HARDWARE_UNLISTED = frozenset({167, 169, 171, 172, 173, 175})
_AMBIGUOUS = frozenset({109, 155})
"""Context switch time-outs and NVLink errors defined by software: a job can cause them too."""


@functools.cache
def xid_rule(code: int, severe: bool) -> Rule:
    """What a line with this code means; ``severe`` when its text says that it is fatal or names an action."""
    name, first, _ = XIDS.get(code, (f"code {code}, not in the catalogue", "", ""))
    says = MEANINGS.get(code, name.lower().replace("_", " "))
    told = f"Xid {code} ({says})"
    make = functools.partial(
        _make, NAMES.get(code, f"xid_{code}"), told, f"NVIDIA Xid catalogue: {first or 'no action listed'}"
    )
    if code == 94:
        return make("initiating", "infrastructure", "restart_in_place", True, 0.88, "ecc_contained")
    if code == 63:
        return make("symptom", "infrastructure", "restart_in_place", True, 0.5, "")
    if code == 154:
        return (
            make("symptom", "infrastructure", "replace_node", False, 0.7, "")
            if severe
            else make("benign", "none", "no_action", False, 0.1, "")
        )
    if code in _AMBIGUOUS:
        return make("symptom", "user_code", "stop_and_notify_user", None, 0.5, "app_fault")
    if first in _HARDWARE or code in _HARDWARE_UNLISTED or (first == "WORKFLOW_NVLINK5_ERR" and severe):
        return make(
            "initiating",
            "infrastructure",
            "replace_node",
            False,
            0.95 if code == 79 else 0.9,
            "ecc" if code == 48 else "",
        )
    if first == "RESTART_APP" or code == 43:
        weight = {13: 0.62, 31: 0.62, 43: 0.36}.get(code, 0.5)
        return make("symptom", "user_code", "stop_and_notify_user", False, weight, "app_fault")
    if first == "CONTACT_SUPPORT" or code not in XIDS:
        return make("symptom", "infrastructure", "isolate_and_verify", None, 0.55, "")
    return make("benign", "none", "no_action", False, 0.1, "")


@functools.cache
def sxid_rule(code: int, severe: bool) -> Rule:
    name, _, always = SXIDS.get(code, (f"code {code}, not in the catalogue", False, False))
    told = f"SXid {code} of an NVSwitch ({name})"
    if severe or always:
        return _make(
            "nvswitch_fatal",
            told,
            "NVIDIA fabric manager guide",
            "initiating",
            "infrastructure",
            "replace_node",
            False,
            0.86,
            "",
        )
    return _make("nvswitch_notice", told, "NVIDIA fabric manager guide", "benign", "none", "no_action", False, 0.1, "")


def coded_rule(text: str) -> tuple[Rule, str] | None:
    """The rule of the Xid or SXid in this line, and the PCI address."""
    if found := SXID_LINE.search(text):
        rest = (found["rest"] or found["rest2"] or "").lower()
        if not found["rest"] or "link" in rest or "fatal" in rest or "severity" not in rest:
            severe = bool(re.search(r"(?<!non-)(?<!non)\bfatal\b", rest))
            return sxid_rule(int(found["code"] or found["code2"]), severe), found["gpu"] or ""
        return None
    if found := XID_LINE.search(text):
        rest = found["rest"]
        severe = bool(re.search(r"\bFatal\b|to 0x[1-9a-f]+ \((?!None)", rest))
        return xid_rule(int(found["code"]), severe), found["gpu"] or ""
    return None


def _make(
    id: str,
    says: str,
    source: str,
    role: Any,
    category: Any,
    action: Any,
    transient: bool | None,
    weight: float,
    family: str,
) -> Rule:
    return Rule(
        id=id,
        role=role,
        category=category,
        pattern="",
        words=("xid",),
        says=says,
        action=action,
        transient=transient,
        weight=weight,
        family=family,
        source=source,
    )
