"""The messages of tests/contracts/wire_vectors.json are written and read as it says.

`python -m tests.dlcore.wire.test_vectors` writes the file anew after a change of the protocol.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlcore.wire.messages import (
    ANYTHING,
    Add,
    Authorize,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Held,
    Hello,
    Kind,
    Lac,
    Message,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    Welcome,
    WriteLac,
    decode,
    encode,
)
from dlcore.wire.receiving import Assembly, ReceiveMemory

FILE = Path(__file__).parents[2] / "contracts" / "wire_vectors.json"
ENTRIES = [bytes(range(48)), b"\xff" * 50]
MESSAGES: list[Message] = [
    Hello(1, 0, "cluster-1", "bookie-1", "0123456789abcdef" * 2, b"token"),
    Hello(1, 5, "", "bücher", "", b""),
    Welcome(1, 0, "bookie-1", "0123456789abcdef" * 2),
    Add(1, False, ENTRIES),
    Add(2**63 - 3, True, ENTRIES[:1]),
    WriteLac(3, 7, -1),
    ReadLac(4, 2**63 - 1, fence=False),
    ReadLac(5, 7, fence=True),
    ReadEntry(6, 7, 8, fence=False),
    ReadEntry(7, 7, 8, fence=True),
    ReadEntries(8, 7, 0, 2**63 - 1, 3, 2**20, 2**21),
    Follow(9, 7, 12, 2**20),
    Credit(9, 2**20),
    Cancel(9),
    Ping(1),
    Pong(1),
    Durable([1, 2, 2**63 - 3]),
    Failed(0, 8, "this is bookie-2"),
    Failed(6, 3, "entry 7:8 is not held here"),
    Failed(6, 255, ""),
    Lac(4, -1),
    Chunk(8, ENTRIES, is_last=False),
    Chunk(8, [], is_last=True),
    Update(9, ENTRIES, 13, fenced=False),
    Update(9, [], 13, fenced=True),
    ReadHeld(10, 7),
    Held(10, -1, 2**63 - 1, []),
    Held(10, 4, 90, [(5, 5), (7, 12)]),
    Authorize(bytes(range(116))),
]


def fields_of(message: Message) -> dict[str, object]:
    """Return a message's values as JSON has them."""
    values: dict[str, object] = {}
    for name, value in message._asdict().items():
        if name == "frames":
            values[name] = [bytes(each).hex() for each in value]
        else:
            values[name] = value.hex() if isinstance(value, bytes) else value
    return values


def read_all(data: bytes) -> list[Message]:
    """Return the messages in `data`."""
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    assembly.get_buffer()[: len(data)] = data
    assembly.received(len(data))
    messages: list[Message] = []
    while (frame := assembly.next_frame()) is not None:
        messages.append(decode(*frame))
    return messages


def vectors() -> list[dict[str, object]]:
    """Return what the file should have."""
    return [
        {
            "kind": type(message).__name__,
            "values": json.loads(json.dumps(fields_of(message))),
            "bytes": b"".join(encode(message)).hex(),
        }
        for message in MESSAGES
    ]


def test_every_kind_has_a_vector() -> None:
    """A message without a vector is not specified."""
    names = {type(message).__name__.lower() for message in MESSAGES}
    assert names == {kind.name.lower().replace("_", "") for kind in Kind}


def test_messages_are_written_as_the_vectors_say() -> None:
    """Bytes are the contract: they do not change by accident."""
    assert vectors() == json.loads(FILE.read_text())


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages_are_read_as_the_vectors_say(number: int) -> None:
    """Each vector's bytes are its message again."""
    vector = json.loads(FILE.read_text())[number]
    (message,) = read_all(bytes.fromhex(vector["bytes"]))
    assert type(message).__name__ == vector["kind"]
    assert json.loads(json.dumps(fields_of(message))) == vector["values"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n")
