"""Every bound of a `TieredStore`, as one value; `kvstore.compose` fills it from the settings."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits with their units. The defaults suit a node with a few GiB for its memory tier. Tenants share leased bytes,
    leases, namespaces and descriptions, so that no tenant gets all of one (`kvstore.runtime.budget`).

    Attributes:
        stage_bytes: Bytes that leases and running stages may pin together; a longer hit is cut to what fits. At most
            three quarters of the memory tier, so that saves still fit.
        stage_records_in_flight: Records that are read from one tier at a time, over all stages.
        stage_bytes_in_flight: Bytes that are being read at a time, over all stages and tiers.
        stall_timeout_s: A stage ends with what it has when no record begins or ends to arrive for this long. A lookup
            ends with what it has after twice this time.
        fetch_timeout_s: Timeout of one read of one record.
        lease_s: A lease lasts this long unless it is renewed.
        leases_max: Leases at a time; at the limit, stages return nothing.
        lease_records_max: Records in all leases together; each takes about 200 bytes of memory beside the record.
        namespaces_max: Namespaces open at a time; one more closes one that was unused for ten minutes.
        description_bytes: Bytes of the descriptions of open namespaces.
        quarantine_bytes: Bytes of records that readers reported bad and that tiers keep, over the service's life;
            beyond this, bad records are deleted.
        save_bytes_in_flight: Bytes of saves that are being verified at a time; beyond, saves answer `BUSY`.
        write_back_bytes: Bytes in the queue to one slower tier; beyond, new records wait in the memory tier.
        write_back_in_flight: Records that are written to one tier at a time.
        pending_bytes: Bytes of pending records over all services. The hot tier must keep each until the cold tier has
            it, so beyond this limit saved records wait for their turn, and copies are dropped, counted.
        finish_bytes_in_flight: Bytes of other services' write-backs that are being finished at a time.
        write_back_attempts: A record that has failed so often, each time after others were written, is dropped,
            counted. So is the last one left, if others were written since it failed first. An outage drops no others.
        write_back_timeout_s: Timeout of one write of one record.
        backoff_s_min: Pause after the first failure of a tier; it doubles with each further failure.
        backoff_s_max: The longest pause, and so the latest that writing resumes after a tier is back.
        drain_timeout_s: `aclose` gives the write-back this long.
        cold_probes: Heads per round of queries to the cold tier. Fewer cost less and take more rounds.
        manifest_check_s: How often the hot tier is checked for lost manifests, which are written again.
        absent_s: How long lookups leave out a record that turned out to be missing.
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
    quarantine_bytes: int = 256 * _MIB
    save_bytes_in_flight: int = 256 * _MIB
    write_back_bytes: int = 96 * _MIB
    write_back_in_flight: int = 4
    pending_bytes: int = 8192 * _MIB
    finish_bytes_in_flight: int = 16 * _MIB
    write_back_attempts: int = 16
    write_back_timeout_s: float = 30.0
    backoff_s_min: float = 0.1
    backoff_s_max: float = 2.0
    drain_timeout_s: float = 5.0
    cold_probes: int = 16
    manifest_check_s: float = 15.0
    absent_s: float = 60.0
