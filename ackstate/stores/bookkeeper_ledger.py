"""Values that describe a ledger of BookKeeper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DIGEST_TYPES = ("CRC32C", "CRC32", "MAC", "DUMMY")
"""The checksums that an entry may have."""


@dataclass(frozen=True, slots=True)
class Replication:
    """How the entries of a new ledger are replicated, and protected; the defaults are Pulsar's.

    Attributes:
        ensemble_size: The number of bookies that store a ledger.
        write_quorum: The number of bookies that store each entry.
        ack_quorum: The number of bookies that must have synced an entry before it is durable.
        digest_type: The checksum of each entry: ``CRC32C``, ``CRC32``, ``MAC`` or ``DUMMY``.
        password: Needed to open the ledger.
    """

    ensemble_size: int = 2
    write_quorum: int = 2
    ack_quorum: int = 2
    digest_type: str = "CRC32C"
    password: bytes = b""

    def __post_init__(self) -> None:
        """Check the values."""
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise ValueError(
                "replication must be 1 <= ack_quorum <= write_quorum <= ensemble_size, got"
                f" {self.ack_quorum}, {self.write_quorum} and {self.ensemble_size}"
            )
        if self.digest_type not in DIGEST_TYPES:
            raise ValueError(f"digest_type must be one of {', '.join(DIGEST_TYPES)}, got {self.digest_type!r}")


class OpenLedger(NamedTuple):
    """A handle of a ledger in the child.

    Attributes:
        handle: Its number, for the methods of the client.
        ledger_id: The ledger.
        last_confirmed: The last entry that was confirmed when it was opened, -1 if there is none.
        length_bytes: The size of the entries up to it.
    """

    handle: int
    ledger_id: int
    last_confirmed: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """The metadata of a ledger.

    Attributes:
        ledger_id: The ledger.
        state: ``OPEN``, ``IN_RECOVERY`` or ``CLOSED``.
        ensemble_size: The number of bookies that store it.
        write_quorum: The number of bookies that store each entry.
        ack_quorum: The number of bookies that sync each entry.
        last_entry_id: The last entry of a closed ledger, -1 if it is empty; None for an open one.
        length_bytes: The size of a closed ledger's entries; None for an open one.
        ensembles: The bookies that store the entries from an entry id on.
        custom_metadata: Values of the application, by name.
    """

    ledger_id: int
    state: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    last_entry_id: int | None
    length_bytes: int | None
    ensembles: Mapping[int, Sequence[str]]
    custom_metadata: Mapping[str, bytes]
