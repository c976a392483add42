"""Failures of one item of a sweep: each is logged once, with advice that fits."""

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
        (TableError("is another one; to do: rename it"), "to do: as the error says"),
        (TableError("is another one?  To do: rename it"), "to do: as the error says"),
        (ObjectStoreError("503"), "to do: nothing now, the rest goes on; see to the reason"),
    ],
)
def test_an_error_keeps_its_own_advice(
    caplog: pytest.LogCaptureFixture, error: DLError, advice: str
) -> None:
    """Another one after it, to do nothing, would say the opposite."""
    troubles = Troubles()
    with troubles.isolated("the table"):
        _fail(error)
    assert f"{error}; {advice}" in caplog.text
    assert troubles.found == [f"the table: {type(error).__name__}: {error}"]
