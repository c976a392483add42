"""The error of an import that fails for want of a package of an extra."""

from __future__ import annotations

import importlib

import pytest

from dlcore.base import extras


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a module of the package is asked for; the cause stays."""
    monkeypatch.setitem(extras.EXTRA_OF, "no_such_package", "cluster")
    with (
        pytest.raises(
            ModuleNotFoundError, match=r"pip install 'distributed-dlog\[cluster\]'"
        ) as found,
        extras.missing_packages_explained(),
    ):
        importlib.import_module("no_such_package.inner")
    assert found.value.name == "no_such_package"
    assert isinstance(found.value.__cause__, ModuleNotFoundError)


def test_other_packages_keep_their_error() -> None:
    """No extra brings them."""
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"),
        extras.missing_packages_explained(),
    ):
        importlib.import_module("no_such_package")
