"""Encrypted entries: what they hide, what may be altered, and that no nonce repeats."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dlcore.base.access.encryption_keys import EncryptionKeys
from dlcore.base.access.master_keys import MasterKey, MasterKeys
from dlcore.base.errors import EncryptionKeyError, InvalidEntryError
from dlcore.log.entries import encryption
from dlcore.log.entries.body import (
    ENTRY_HEADER_BYTES,
    Compressor,
    batch_of,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    move_entry,
)
from dlcore.log.entries.encryption import EntryDecryptor, EntryEncryptor, encryptor_for
from tests.fixtures.encrypted import fixed_keys, master_keys, secret_of

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.log.entries.body import EntryHeader

WORD = b"a secret word "
BATCH = batch_of([5, 5, 7], [WORD * 50, b"", WORD * 20])
STAMP = b"who wrote it"


def clear_entry(compression: str = "none", stamp: bytes = STAMP) -> list[bytes | memoryview]:
    """Return the parts of an entry of `BATCH`."""
    return encode_entry(  # type: ignore[return-value]
        BATCH,
        first_txid=5,
        last_txid=7,
        records_before=40,
        write_time_ms=1_000,
        compressor=Compressor(compression),
        stamp=stamp,
    )


def encrypted_entry(keys: EncryptionKeys, log_id: str = "log-1", **parts: str) -> bytes:
    """Return one as a writer of its own encrypts it."""
    return b"".join(EntryEncryptor(keys, log_id).encrypt(clear_entry(**parts)))  # type: ignore[arg-type]


def decrypted(
    body: bytes, keys: EncryptionKeys | None, log_id: str = "log-1"
) -> tuple[EntryHeader, pa.RecordBatch]:
    """Return header and batch as a reader of the log sees them."""

    async def read() -> tuple[EntryHeader, pa.RecordBatch]:
        decryptor, header = EntryDecryptor(keys, "clicks", log_id), decode_entry_header(body)
        await decryptor.learn(body, header)
        clear, header = decryptor.decrypt(body, header)
        return header, decode_entry_batch(clear, header)

    return asyncio.run(read())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_reader_with_the_key_sees_what_was_written(compression: str) -> None:
    """And the entry does not show it; the header stays as it was, but for the flag."""
    keys, clear = fixed_keys("k"), b"".join(clear_entry(compression))
    body = encrypted_entry(keys, compression=compression)
    assert WORD in b"".join(clear_entry())
    assert WORD not in body
    header, batch = decrypted(body, keys)
    assert header == decode_entry_header(clear)
    assert batch.equals(BATCH)
    assert decode_entry_header(body).encrypted
    at = ENTRY_HEADER_BYTES + len(STAMP)
    assert body[2:at] == clear[2:at]
    assert len(body) == len(clear) + 1 + len("k") + 16 + 8 + 16


def test_the_format() -> None:
    """By hand: later releases must read what this one has stored."""
    keys = fixed_keys("2026-11")
    keys.new_salt()
    encryptor = EntryEncryptor(keys, "log-1")
    encryptor.encrypt(clear_entry())
    body = b"".join(encryptor.encrypt(clear_entry()))
    salt = (1).to_bytes(16, "big")
    head = ENTRY_HEADER_BYTES + len(STAMP)
    assert body[head:].startswith(b"\x072026-11" + salt + (1).to_bytes(8, "big"))
    info = b"dlog entry 1\0log-1"
    cipher = AESGCM(HKDF(SHA256(), 32, salt, info).derive(secret_of("2026-11")))
    covered = bytes.fromhex("00 0000 00000003") + len(STAMP).to_bytes(8, "big") + STAMP + b"log-1"
    message = cipher.decrypt((1).to_bytes(12, "big"), body[head + 8 + 16 + 8 :], covered)
    assert message == b"".join(clear_entry()[1:])


def test_commits_and_merges_need_no_key() -> None:
    """They move the entry, and may give it a transaction id: the rest is as it was written."""
    keys = fixed_keys("k")
    body = encrypted_entry(keys)
    for assigned in (None, 9):
        moved = b"".join(move_entry(body, records_before=2, floor_ms=5_000, assigned_txid=assigned))
        header, batch = decrypted(moved, keys)
        assert (header.records_before, header.write_time_ms) == (2, 5_000)
        txids = [5, 5, 7] if assigned is None else [9, 9, 9]
        assert batch.equals(batch_of(txids, BATCH.column(1).to_pylist()))


def test_each_altered_byte_is_noticed() -> None:
    """Also in extents that commits and merges change: the reader sees the same records."""
    keys = fixed_keys("k")
    body = encrypted_entry(keys)
    changeable = {*range(8, 40)}  # transaction ids, records before, write time
    for place in range(len(body)):
        for bit in (1, 2, 4, 128):
            altered = bytearray(body)
            altered[place] ^= bit
            if place in changeable and altered[24] < 128:
                assert decrypted(bytes(altered), keys)[1].equals(BATCH)
                continue
            if (place, bit) == (1, 1):  # as if a commit had assigned the transaction id
                assert decrypted(bytes(altered), keys)[1].column(1).equals(BATCH.column(1))
                continue
            with pytest.raises((InvalidEntryError, EncryptionKeyError)):
                decrypted(bytes(altered), keys)


def test_an_entry_of_another_log_is_refused() -> None:
    """Also of one of the same name, which was created again."""
    keys = fixed_keys("k")
    with pytest.raises(InvalidEntryError, match=r"log 'clicks': .* fit the key 'k': .*another log"):
        decrypted(encrypted_entry(keys), keys, "log-2")


def test_a_key_of_the_same_name_that_is_another_is_refused() -> None:
    """The error does not say which of them it is, because that cannot be known."""
    other = EncryptionKeys(MasterKeys([MasterKey("k", secret_of("other"))]))
    with pytest.raises(InvalidEntryError, match="the key of this name is not the one"):
        decrypted(encrypted_entry(fixed_keys("k")), other)


def test_without_the_key_the_error_names_log_and_key() -> None:
    """And what would be right: a key, or keys at all."""
    body = encrypted_entry(fixed_keys("k"))
    with pytest.raises(
        EncryptionKeyError, match=r"'clicks' .* key 'k'.*there are no keys: .*DLOG_"
    ):
        decrypted(body, None)
    with pytest.raises(EncryptionKeyError, match=r"'clicks': .* key 'k', and the keys are a, b"):
        decrypted(body, fixed_keys("a", "b"))
    assert decrypted(body, fixed_keys("a", "k"))[1].equals(BATCH)


def test_clear_entries_are_read_as_they_are() -> None:
    """With and without keys: those from before the log was encrypted."""
    body = b"".join(clear_entry())
    for keys in (None, fixed_keys("k")):
        assert decrypted(body, keys)[1].equals(BATCH)


def test_an_entry_that_was_cut_is_refused() -> None:
    """Wherever: no key is named, or no message follows."""
    keys = fixed_keys("k")
    body = encrypted_entry(keys)
    head = ENTRY_HEADER_BYTES + len(STAMP)
    for end in range(head, len(body)):
        with pytest.raises(InvalidEntryError):
            decrypted(body[:end], keys)
    nameless = body[:head] + b"\0" + body[head + 1 :]
    with pytest.raises(InvalidEntryError, match="no key is named"):
        decrypted(nameless, keys)


def test_no_key_meets_a_nonce_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over writers, over changes of the master key, and after very many entries."""
    monkeypatch.setattr(encryption, "ENTRIES_PER_SALT_MAX", 3)
    keys = fixed_keys("old")
    writers = [EntryEncryptor(keys, "log-1") for _ in range(3)]
    head, seen = ENTRY_HEADER_BYTES + len(STAMP), []
    for turn in range(20):
        if turn == 10:
            keys.known = master_keys("new", "old")
        for writer in writers:
            body = b"".join(writer.encrypt(clear_entry()))
            name_end = head + 1 + body[head]
            assert body[head + 1 : name_end] == (b"old" if turn < 10 else b"new")
            seen.append(body[name_end : name_end + 24])
    assert len(set(seen)) == 60
    assert len({place[:16] for place in seen}) == 3 * 8
    assert {int.from_bytes(place[16:]) for place in seen} == {0, 1, 2}


def test_a_writer_of_an_encrypted_log_needs_keys() -> None:
    """It must not go on in the clear."""
    assert encryptor_for(None, "clicks", "log-1", encrypted=False) is None
    assert encryptor_for(fixed_keys("k"), "clicks", "log-1", encrypted=False) is None
    assert encryptor_for(fixed_keys("k"), "clicks", "log-1", encrypted=True) is not None
    with pytest.raises(EncryptionKeyError, match="log 'clicks' has the setting encrypted"):
        encryptor_for(None, "clicks", "log-1", encrypted=True)
