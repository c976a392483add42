"""The entrances of the console: each path that its port answers, and nothing else."""

from __future__ import annotations

from dlcore.base.access.entrances import Entrance

FILES = {
    "/": "index.html",
    **{
        f"/{name}": name
        for name in (
            "actions.js",
            "api.js",
            "cluster.js",
            "console.css",
            "dom.js",
            "icon.svg",
            "log.js",
            "logs.js",
            "main.js",
            "picture.js",
            "tail.js",
        )
    },
}
"""The files of the page by path."""
_ALL = "every caller that can connect, at the console's own address"
_OWNER = "who has the console's secret"
_COST = "one request, without its body"
_LOG = "the log of the request"


def _file(path: str) -> Entrance:
    return Entrance(
        name=f"GET {path}", resource="a file of the page", right="none", callers=_ALL, cost=_COST,
        logged="nothing",
    )  # fmt: skip


def _api(name: str, resource: str, right: str) -> Entrance:
    return Entrance(
        name=name, resource=resource, right=right, callers=_OWNER, cost=_COST, logged="nothing"
    )


SESSION = _api("GET /api/session", "the console", "none")
CLUSTER = _api("GET /api/cluster", "bookies, proxies, ledgers that lack copies", "none")
LOGS = _api("GET /api/logs", "logs by a part of their names", "describe on each log")
LOG = _api("GET /api/log", _LOG, "describe on the log")
TAIL = _api("GET /api/tail", _LOG, "read on the log")
TRUNCATE = _api("POST /api/truncate", _LOG, "truncate on the log")
SEAL = _api("POST /api/seal", _LOG, "manage on the log")
DELETE = _api("POST /api/delete", _LOG, "manage on the log")
SETTINGS = _api("POST /api/settings", _LOG, "manage on the log")
RELEASE = _api("POST /api/release", _LOG, "manage on the log")
FORGET = _api("POST /api/forget", "a subscriber of the log of the request", "read on the log")

_USER = "a user whom the proxies know by a token, or who has the console's secret"


def _door(method: str, right: str, cost: str) -> Entrance:
    return Entrance(
        name=f"{method} /v1/logs/{{log:.+}}/records", resource=_LOG, right=right, callers=_USER,
        cost=cost, logged="as the proxies do",
    )  # fmt: skip


READ = _door("GET", "read on the log", "one request, and one call to a proxy")
APPEND = _door(
    "POST",
    "append on the log",
    "one call to a proxy; of the body at most 4 MiB, for a second, are dropped",
)

ENTRANCES = (
    *map(_file, FILES),
    SESSION, CLUSTER, LOGS, LOG, TAIL, TRUNCATE, SEAL, DELETE, SETTINGS, RELEASE, FORGET,
    READ, APPEND,
)  # fmt: skip
"""All of them; a call of the page has the rights of the user as whom the console was started."""
