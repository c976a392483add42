"""The numbers of Kafka's producers, as those of dlog's producers.  No I/O.

Theory of operation.  A producer of Kafka has an id, and an epoch, which it raises when it numbers
its records anew.  It numbers the records of each log 0, 1, 2, ... up to 2**31 - 1, and then from 0
on again.  Here it is the producer of a name made of its id, each epoch is an incarnation, and its
records have numbers that never begin anew.  The claim of an incarnation says with which of them it
began: by this, and by the last accepted one, the 31 bits that a client sends stand for one number.

The claim of a later epoch is made when its first batch comes, whose number is 0.  All proxies make
the same claim, so that it needs no answer to the client.

    the log knows          the batch has                   then
    no such producer       number 0                        a new producer
                           another number                  UNKNOWN_PRODUCER_ID
    a lower epoch          number 0                        a new incarnation, behind all records
                           another number                  OUT_OF_ORDER_SEQUENCE_NUMBER
    this epoch             the number that follows, or     it is written, or was
                           one of records known already
                           another number                  OUT_OF_ORDER_SEQUENCE_NUMBER
    a higher epoch         any                             INVALID_PRODUCER_EPOCH
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

from kio.schema.errors import ErrorCode

from dlcore.log.entries.stamp import GENERATED_PREFIX, TOKEN_BYTES, Claim, Mark

if TYPE_CHECKING:
    from dlcore.proxy.kafka.records import ProducedBatch

# An id is a signed number of 64 bits, and -1 stands for none.
ID_BITS = 63
_NUMBERS = 2**31

Known: TypeAlias = "tuple[Claim, int] | None"
"""The claim of a producer that may write, and the last number that was accepted; None: no such."""


def name_of(producer: int) -> str:
    """Return the name of a producer, which is of those that are soon forgotten."""
    return f"{GENERATED_PREFIX}kafka-{producer:016x}"


def mark_of(batch: ProducedBatch, known: Known) -> Mark | ErrorCode:
    """Return the claim of a batch and the number of its first record, or why it has none."""
    if known is None:
        return ErrorCode.unknown_producer_id if batch.sequence else Mark(_claim(batch, 0), 0)
    claim, accepted = known
    # Kafka's epochs begin with 0, those of claims with 1.
    epoch = claim.epoch - 1
    if batch.epoch < epoch:
        return ErrorCode.invalid_producer_epoch
    expected = accepted + 1
    if batch.epoch > epoch:
        if batch.sequence:
            return ErrorCode.out_of_order_sequence_number
        return Mark(_claim(batch, expected), expected)
    # Take the number nearest to the expected one, among all that these 31 bits may stand for.
    ahead = (batch.sequence - (expected - claim.base)) % _NUMBERS
    first = expected + ahead - (_NUMBERS if ahead >= _NUMBERS // 2 else 0)
    if not claim.base <= first <= expected:
        return ErrorCode.out_of_order_sequence_number
    return Mark(claim, first)


def _claim(batch: ProducedBatch, base: int) -> Claim:
    identity = f"{batch.producer} {batch.epoch}".encode()
    token = hashlib.blake2b(identity, digest_size=TOKEN_BYTES).digest()
    return Claim(name=name_of(batch.producer), epoch=batch.epoch + 1, base=base, token=token)
