"""Failures of one item of a sweep: each is logged once, with one advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ObjectStoreError, TableError
from dlcore.base.isolating import Troubles

if TYPE_CHECKING:
    from dlcore.base.errors import DLError


def _fail(error: DLError) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (TableError("is another one; to do: rename it"), "to do: rename it"),
        (TableError("is another one?  To do: rename it"), "To do: rename it"),
        (ObjectStoreError("503"), "to do: nothing now"),
    ],
)
def test_an_error_keeps_its_own_advice(
    caplog: pytest.LogCaptureFixture, error: DLError, advice: str
) -> None:
    """Another one after it, to do nothing, would say the opposite."""
    troubles = Troubles()
    with troubles.isolated("the table"):
        _fail(error)
    assert advice in caplog.text
    assert caplog.text.lower().count("to do:") == 1
    assert troubles.found == [f"the table: {type(error).__name__}: {error}"]
