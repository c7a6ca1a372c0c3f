"""Every bound of a `TieredStore`, as one value; `kvstore.compose` fills it from the settings."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoreLimits"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits with their units; the defaults suit a node with a few GiB for its memory tier. Of leased bytes, leases,
    namespaces and descriptions no tenant gets all (`kvstore.runtime.budget`).

    Attributes:
        stage_bytes: Bytes that leases and running stages may pin together; a longer hit is cut to what fits. It must
            leave room in the memory tier for saves: three quarters of it at most.
        stage_records_in_flight: Records that are read from one tier at a time, over all stages.
        stage_bytes_in_flight: Bytes that are being read at a time, over all stages and tiers.
        stall_timeout_s: A stage in which no record begins or ends to arrive for this long ends with what it has. A
            lookup ends with what it has after twice as long.
        fetch_timeout_s: One read of one record gives up after this.
        lease_s: A lease lasts this long unless it is renewed.
        leases_max: Leases at a time; beyond, stages are answered with nothing staged.
        lease_records_max: Records in all leases together, each some 200 bytes of memory beside the record.
        namespaces_max: Namespaces open at a time; one more closes one that was unused for ten minutes.
        description_bytes: Bytes of the descriptions of open namespaces.
        aside_bytes: Bytes of records that readers have called bad and that tiers keep aside, over the service's life;
            further ones are removed.
        save_bytes_in_flight: Bytes of saves that are being verified at a time; beyond, saves answer `BUSY`.
        write_back_bytes: Bytes that wait for one slower tier; beyond, new records stay in memory only, counted.
        write_back_in_flight: Records that are written to one tier at a time.
        pending_bytes: Bytes of records that are pending over all services; beyond, records that are not on their way
            yet are dropped, counted: the hot tier must keep each until the cold tier has it.
        finish_bytes_in_flight: Bytes of others' write-backs that are being finished at a time.
        write_back_attempts: After this many failures a record waits until others were written; if it then fails as
            often again, it is dropped, counted. An outage, in which nothing is written, drops nothing.
        write_back_timeout_s: One write of one record gives up after this.
        backoff_s_min: Pause after the first failure of a tier; it doubles with each further one.
        backoff_s_max: The longest pause, and so the latest that writing resumes after a tier is back.
        drain_timeout_s: `aclose` gives the write-back this long.
        cold_probes: Heads per round of questions to the cold tier. Fewer cost less and take more rounds.
        manifest_look_s: How often the hot tier is checked for lost manifests, which are written again.
        absent_s: How long a record that turned out to be missing is not asked for again.
    """

    stage_bytes: int = 512 * _MIB
    stage_records_in_flight: int = 16
    stage_bytes_in_flight: int = 64 * _MIB
    stall_timeout_s: float = 0.4
    fetch_timeout_s: float = 5.0
    lease_s: float = 30.0
    leases_max: int = 4096
    lease_records_max: int = 1 << 19
    namespaces_max: int = 1024
    description_bytes: int = 64 * _MIB
    aside_bytes: int = 256 * _MIB
    save_bytes_in_flight: int = 256 * _MIB
    write_back_bytes: int = 256 * _MIB
    write_back_in_flight: int = 4
    pending_bytes: int = 8192 * _MIB
    finish_bytes_in_flight: int = 16 * _MIB
    write_back_attempts: int = 8
    write_back_timeout_s: float = 30.0
    backoff_s_min: float = 0.1
    backoff_s_max: float = 2.0
    drain_timeout_s: float = 5.0
    cold_probes: int = 16
    manifest_look_s: float = 15.0
    absent_s: float = 60.0
