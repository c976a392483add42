"""docs/entrances.md, made of the tables that the servers use.

``python -m tests.entrances_document`` writes it; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bookie.serving import control
from dlcore.base.listening import operator_port
from dlcore.flight import entrances as flight
from dlcore.ops.cli.console import entrances as console
from dlcore.ops.sql import server as sql
from dlcore.proxy.kafka import entrances as kafka
from dlcore.wire import bookie_end as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.entrances import Entrance

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "entrances.md"
_HEAD = """# Entrances

Generated from the code by `make pages`.

Every way in which another process can make a server do something. Servers dispatch by these tables,
so what is not in them cannot be reached. The rights at a proxy are those of
[the rules of access](access.md#rights), the rights at a bookie those of
[capabilities](capabilities.md). "Cost" is what a caller costs who is not let in.
"""
_OTHERS = """## Beside these

| entrance | who | what it reaches |
|---|---|---|
| gRPC's health service of a proxy | every caller that can connect | whether the proxy is ready |
| ZooKeeper's nodes | whom their ACL lets in; without one, everybody | all of the namespace |
| SIGTERM, SIGINT | the process's user | an orderly stop |
| SIGHUP | the process's user | bookies, proxies and auto-recovery read their configuration again |
| SIGUSR2 | the process's user | servers tell their stacks to that user and root, in memory |
| a bookie's folder, configuration, keys and audit logs | who may open the files | what they hold |
| auto-recovery | who may write ZooKeeper's nodes | it does what they ask for |
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            _HEAD,
            _table("A proxy", flight.ENTRANCES),
            _table("A proxy's port for Kafka's clients", kafka.ENTRANCES),
            _table("A bookie's port", wire.ENTRANCES),
            _table("A bookie's control port", control.ENTRANCES),
            _table("The port for operators, of every server", operator_port.ENTRANCES),
            _table("The console", console.ENTRANCES),
            _table("`dlog sql`", sql.ENTRANCES),
            _OTHERS,
        ]
    )


def _table(title: str, entrances: Sequence[Entrance]) -> str:
    rows = [
        f"| `{each.name}` | {each.resource} | {each.right} | {each.callers} | {each.cost} | "
        f"{each.logged} |"
        for each in entrances
    ]
    head = ["| entrance | resource | right | callers | cost | logged |", "|" + "---|" * 6]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
