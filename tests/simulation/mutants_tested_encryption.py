"""Bugs of encryption at rest that named tests catch: no run of the simulation attacks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlcore.log.entries import encryption
from dlcore.log.entries.encryption import EntryEncryptor
from dlcore.log.reading.reader import EntryDecoder
from dlcore.log.writing.writer import Pump
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES = "dlcore/log/test_encryption.py"
_LOGS = "dlcore/log/test_encrypted_logs.py"


@caught_by(f"{_ENTRIES}::test_no_key_meets_a_nonce_twice")
def numbers_of_entries_begin_again() -> Iterator[None]:
    """Two entries have the same key and nonce, and tell their difference to everybody."""
    encrypt = EntryEncryptor.encrypt

    def again(self: EntryEncryptor, body: Any) -> Any:
        self._count = 0
        return encrypt(self, body)

    with patch.object(EntryEncryptor, "encrypt", again):
        yield


@caught_by(f"{_ENTRIES}::test_an_entry_of_another_log_is_refused")
def an_entry_is_of_any_log() -> Iterator[None]:
    """Neither its key nor what its tag covers has the log's id."""
    cipher, covered = encryption._cipher, encryption._covered

    def any_cipher(master: Any, salt: bytes, _: str) -> Any:
        return cipher(master, salt, "")

    def any_covered(body: Any, header: Any, _: str) -> bytes:
        return covered(body, header, "")

    with (
        patch.object(encryption, "_cipher", any_cipher),
        patch.object(encryption, "_covered", any_covered),
    ):
        yield


@caught_by(f"{_ENTRIES}::test_each_altered_byte_is_noticed")
def the_header_is_not_covered() -> Iterator[None]:
    """Another one may say by which producers, or how many, the records are."""
    with patch.object(encryption, "_covered", lambda _, __, log_id: log_id.encode()):
        yield


@caught_by(f"{_LOGS}::test_a_reader_waits_for_the_tail_and_for_its_key")
def an_entry_is_lost_with_its_key() -> Iterator[None]:
    """The next read goes on behind it."""
    learn = EntryDecoder.learn

    async def forgetful(self: EntryDecoder, entry: Any) -> None:
        try:
            await learn(self, entry)
        finally:
            self.waiting = None

    with patch.object(EntryDecoder, "learn", forgetful):
        yield


@caught_by(f"{_LOGS}::test_a_running_writer_encrypts_from_the_change_on")
def a_writer_without_keys_goes_on() -> Iterator[None]:
    """It ignores that its log is to be encrypted from now on."""
    with patch.object(Pump, "fail", lambda *_: None):
        yield
