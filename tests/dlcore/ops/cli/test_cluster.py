"""`dlog cluster settings` against a cluster: what it shows, stores and refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest
from pyarrow import flight

from dlcore.sync import open_namespace
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from tests.fixtures.proxies import ProxyProcess
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


def test_a_running_proxy_takes_the_settings_of_its_cluster(
    shell: Shell, proxy: ProxyProcess
) -> None:
    """Budgets, and what new logs get; a log that exists keeps what it has."""
    before, after = (f"settings/{uuid4().hex}" for _ in range(2))
    client = flight.connect(proxy.location)

    def window_of(log: str) -> int:
        writer, reader = client.do_put(
            flight.FlightDescriptor.for_path(log), pa.schema([("value", pa.binary())])
        )
        with writer:
            ready = json.loads(reader.read().to_pybytes())["ready"]
            writer.done_writing()
            while reader.read() is not None:
                pass
        return int(ready["window_records"])

    def create(log: str) -> object:
        with open_namespace(proxy.location) as namespace:
            namespace.create_log(log)
        return shell.json("log", "settings", log)["retention_s"]

    assert create(before) is None
    changes = ("log.retention_s=604800", "proxy.window_records=7")
    shell.text("cluster", "settings", *(part for each in changes for part in ("--set", each)))
    try:
        assert create(after) == 604800.0
        wait_until(lambda: window_of(after) == 7, timeout_s=60)
        assert shell.json("log", "settings", before)["retention_s"] is None
    finally:
        keys = [each.partition("=")[0] for each in changes]
        shell.text("cluster", "settings", *(part for each in keys for part in ("--unset", each)))
    wait_until(lambda: window_of(after) > 7, timeout_s=60)
    client.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to restart: give --bookies or --proxies"),
        (("--bookies", "say 'x"), "is no command: No closing quotation"),
        (("--bookies", "--yes"), "'--yes' is no command: expected one such as 'systemctl"),
        (("--bookies", "true"), "--yes is required"),
    ],
)
def test_a_wrong_restart(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    """Nothing is done."""
    code, _, err = shell.outcome("cluster", "restart", *arguments)
    assert (code, message in err) == (2, True), err
