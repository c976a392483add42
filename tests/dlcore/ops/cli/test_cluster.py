"""`dlog cluster settings` against a cluster: what it shows, stores and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fixtures.shell import Shell

pytestmark = pytest.mark.integration
SETTING = "autorecovery.check_interval_s"


def test_settings_of_a_cluster(shell: Shell) -> None:
    """Stored, shown, left to the processes again; what is wrong stores nothing."""
    change = f"{SETTING}=1e6"
    row = {"setting": SETTING, "value": 1e6}
    assert row in shell.json("cluster", "settings", "--set", change)
    assert row in shell.json("cluster", "settings")
    for wrong, message in (
        ("proxy.port=1", "proxy.port: no setting of a cluster"),
        ("port=1", "'port': expected TABLE.KEY"),
        (SETTING, "expected KEY=VALUE"),
        (f"{SETTING}=0", "check_interval_s=0"),
        (f"{SETTING}=soon", "check_interval_s='soon'"),
    ):
        code, _, err = shell.outcome("cluster", "settings", "--set", wrong)
        assert (code, message in err) == (2, True), err
    assert row in shell.json("cluster", "settings")
    assert row not in shell.json("cluster", "settings", "--unset", SETTING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to restart: give --bookies or --proxies"),
        (("--bookies", "say 'x"), "is no command: No closing quotation"),
        (("--bookies", "true"), "--yes is required"),
    ],
)
def test_a_wrong_restart(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    """Nothing is done."""
    code, _, err = shell.outcome("cluster", "restart", *arguments)
    assert (code, message in err) == (2, True), err
