"""Limits of the mind: every budget, patience and deadline has a name, a unit and a default."""

from __future__ import annotations

from msgspec import Struct


class Policy(Struct, frozen=True, kw_only=True):
    """What the controller may do, how often, and how long it waits.

    Attributes:
        lease_s: silence after which a node counts as lost.
        reconnect_s: after a broken connection, how long an agent may take to come back before broken collectives on
            other nodes are taken as proof that its node is gone.
        explain_s: how long a broken collective may stay unexplained before the epoch is rebuilt without a suspect.
        locate_s: how long stall reports are collected before the suspect is named.
        stall_patience_s: how long a stall may stay unexplained because some rank is not stalled by its own limits
            (a long evaluation, say) before the epoch is rebuilt without a suspect.
        rebuild_s: from a Join order to every rank resumed; after that the missing ranks are suspects themselves.
        first_start_s: the same for a first start or a whole-job restart (cold imports, data set-up).
        verify_s: from resumed to the first new step of every rank.
        settle_s: without the SDK, how long restarted processes must live before their incident closes.
        in_process_budget: in-process recoveries without one new step between them, before the next rung.
        replace_node_budget: node replacements per incident.
        capacity_s: how long a job waits for a node when there is no standby, before it asks to be requeued.
        node_faults_to_suspect: process faults of one node within ``node_fault_window_s`` after which its next fault is
            treated as the node's.
    """

    lease_s: float = 10.0
    reconnect_s: float = 0.5
    explain_s: float = 2.0
    locate_s: float = 0.3
    stall_patience_s: float = 3600.0
    rebuild_s: float = 60.0
    first_start_s: float = 600.0
    verify_s: float = 600.0
    settle_s: float = 10.0
    in_process_budget: int = 3
    replace_node_budget: int = 2
    capacity_s: float = 300.0
    node_faults_to_suspect: int = 3
    node_fault_window_s: float = 600.0
