"""Keys of a process, in a file or from a command, while they change."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access import encryption_keys, key_sources
from dlcore.base.access.encryption_keys import SALT_BYTES, EncryptionKeys
from dlcore.base.errors import ConfigurationError
from tests.fixtures.aio import until
from tests.fixtures.encrypted import master_keys, write_keys

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_first_key_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a caller that asks; a file that is no key file, or is gone, changes nothing."""
    monkeypatch.setattr(encryption_keys, "LOOK_S", 0.01)
    path = tmp_path / "keys"

    async def body() -> None:
        keys = await EncryptionKeys.open(write_keys(path, "old"))
        assert keys.known.names == "old"
        write_keys(path, "new", "old")
        await until(lambda: keys.known.first.name == "new")
        write_keys(path)
        await keys.learn("other")
        path.unlink()
        await keys.learn("other")
        assert keys.known.names == "new, old"
        await keys.aclose()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_key_that_is_not_known_is_looked_for(tmp_path: Path) -> None:
    """At once, and not at the next look; of keys that never change there is no other."""
    path = tmp_path / "keys"

    async def body() -> None:
        keys = await EncryptionKeys.open(write_keys(path, "old"))
        write_keys(path, "old", "new")
        await keys.learn("old")
        assert keys.known.names == "old"
        await keys.learn("new")
        assert keys.known.names == "old, new"
        await keys.aclose()
        fixed = EncryptionKeys(master_keys("old"))
        await fixed.learn("new")
        assert fixed.known.names == "old"
        await fixed.aclose()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_command_gives_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs without a shell, and again for a key that is not known."""
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    path = tmp_path / "my keys"
    where = f"command:cat '{write_keys(path, 'old')}'"

    async def body() -> None:
        keys = await EncryptionKeys.open(where)
        write_keys(path, "new", "old")
        await keys.learn("new")
        assert keys.known.first.name == "new"
        await keys.aclose()

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import sys; sys.exit('no such key in the vault')", "exit code 1: no such key in"),
        ("print('no keys')", "line 1: expected a name"),
        ("import time; time.sleep(60)", "no answer within 0.2 s"),
        (f"print('x' * {key_sources.SIZE_BYTES_MAX})", "it prints more than 1048576 bytes"),
    ],
)
def test_a_command_that_gives_none_is_refused(
    script: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what it said."""
    monkeypatch.setattr(encryption_keys, "_COMMAND_S", 0.2 if "sleep" in script else 30.0)
    with pytest.raises(ConfigurationError, match=f"encryption_keys=.*{why}"):
        asyncio.run(EncryptionKeys.open(f'command:{sys.executable} -c "{script}"'))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Cut off, its last keys would be missing without a word."""
    path = tmp_path / "keys"
    write_keys(path, "k")
    with path.open("ab") as file:
        file.write(b"#" * (key_sources.SIZE_BYTES_MAX - path.stat().st_size))
    keys = asyncio.run(EncryptionKeys.open(str(path)))
    assert keys.known.names == "k"
    with path.open("ab") as file:
        file.write(b"#")
    with pytest.raises(ConfigurationError, match="expected 1048576 bytes at most"):
        asyncio.run(EncryptionKeys.open(str(path)))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Its group may read it; a missing one is refused, too."""
    path = tmp_path / "keys"
    write_keys(path, "k")

    async def names() -> str:
        keys = await EncryptionKeys.open(str(path))
        await keys.aclose()
        return keys.known.names

    path.chmod(0o640)
    assert asyncio.run(names()) == "k"
    for mode in (0o644, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigurationError, match=r"only its owner and group may read \(chmod"):
            asyncio.run(names())
    path.unlink()
    with pytest.raises(ConfigurationError, match="expected a readable file"):
        asyncio.run(names())


def test_a_salt_is_never_drawn_twice() -> None:
    """It comes from the system's source of random bytes."""
    keys = EncryptionKeys(master_keys("k"))
    salts = {keys.new_salt() for _ in range(100)}
    assert len(salts) == 100
    assert {len(salt) for salt in salts} == {SALT_BYTES}
