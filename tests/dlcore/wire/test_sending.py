"""Buffers reach a transport in their order, whether `writelines` of this Python pauses or not."""

from __future__ import annotations

import asyncio

import pytest

from dlcore.wire import frames


class Written(asyncio.WriteTransport):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.data = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Note a buffer."""
        self.calls.append("write")
        self.data += data

    def writelines(self, list_of_data: object) -> None:
        """Note several."""
        assert isinstance(list_of_data, list)
        self.calls.append("writelines")
        self.data += b"".join(list_of_data)


@pytest.mark.parametrize(("pauses", "call"), [(True, "writelines"), (False, "write")])
@pytest.mark.parametrize("buffers", [[b"a"], [b"a", memoryview(b"bc"), bytes(100_000)]])
def test_all_buffers_go_in_one_call(
    monkeypatch: pytest.MonkeyPatch, pauses: bool, call: str, buffers: list[bytes | memoryview]
) -> None:
    """Goal: a Python whose `writelines` never pauses the protocol is given one buffer to write."""
    monkeypatch.setattr(frames, "_PAUSES", pauses)
    transport = Written()
    frames.send(transport, buffers)
    assert transport.calls == [call]
    assert transport.data == b"".join(buffers)
