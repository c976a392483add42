"""Feeds the parsers of the wire with bytes that a coverage-guided fuzzer makes up.

`make fuzz SECONDS=n`.  Whatever comes, an end says that the protocol was broken, or waits for more;
it neither crashes nor takes more memory than the largest message needs.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["dlcore.wire"]):
    from dlcore.base.errors import BookieError
    from dlcore.base.ids import BookieId
    from dlcore.wire.bookie_end import BookieEnd
    from dlcore.wire.messages import HEADER, Hello, encode
    from dlcore.wire.receiving import SCRATCH_BYTES, ReceiveMemory
    from dlcore.wire.session import ClientEnd

import crc32c

from tests.dlcore.wire.held import HELD_BYTES_MAX, held_bytes

BOOKIE = BookieId("bookie-1", "1" * 32)
HELLO = Hello(1, 0, "cluster", BOOKIE.name, BOOKIE.incarnation)
_MEMORY = ReceiveMemory()
_MAGIC = b"\xd1\x0b"
_CRC_BYTES = 4


def feed(data: bytes) -> None:
    """Give both ends the same bytes, before and behind the handshake."""
    provider = atheris.FuzzedDataProvider(data)
    is_open = provider.ConsumeBool()
    is_sound = provider.ConsumeBool()
    piece = provider.ConsumeIntInRange(1, 4096)
    rest = provider.ConsumeBytes(len(data))
    if is_sound:
        rest = with_checksum(rest)
    bookie = BookieEnd(BOOKIE, "cluster", _MEMORY)
    client: ClientEnd[int, int] = ClientEnd(HELLO, _MEMORY)
    if is_open:
        take(bookie, b"".join(encode(HELLO)), SCRATCH_BYTES)
        take(client, b"".join(bookie.greeting.welcome()), SCRATCH_BYTES)
    for end in (bookie, client):
        try:
            take(end, rest, piece)
        except BookieError:
            continue


def with_checksum(data: bytes) -> bytes:
    """Return data that begins with a sound head: else nothing behind it is reached."""
    if len(data) < HEADER.size:
        return data
    head = _MAGIC + data[len(_MAGIC) : HEADER.size - _CRC_BYTES]
    fields_bytes = HEADER.unpack_from(data)[3]
    fields = data[HEADER.size : HEADER.size + fields_bytes]
    crc = crc32c.crc32c(fields, crc32c.crc32c(head))
    return head + crc.to_bytes(_CRC_BYTES, "big") + data[HEADER.size :]


def take(end: BookieEnd | ClientEnd[int, int], data: bytes, piece: int) -> None:
    """Give an end data in pieces."""
    while data:
        target = end.get_buffer()
        size = min(piece, len(target), len(data))
        target[:size] = data[:size]
        data = data[size:]
        end.received(size)
        while end.next_event() is not None:
            pass
        assert held_bytes(end) <= HELD_BYTES_MAX


if __name__ == "__main__":
    atheris.Setup(sys.argv, feed)
    atheris.Fuzz()
