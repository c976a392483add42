"""The public names: complete, sorted, and light to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dlcore
import dlcore.sync


def _rank(name: str) -> tuple[int, str]:
    """Sort constants before classes before functions, as ruff does."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("module", [dlcore, dlcore.sync], ids=lambda module: module.__name__)
def test_every_public_name_is_there(module: object) -> None:
    """`__all__` is what can be imported, each name once; constants come first."""
    names = module.__all__  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=_rank)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["dlcore", "dlcore.sync"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    """A program that only needs a name or an error does not load the clients."""
    code = (
        f"import {module}, sys; "
        "print([m for m in sys.modules if m.split('.')[0] in ('grpc', 'kazoo', 'pyarrow')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
