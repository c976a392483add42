"""The tree below a namespace's root: every path, in both directions.

<root>                                          NamespaceBinding, with the finalized features
<root>/bookies/{available,readonly}/<name>      BookieRegistration, ephemeral
<root>/bookies/cookies/<name>                   BookieCookie
<root>/bookies/held/<name>                      exists while an operator holds the bookie read-only
<root>/bookies/garbage/<name>                   incarnation whose garbage brake was released
<root>/bookies/restored                         Restored: bookies delete no ledger meanwhile
<root>/capability-keys                          KeyRing: its readers can make capabilities
<root>/ledgers/idgen                            the next ledger id, as decimal text
<root>/ledgers/<high>/<middle>/<low>            LedgerMetadata
    …/staged                                    StagedLedger, of a ledger that several extents share
<root>/logs/<2-hex bucket>/<escaped name>       LogMetadata, written once: the name's log id; a
                                                digest replaces the rest of a long name
<root>/heads/<2-hex bucket>/<log id>            LogHead: the log's changing state; its version is
                                                the log's only compare-and-set token
    …/lock                                      LockHolder, ephemeral: the log's writer
    …/settings                                  StoredSettings, of a log that has some
    …/schema                                    LogSchema, of a typed log
    …/subscribers/<escaped id>                  Subscription: a position kept for a reader
    …/subscribers/<escaped id>/lock             LockHolder, ephemeral: that reader
    …/<LSSN>                                    SegmentEnd; empty until the segment is completed
    …/<LSSN>/<number>                           Chunk: older extents, written once, then only merged
<root>/deleted/<log id>                         a deleted log whose data is still being removed
<root>/commits/<bucket>/<escaped identity>      CommitRecord
<root>/staging/<bucket>/<escaped identity>/<ledger id>   lists ledgers that may still be committed
<root>/staging-owners/<token>                   StagingProcess, ephemeral: the process that stages
<root>/retention/<bucket>/<log id>              RetainedLog: the log's settings have a retention
<root>/upkeep/requests/<bucket>/<log id>        UpkeepRequest: the log has small extents to merge
<root>/upkeep/locks/<log id>                    ephemeral: the worker that does the log's upkeep
<root>/upkeep/tiers/<escaped URL>               exists if cold segments ever went there
<root>/autorecovery/auditor                     ElectedAuditor, ephemeral: the current auditor
<root>/autorecovery/members/<token>             RecoveryMember, ephemeral: a process of it
<root>/autorecovery/troubles/<sweep>            SweepTroubles: items that the last one left out
<root>/autorecovery/troubles/<sweep>-<token>    SweepTroubles, ephemeral: those of one worker
<root>/autorecovery/paused                      exists while auto-recovery is paused
<root>/autorecovery/last-check                  ReplicaCheckRun
<root>/autorecovery/check-progress              ReplicaCheckRun of the current check
<root>/autorecovery/ledgers/<high>/<middle>/<low>   UnderReplicatedLedger
<root>/autorecovery/locks/<ledger id>           ephemeral: the worker that repairs the ledger
<root>/proxies/<address>                        ephemeral: a proxy that takes logs
<root>/cluster-settings                         StoredClusterSettings, once there are some
<root>/access-rules                             StoredRules: the rights of callers, once it has some
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.addresses import is_address
from dlcore.base.errors import CorruptMetadataError, InvalidNamespaceUriError

if TYPE_CHECKING:
    from collections.abc import Callable

# As in BookKeeper's hierarchical layout: a list of children must fit a packet of ZooKeeper.
_LEDGERS_PER_NODE = 10_000
_DIGITS_MAX = 19
"""Digits of the largest stored number, 2**63 - 1."""
_URI = re.compile(r"(?P<scheme>[A-Za-z-]+)://(?P<servers>[^/]+)(?P<root>/.*)?")
_SCHEMES = ("distributedlog", "distributedlog-bk")
NAME_NODE_LENGTH_MAX = 160
"""Longest part of a log's name in a node's name; longer names are cut.  Then the names of a million
logs, 4,220 in a bucket, take less than 0.7 MB in each bucket."""
_CUT = "~"
BUCKETS = tuple(f"{number:02x}" for number in range(256))
# Without % and ~, which mark an escaped byte and a name that was cut.
_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=:#@+")


@dataclass(frozen=True, slots=True)
class NamespaceUri:
    """A parsed namespace URI: ZooKeeper's servers (``host:port,host:port``) and the root path."""

    servers: str
    root: str

    def __str__(self) -> str:
        return f"distributedlog://{self.servers}{self.root}"


def parse_uri(uri: str) -> NamespaceUri:
    """Parse ``distributedlog[-bk]://zk1:2181,zk2:2181/path`` (``;`` is accepted for ``,``)."""
    example = "expected distributedlog://host:port[,host:port]/path"
    match = _URI.fullmatch(str(uri).strip())  # `None` gives the same error
    if match is None:
        raise InvalidNamespaceUriError(f"invalid namespace URI {uri!r}: {example}")
    scheme = match["scheme"].lower()
    if scheme not in _SCHEMES:
        raise InvalidNamespaceUriError(
            f"invalid namespace URI {uri!r}: unknown scheme {scheme!r}, {example}"
        )
    servers = [_parse_server(server.strip(), uri) for server in re.split("[,;]", match["servers"])]
    root = (match["root"] or "").rstrip("/")
    if not root or "//" in root or any(part in (".", "..") for part in root.split("/")):
        raise InvalidNamespaceUriError(
            f"invalid namespace URI {uri!r}: the path {match['root'] or ''!r} is not a node path, "
            f"{example}"
        )
    return NamespaceUri(",".join(servers), root)


def _parse_server(server: str, uri: str) -> str:
    host, _, port = server.rpartition(":") if ":" in server else (server, "", "2181")
    # The error of a look-up that is none of the system would end kazoo's thread.
    if not is_address(host, port) or not int(port):
        raise InvalidNamespaceUriError(
            f"invalid namespace URI {uri!r}: {server!r} is not host:port"
        )
    return f"{host}:{port}"


def escape(name: str) -> str:
    """Return `name` as one path component: bytes outside a safe set become ``%XX``."""
    assert name
    escaped = name
    if not _SAFE.issuperset(name):
        characters = map(chr, name.encode())
        escaped = "".join(each if each in _SAFE else f"%{ord(each):02X}" for each in characters)
    return f"%2E{escaped[1:]}" if escaped.startswith(".") else escaped


def unescape(component: str) -> str:
    """Invert `escape`."""
    try:
        raw = re.sub(
            rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), component.encode()
        )
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CorruptMetadataError(f"{component!r} is not an escaped name") from error


class _Below:
    """A path that is the same below each namespace's root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, paths: NamespacePaths, _owner: object) -> str:
        return f"{paths.root}/{self._path}"


class _Each:
    """The path of a name below a parent."""

    def __init__(self, parent: _Below, *, is_divided: bool = False) -> None:
        self._parent = parent
        self._is_divided = is_divided
        """Whether the names are divided over `BUCKETS`."""

    def __get__(self, paths: NamespacePaths, _owner: object) -> Callable[[str], str]:
        return partial(self._path_of, self._parent.__get__(paths, _owner))

    def _path_of(self, parent: str, name: str) -> str:
        bucket = f"{bucket_of(name)}/" if self._is_divided else ""
        return f"{parent}/{bucket}{escape(name)}"


@dataclass(frozen=True, slots=True)
class NamespacePaths:
    """Paths below one namespace's root."""

    root: str

    bookies_available = _Below("bookies/available")
    """Parent of the registrations of writable bookies."""
    bookies_readonly = _Below("bookies/readonly")
    """Parent of the registrations of read-only bookies."""
    cookies = _Below("bookies/cookies")
    """Parent of the bookies' cookies."""
    garbage_releases = _Below("bookies/garbage")
    """Parent of the releases of brakes."""
    erasures = _Below("bookies/erasures")
    """Parent of the requests to remove every byte of ledgers that are gone."""
    restored = _Below("bookies/restored")
    """Exists from the import of the metadata until its restore was accepted."""
    capability_keys = _Below("capability-keys")
    """The keys that sign and verify capabilities."""
    ledgers = _Below("ledgers")
    """Root of the ledgers' tree."""
    ledger_idgen = _Below("ledgers/idgen")
    """Counter of ledger ids."""
    logs = _Below("logs")
    """Parent of the buckets of logs."""
    heads = _Below("heads")
    """Parent of the buckets of heads."""
    deleted_logs = _Below("deleted")
    """Parent of the deleted logs whose data is still being removed."""
    commits = _Below("commits")
    """Parent of the commit records."""
    staging = _Below("staging")
    """Parent of staged ledgers, by identity."""
    merged = _Below("merged")
    """Parent of ledgers whose last extent was merged, until they are deleted."""
    staging_owners = _Below("staging-owners")
    """Parent of the ephemeral nodes of staging processes."""
    retained_logs = _Below("retention")
    """Parent of the buckets of logs that have a retention, or a tier."""
    upkeep = _Below("upkeep")
    """Root of the upkeep of logs."""
    upkeep_requests = _Below("upkeep/requests")
    """Parent of the buckets of logs that ask for upkeep."""
    upkeep_locks = _Below("upkeep/locks")
    """Parent of the locks of upkeep."""
    redactions = _Below("upkeep/redactions")
    """Parent of the redactions of logs that are not finished."""
    tiers = _Below("upkeep/tiers")
    """Parent of the stores that cold segments of any log ever went to."""
    proxies = _Below("proxies")
    """Parent of the ephemeral nodes of proxies."""
    cluster_settings = _Below("cluster-settings")
    """The settings that hold for all processes."""
    access_rules = _Below("access-rules")
    """The rules of access."""
    auditor = _Below("autorecovery/auditor")
    """Ephemeral node of the auditor."""
    recovery_members = _Below("autorecovery/members")
    """Parent of the ephemeral nodes of auto-recovery's processes."""
    troubles = _Below("autorecovery/troubles")
    """Parent of the items that the last sweeps left out."""
    autorecovery_paused = _Below("autorecovery/paused")
    """Exists while auto-recovery is paused."""
    last_check = _Below("autorecovery/last-check")
    """The last full replica check."""
    check_progress = _Below("autorecovery/check-progress")
    """Progress of the current full replica check."""
    scrub_progress = _Below("autorecovery/scrub-progress")
    """Progress of the current pass over the objects of cold ledgers."""
    last_export = _Below("autorecovery/last-export")
    """The newest periodic export of metadata."""
    under_replicated = _Below("autorecovery/ledgers")
    """Root of the tree of under-replicated ledgers."""

    bookie_available = _Each(bookies_available)
    """Registration of a writable bookie."""
    bookie_readonly = _Each(bookies_readonly)
    """Registration of a read-only bookie."""
    cookie = _Each(cookies)
    """Cookie of a bookie."""
    bookie_held = _Each(_Below("bookies/held"))
    """Exists while an operator holds the bookie read-only."""
    garbage_release = _Each(garbage_releases)
    """Exists to release the brake of a bookie's garbage collection once."""
    erasure = _Each(erasures)
    """A request to all bookies; below it is the answer of each."""
    deleted_log = _Each(deleted_logs)
    """One deleted log."""
    commit = _Each(commits, is_divided=True)
    """Commit record of an identity of atomic appends."""
    staging_of = _Each(staging, is_divided=True)
    """Parent of the ledgers staged under an identity."""
    retained_log = _Each(retained_logs, is_divided=True)
    """A log that has a retention."""
    upkeep_request = _Each(upkeep_requests, is_divided=True)
    """A log that asks for upkeep."""
    upkeep_lock = _Each(upkeep_locks)
    """Ephemeral node of the worker that does a log's upkeep, or a sweep."""
    redaction = _Each(redactions)
    """The redaction of a log that is not finished."""
    tier = _Each(tiers)
    """Says that objects of the cluster are, or were, below a URL."""
    proxy = _Each(proxies)
    """Ephemeral node of the proxy at `location`."""
    troubles_of = _Each(troubles)
    """Items that the last sweep of a kind left out, if there were any."""
    staging_owner = _Each(staging_owners)
    """Ephemeral node of one staging process."""
    recovery_member = _Each(recovery_members)
    """Ephemeral node of one process of auto-recovery."""

    @property
    def buckets(self) -> tuple[str, ...]:
        """All buckets, which are created with the namespace, and keep every list below 1 MB."""
        divided = (
            self.logs,
            self.heads,
            self.commits,
            self.staging,
            self.retained_logs,
            self.upkeep_requests,
        )
        return tuple(f"{above}/{name}" for above in divided for name in BUCKETS)

    def erasure_at(self, token: str, name: str) -> str:
        """The answer of a bookie to a request."""
        return f"{self.erasure(token)}/{escape(name)}"

    def ledger(self, ledger_id: int) -> str:
        """Metadata of a ledger; at most 10,000 children per node, as ZooKeeper bounds answers."""
        return f"{self.ledgers}/{_split(ledger_id)}"

    def ledger_id_of(self, high: str, middle: str, low: str) -> int:
        """Invert `ledger` for the three components below `ledgers`."""
        try:
            return (int(high) * _LEDGERS_PER_NODE + int(middle)) * _LEDGERS_PER_NODE + int(low)
        except ValueError as error:
            raise CorruptMetadataError(f"{high}/{middle}/{low} is not a ledger's path") from error

    def log(self, name: str) -> str:
        """The node of a log's name."""
        return f"{self.logs}/{bucket_of(name)}/{_component_of(name)}"

    def log_bucket(self, bucket: str) -> str:
        """Parent of the names of one bucket."""
        return f"{self.logs}/{bucket}"

    def log_of(self, log_id: str) -> LogPaths:
        """Paths of one log, which do not depend on its name."""
        return LogPaths(f"{self.heads}/{bucket_of(log_id)}/{escape(log_id)}")

    def staging_entry(self, identity: str, ledger_id: int) -> str:
        """Lists a ledger of an identity with extents that may still be committed."""
        return f"{self.staging_of(identity)}/{ledger_id}"

    def staged_ledger(self, ledger_id: int) -> str:
        """State of a staged ledger."""
        return f"{self.ledger(ledger_id)}/staged"

    def merged_ledger(self, ledger_id: int) -> str:
        """Lists a ledger of `merged`."""
        return f"{self.merged}/{ledger_id}"

    def under_replicated_ledger(self, ledger_id: int) -> str:
        """Node of one under-replicated ledger; bounded children per node, as for `ledger`."""
        return f"{self.under_replicated}/{_split(ledger_id)}"

    def repair_lock(self, ledger_id: int) -> str:
        """Ephemeral node of the worker that repairs a ledger; there are as many as workers."""
        return f"{self.root}/autorecovery/locks/{ledger_id}"


def _component_of(name: str) -> str:
    escaped = escape(name)
    if len(escaped) <= NAME_NODE_LENGTH_MAX:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()
    return escaped[: NAME_NODE_LENGTH_MAX - len(digest) - len(_CUT)] + _CUT + digest


def name_of_component(component: str) -> str | None:
    """Return the log's name from its node's name; None if only the node's value has it."""
    return None if _CUT in component else unescape(component)


def is_number(component: str) -> bool:
    """Return whether a node's name is a number that can belong to a ledger."""
    return component.isascii() and component.isdecimal() and len(component) <= _DIGITS_MAX


def _split(ledger_id: int) -> str:
    high, low = divmod(ledger_id, _LEDGERS_PER_NODE)
    high, middle = divmod(high, _LEDGERS_PER_NODE)
    return f"{high}/{middle:04d}/{low:04d}"


def bucket_of(text: str) -> str:
    """Return the bucket of a name."""
    return hashlib.sha256(text.encode()).hexdigest()[:2]


@dataclass(frozen=True, slots=True)
class LogPaths:
    """Paths of one log; `head` is the parent of the others."""

    head: str

    @property
    def lock(self) -> str:
        """The writer lock."""
        return f"{self.head}/lock"

    @property
    def settings(self) -> str:
        """The log's settings for its writers."""
        return f"{self.head}/settings"

    @property
    def schema(self) -> str:
        """The schema of a typed log."""
        return f"{self.head}/schema"

    @property
    def subscribers(self) -> str:
        """Parent of the subscribers' positions."""
        return f"{self.head}/subscribers"

    def subscriber(self, subscriber: str) -> str:
        """Position of one subscriber."""
        return f"{self.subscribers}/{escape(subscriber)}"

    def subscriber_lock(self, subscriber: str) -> str:
        """Ephemeral node of the reader that may move the position."""
        return f"{self.subscriber(subscriber)}/lock"

    def segment(self, lssn: int) -> str:
        """A segment that has chunks or is completed."""
        return f"{self.head}/{lssn}"

    def chunk(self, lssn: int, number: int) -> str:
        """One chunk of a segment's extents."""
        return f"{self.segment(lssn)}/{number}"
