"""Keys as text: those that are taken, and those that are refused without being shown."""

from __future__ import annotations

import base64

import pytest

from dlcore.base.access.master_keys import MasterKeys
from dlcore.base.errors import ConfigurationError
from tests.fixtures.encrypted import key_line, master_keys, secret_of

SHORT = base64.b64encode(bytes(31)).decode()


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    """Comments and empty lines are none."""
    text = f"# keys\n\n{key_line('new')}  \n{key_line('old')}"
    keys = MasterKeys.parse(text.encode(), "keys")
    assert (keys.first.name, keys.first.secret) == ("new", secret_of("new"))
    assert keys["old"].secret == secret_of("old")
    assert len(keys) == 2
    assert "old" in keys
    assert "other" not in keys
    assert keys.names == "new, old"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "at least one line"),
        ("# nothing\n", "at least one line"),
        ("name\n", "line 1"),
        (f"\nname {SHORT}\n", "line 2"),
        ("name !notbase64!\n", "line 1"),
        (f"na/me {key_line('x').split()[1]}\n", "line 1"),
        (key_line("twice") * 2, "line 2"),
        ("\xff\xfe name\n", "line 1"),
    ],
)
def test_a_line_that_is_no_key_is_refused(text: str, where: str) -> None:
    """The error has its number, and nothing of it."""
    with pytest.raises(
        ConfigurationError, match=rf"encryption keys in the file\W.*{where}"
    ) as found:
        MasterKeys.parse(text.encode("latin-1"), "the file")
    for word in text.split():
        assert len(word) < 8 or word not in str(found.value)


def test_no_representation_has_a_key() -> None:
    """The text of all keys, and of one."""
    keys = master_keys("a", "b")
    assert repr(keys) == "<MasterKeys a, b>"
    assert repr(keys.first) == "<MasterKey a>"
    assert f"{keys.first}" == "<MasterKey a>"
