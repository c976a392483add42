"""The stamp of an entry: which producers its records come from, if producers numbered them.

A stamp is between an entry's header and its batch; readers skip it.  It is positional msgpack,
filled up with zeros to a multiple of eight bytes:

* `snapshot`, the entry of the segment that has the newest snapshot of the producers, perhaps this
  one.  By the last entry of a segment it is known where to start reading.
* `rows`, if this entry has a snapshot: all producers, as they were before this entry.
* `claims`: incarnations of producers that are new since the snapshot.
* `runs`: the producers of the entry's records, in the order of the records.

Producers have names, and short numbers within a segment.  Each of their records has a sequence, one
higher than the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from dlcore.base.errors import InvalidEntryError

_ALIGNMENT = 8
PRODUCER_NAME_BYTES_MAX = 100
GENERATED_PREFIX = "_"
"""Names of producers that begin with this were made for one writer, and are soon forgotten."""
TOKEN_BYTES = 8
# Kafka keeps transactional ids for as long (transactional.id.expiration.ms).
PRODUCERS_KEPT_MS = 7 * 24 * 3600 * 1000
"""A log forgets producers that wrote nothing for this long."""
KEPT_MS = 3600 * 1000
"""A producer that was silent for less is not forgotten for others: it may still send again."""
GENERATED_KEPT_MS = 600 * 1000
"""The same for producers whose names were made for one writer."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
LastSequence: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""The sequence of a producer's record; -1 is before the first one."""
Token: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One incarnation of a producer, which may write from sequence `base` on.

    A higher epoch fences the lower ones.  The token is random: two incarnations that got the same
    epoch, from owners that did not know of each other, differ in it.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=PRODUCER_NAME_BYTES_MAX)]
    epoch: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    base: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    token: Token


@dataclass(frozen=True, slots=True)
class Mark:
    """Records of an incarnation; the first one has the sequence `first`."""

    claim: Claim
    first: int

    def after(self, count: int) -> Mark:
        """Return the mark of the records behind the first `count`."""
        return Mark(self.claim, self.first + count)


class ProducerRow(msgspec.Struct, frozen=True, array_like=True):
    """A producer in a snapshot; `last` is its last record, at `dlsn`, written at `used_ms`."""

    number: Count
    name: str
    epoch: Count
    base: Count
    token: Token
    last: LastSequence
    dlsn: tuple[Count, Count, Count]
    used_ms: Count


class StampedClaim(msgspec.Struct, frozen=True, array_like=True):
    """A producer, or an incarnation of one, that the log knows from this entry on."""

    number: Count
    name: str
    epoch: Count
    base: Count
    token: Token


class StampedRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` records from sequence `first` on; the last of them is at `last_slot`."""

    number: Count
    first: Count
    count: Annotated[int, msgspec.Meta(ge=1)]
    last_slot: Count


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """An entry's information about producers; with `rows` None it has no snapshot."""

    snapshot: Count
    rows: tuple[ProducerRow, ...] | None = None
    claims: tuple[StampedClaim, ...] = ()
    runs: tuple[StampedRun, ...] = ()

    def encode(self) -> bytes:
        """Return the stamp as bytes, a multiple of eight."""
        data = msgspec.msgpack.encode(self)
        size = 2 + len(data)
        # The length of the padding comes first, since msgpack refuses trailing bytes.
        padding = -size % _ALIGNMENT
        return padding.to_bytes(2, "big") + data + bytes(padding)


_decoder = msgspec.msgpack.Decoder(Stamp)


def decode_stamp(data: memoryview) -> Stamp:
    """Parse the stamp of an entry.

    Raises:
        InvalidEntryError: the bytes are no stamp.
    """
    padding = int.from_bytes(data[:2], "big")
    try:
        return _decoder.decode(data[2 : len(data) - padding])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidEntryError(f"an entry's stamp does not parse: {error}") from error
