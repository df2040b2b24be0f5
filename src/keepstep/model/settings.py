"""Limits of the mind: every budget, patience and deadline has a name, a unit and a default."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Policy(Struct, frozen=True, kw_only=True):
    """What the controller may do, how often, and how long it waits.

    Attributes:
        lease_s: silence after which a node counts as lost.
        reconnect_s: after a broken connection, how long an agent may take to come back before broken collectives on
            other nodes are taken as proof that its node is gone.
        leave_s: after a node has left by will (a signal to its launcher), how long the others may take to do so as
            well. The end of a whole job is no fault; only after that is the node that left alone replaced.
        explain_s: how long a broken collective may stay unexplained before the epoch is rebuilt without a suspect.
        locate_s: how long stall reports are collected before the suspect is named.
        stacks_s: how long the vote of a stall that names nobody waits for the stacks of the processes.
        stall_patience_s: how long a stall may stay unexplained because some rank is not stalled by its own limits
            (a long evaluation, say) before the epoch is rebuilt without a suspect.
        rebuild_s: from a Join order to every rank resumed, and at least from the last bytes of any rank's state that
            have arrived; after that the missing ranks are suspects themselves.
        first_start_s: the same for a first start or a whole-job restart (cold imports, data set-up).
        verify_s: from resumed to the first new step of every rank.
        settle_s: without the SDK, how long restarted processes must live before their incident closes.
        in_process_budget: in-process recoveries without one new step between them, before the next rung.
        network_retries: the same for faults of the network (a lost peer, a timed-out collective), which often pass.
        network_pause_s: before the second attempt after such a fault; doubled for each further one.
        storage_retries: the same for a file system or object store that is away.
        storage_pause_s: before the second attempt after such a fault; doubled for each further one.
        pause_max_s: the longest pause between two attempts.
        memory_retries: attempts after memory did not suffice; it seldom does the second time.
        replace_node_budget: node replacements per incident.
        capacity_s: how long a job waits for a node when there is no standby, before it asks to be requeued.
        node_faults_to_suspect: process faults of one node within ``node_fault_window_s`` after which its next fault is
            treated as the node's.
        mode: what may be done to nodes that are alive: ``observe`` (said, not done), ``assist`` (done when a person
            approves), ``auto`` (done within the limits below). What is dead is replaced in every mode.
        evictions_per_hour: breaker: more living nodes than this are not taken out of one job by automation in an hour.
        evictions_per_domain: nor more than this of one fault domain (rack) at the same time; above it the domain is
            the suspect.
        protected: nodes that automation never takes out.
        approve_s: how long a proposal waits for a person.
        pace_window_s: length of one window of step times; 0 measures none.
        pace_windows: windows in a row in which a rank must be slow before it is called so.
        slow_share: how much longer than the median a rank's own time must be, as a share of the step.
        swap_gain: share of the job's time that a planned swap must win back before it is proposed.
        boundary_s: how long a planned swap waits for ranks to reach the end of their step.
        sdc_window_s: a second corruption from one node within this time confirms that it is the node's.
        soak_s: how long a node that is suspected of silent corruption examines itself while training goes on; 0 orders
            no test.
        soak_patience_s: how much longer its report may take, before the investigation ends without one.
        soak_share: of its processors that this may take.
        examine_s: how long a node that went on suspicion examines itself before it may be used again; 0 leaves it out
            until a person takes it back.
    """

    lease_s: float = 10.0
    reconnect_s: float = 0.5
    leave_s: float = 1.0
    explain_s: float = 2.0
    locate_s: float = 0.3
    stacks_s: float = 3.0
    stall_patience_s: float = 3600.0
    rebuild_s: float = 60.0
    first_start_s: float = 600.0
    verify_s: float = 600.0
    settle_s: float = 10.0
    in_process_budget: int = 3
    network_retries: int = 6
    network_pause_s: float = 1.0
    storage_retries: int = 8
    storage_pause_s: float = 5.0
    pause_max_s: float = 60.0
    memory_retries: int = 1
    replace_node_budget: int = 2
    capacity_s: float = 300.0
    node_faults_to_suspect: int = 3
    node_fault_window_s: float = 600.0
    mode: Literal["observe", "assist", "auto"] = "auto"
    evictions_per_hour: int = 4
    evictions_per_domain: int = 2
    protected: tuple[str, ...] = ()
    approve_s: float = 86_400.0
    pace_window_s: float = 30.0
    pace_windows: int = 5
    slow_share: float = 0.07
    swap_gain: float = 0.05
    boundary_s: float = 30.0
    sdc_window_s: float = 604_800.0
    soak_s: float = 120.0
    soak_patience_s: float = 900.0
    soak_share: float = 0.1
    examine_s: float = 60.0


class CheckpointPolicy(Struct, frozen=True, kw_only=True):
    """What the checkpoint engine may cost and keep; the same on every node of a job.

    Attributes:
        overhead: share of a step's time that snapshots into memory may take, 0.01 for one percent. 0 leaves the
            interval at the job's ``snapshot_every``.
        dir: durable tier that all nodes reach: a path of a shared file system or a URL (``s3://bucket/prefix``,
            ``gs://``, ``az://``, ``file://``). Empty for none.
        local_dir: durable tier on each node's own disk. Empty for none.
        every: steps between durable generations.
        full_every: every how many durable generations one is written in full; those between hold only what changed.
            1 writes all of them in full.
        keep: newest complete generations that are kept, at least one.
        keep_every: beyond those, generations whose step is a multiple of this are kept; 0 for none.
        keep_s: generations younger than this are kept.
        sdc_window_s: one generation older than this is always kept: silent data corruption is found late, and a
            generation from before it must still be there.
        peer_rate: bytes per second for copies into peers' memory; 0 is unlimited.
        local_rate: the same for the local disk.
        remote_rate: the same for the shared tier.
        resume: whether a new start goes on from the newest complete durable generation.
    """

    overhead: float = 0.0
    dir: str = ""
    local_dir: str = ""
    every: int = 100
    full_every: int = 1
    keep: int = 3
    keep_every: int = 0
    keep_s: float = 0.0
    sdc_window_s: float = 0.0
    peer_rate: int = 0
    local_rate: int = 0
    remote_rate: int = 0
    resume: bool = True
