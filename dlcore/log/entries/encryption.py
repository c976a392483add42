"""Encryption at rest: an entry's message is encrypted, its header and stamp stay clear.

After header and stamp, big-endian: length of the master key's name u8 | the name | salt 16 bytes |
number u64 | the message, encrypted by AES-256-GCM, and its tag.

The key of the cipher is derived (HKDF, SHA-256) from the master key, the log's id and the salt, and
the nonce is the number.  AES-GCM breaks if a key meets a nonce twice, and random nonces of 96 bits
allow 2^32 messages with a key.  Therefore each writer has keys that only it uses: it draws a random
salt, 16 bytes, and counts its entries from 0.  Two writers of a log would have to draw the same
salt; after 2^32 entries, and with another master key, a writer draws the next one.

The tag also covers the log's id, the stamp, and of the header the schema id, the count of records
and whether the message is compressed.  An entry that is altered in these, or is from another log,
is refused.  Commits and merges have no key, and give entries other numbers: therefore transaction
ids in the header, the count of records before, and the write time are not covered, nor is the order
of entries.  Unless a commit assigned them, readers show the transaction ids of the message.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlcore.base.errors import EncryptionKeyError, InvalidEntryError
from dlcore.log.entries.body import (
    batch_message_of,
    decode_entry_header,
    marked_encrypted,
    stamp_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from dlcore.base.access.master_keys import MasterKey, MasterKeys
    from dlcore.log.entries.body import EntryHeader
    from dlcore.wire.frames import BytesLike

ENTRIES_PER_SALT_MAX = 2**32
_SALT_BYTES = 16
_NUMBER_BYTES = 8
_TAG_BYTES = 16
_NONCE_BYTES = 12
_KEY_BYTES = 32
_PURPOSE = b"dlog entry 1\0"
_COVERED = struct.Struct(">?HIQ")
_EXPECTED = (
    "expected keys in a file or by a command: open_namespace(encryption_keys=…), "
    "dlog --encryption-keys, DLOG_ENCRYPTION_KEYS, or Spark's option encryptionKeys"
)


class Keys(Protocol):
    """The master keys that a process has."""

    known: MasterKeys

    def new_salt(self) -> bytes:
        """Return 16 bytes that no other call returns, in any process."""
        ...

    async def learn(self, name: str) -> None:
        """Look for a key of this name, unless it is known."""
        ...


class EntryEncryptor:
    """Encrypts the entries of one writer of a log."""

    def __init__(self, keys: Keys, log_id: str) -> None:
        self._keys = keys
        self._log_id = log_id
        self._renew()

    def _renew(self) -> None:
        self._master = self._keys.known.first
        self._salt = self._keys.new_salt()
        assert len(self._salt) == _SALT_BYTES
        self._cipher = _cipher(self._master, self._salt, self._log_id)
        self._count = 0

    def encrypt(self, body: Sequence[BytesLike]) -> list[BytesLike]:
        """Return the parts of an entry's body with its message encrypted.

        Each call must be for another entry; `body` is header and stamp, and parts of the message.
        """
        if self._count == ENTRIES_PER_SALT_MAX or self._keys.known.first != self._master:
            self._renew()
        head, *message = body
        number = self._count.to_bytes(_NUMBER_BYTES, "big")
        self._count += 1
        covered = _covered(head, decode_entry_header(head), self._log_id)
        name = self._master.name.encode()
        return [
            b"".join(
                (
                    marked_encrypted(head, encrypted=True),
                    bytes([len(name)]),
                    name,
                    self._salt,
                    number,
                )
            ),
            self._cipher.encrypt(_nonce(number), b"".join(message), covered),
        ]


class EntryDecryptor:
    """Decrypts the entries of a log; `keys` is None if there are none.

    It also returns entries that are not encrypted: a log's setting may have changed.
    """

    def __init__(self, keys: Keys | None, log: str, log_id: str) -> None:
        self._keys = keys
        self._log = log
        self._log_id = log_id

    async def learn(self, body: BytesLike, header: EntryHeader) -> None:
        """Look for the key of an entry, unless it is known; needed before `decrypt`.

        Raises:
            EncryptionKeyError: there is no such key.
            InvalidEntryError: the entry names no key.
        """
        if not header.encrypted:
            return
        name = _Encrypted.of(body, header).key_name
        if self._keys is None:
            raise EncryptionKeyError(
                f"log {self._log!r} is encrypted, here with the key {name!r}, and there are no "
                f"keys: {_EXPECTED}"
            )
        await self._keys.learn(name)
        if name not in self._keys.known:
            raise EncryptionKeyError(
                f"log {self._log!r}: an entry is encrypted with the key {name!r}, and the keys are "
                f"{self._keys.known.names}: expected that one among them"
            )

    def decrypt(self, body: BytesLike, header: EntryHeader) -> tuple[memoryview, EntryHeader]:
        """Return the entry as it was before encryption, and its header.

        Raises:
            InvalidEntryError: it was altered, is of another log, or was encrypted with another key
                of the same name.
        """
        if not header.encrypted:
            return memoryview(body), header
        from cryptography.exceptions import InvalidTag

        assert self._keys is not None
        found = _Encrypted.of(body, header)
        cipher = _cipher(self._keys.known[found.key_name], found.salt, self._log_id)
        covered = _covered(body, header, self._log_id)
        try:
            message = cipher.decrypt(_nonce(found.number), found.message, covered)
        except InvalidTag as error:
            raise InvalidEntryError(
                f"log {self._log!r}: an entry does not fit the key {found.key_name!r}: it was "
                "altered or is of another log, or the key of this name is not the one that it was "
                "encrypted with"
            ) from error
        head = memoryview(body)[: memoryview(body).nbytes - batch_message_of(body, header).nbytes]
        clear = memoryview(b"".join((marked_encrypted(head, encrypted=False), message)))
        return clear, decode_entry_header(clear)


def encryptor_for(
    keys: Keys | None, log: str, log_id: str, *, encrypted: bool
) -> EntryEncryptor | None:
    """Return the encryptor of a writer; None if the log is not `encrypted`.

    Raises:
        EncryptionKeyError: it is, and there are no keys.
    """
    if not encrypted:
        return None
    if keys is None:
        raise EncryptionKeyError(
            f"log {log!r} has the setting encrypted, and there are no keys: {_EXPECTED}"
        )
    return EntryEncryptor(keys, log_id)


class _Encrypted(NamedTuple):
    """The parts after header and stamp."""

    key_name: str
    salt: bytes
    number: bytes
    message: memoryview

    @classmethod
    def of(cls, body: BytesLike, header: EntryHeader) -> _Encrypted:
        view = batch_message_of(body, header)
        name_end = 1 + view[0] if view else 0
        salt_end = name_end + _SALT_BYTES
        number_end = salt_end + _NUMBER_BYTES
        if name_end <= 1 or len(view) < number_end + _TAG_BYTES:
            raise InvalidEntryError(
                f"an encrypted entry has {len(view)} bytes after its header: no key is named"
            )
        return cls(
            bytes(view[1:name_end]).decode(errors="replace"),
            bytes(view[name_end:salt_end]),
            bytes(view[salt_end:number_end]),
            view[number_end:],
        )


def _nonce(number: bytes) -> bytes:
    return number.rjust(_NONCE_BYTES, b"\0")


def _covered(body: BytesLike, header: EntryHeader, log_id: str) -> bytes:
    """Return what the tag covers beside the message; each part but the last has a fixed length."""
    fields = _COVERED.pack(
        header.compressed, header.schema_id, header.record_count, header.stamp_bytes
    )
    return b"".join((fields, stamp_of(body, header), log_id.encode()))


# All entries of a writer have one key, up to a very great number: it is derived once.
@lru_cache(maxsize=256)
def _cipher(master: MasterKey, salt: bytes, log_id: str) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = _PURPOSE + log_id.encode()
    return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt, info).derive(master.secret))
