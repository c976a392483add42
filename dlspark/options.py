"""The options of ``format("dlog")``: one table, parsed into frozen values; every check is here.

Reading (`ReadOptions`):

    uri                     namespace, ``distributedlog://host:port/path``; required
    tlsCa, tlsCert, tlsKey  PEM files on every host, the driver's and the executors': with tlsCa,
                            connections to bookies use TLS, and it says whom to trust; the other two
                            are our own certificate and its key, where bookies ask for one
    log | logs | logsPattern
                            exactly one: a log, a comma-separated list, or a regular expression that
                            matches the whole name (new logs are found while a stream runs)
    startingOffsets         earliest | latest | DLSN | JSON by log; inclusive.  Batch: earliest
                            (latest is refused); stream: latest, and only without a checkpoint
    startingTxid            … at the first record whose txid is not below this
    startingTimestamp       … whose timestamp is not below this (epoch ms, or ISO-8601; UTC).
                            A batch without such a record is empty; a stream is refused
    endingOffsets           batch only; earliest is refused; exclusive: the next position
    endingTxid              batch only; exclusive: stop before the first record with txid >= this
    endingTimestamp         batch only; exclusive, likewise
    failOnDataLoss          true (default) | false: whether a read fails for records that were
                            truncated, or whose log was deleted, or leaves them out with a warning
    minPartitions           split until there are at least so many, as far as there are entries
    maxRecordsPerPartition  about the most records of a partition; a partition is at least one entry

Writing (`WriteOptions`):

    uri, tlsCa, tlsCert, tlsKey
                            as above
    log                     the log to write to; without it the data has a column ``log``
    txnAppId, txnVersion    batch only, both or neither: a write with a version not above the last
                            that this application committed to the log is skipped; writes without
                            the option log count together, whichever logs their rows choose
    lockTimeoutMs           how long a write waits for a writer that holds one of its logs, 0 not at
                            all; 20000
"""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN, validate_log_name
from dlcore.tls import TlsFiles
from dlspark.positions import (
    Bound,
    Edge,
    PositionsByLog,
    TimestampBound,
    TxidBound,
    parse_integer,
    parse_offsets,
    parse_timestamp,
    parse_txid,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SELECTORS = ("log", "logs", "logsPattern")
_STARTS = ("startingOffsets", "startingTxid", "startingTimestamp")
_ENDS = ("endingOffsets", "endingTxid", "endingTimestamp")
_TLS_KEYS = ("tlsCa", "tlsCert", "tlsKey")
_READ_KEYS = (
    "uri",
    *_SELECTORS,
    *_STARTS,
    *_ENDS,
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    *_TLS_KEYS,
)
_WRITE_KEYS = ("uri", "log", "txnAppId", "txnVersion", "lockTimeoutMs", *_TLS_KEYS)
_ADDED_BY_SPARK = frozenset({"checkpointlocation", "queryname"})  # reach streaming sinks
_URI_RULE = "expected distributedlog://host:port[,host:port]/path"
_APP_ID_BYTES_MAX = 128
_T = TypeVar("_T")


class Mode(enum.Enum):
    """What a set of options is for; `LOAD` is before Spark has said whether batch or stream."""

    LOAD = "a read"
    BATCH = "a batch"
    STREAM = "a stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a namespace is, and how its bookies are talked to; pickled: of TLS only paths."""

    uri: str
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        return self.uri


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """Which logs to read: names, or a pattern for whole names."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    def matches(self, log: str) -> bool:
        """Whether `log` is selected."""
        if self.pattern is None:
            return log in self.names
        return re.fullmatch(self.pattern, log) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read; `end` is None for a stream."""

    address: Address
    logs: LogSelection
    start: Bound
    end: Bound | None
    fail_on_data_loss: bool
    min_partitions: int | None
    max_records_per_partition: int | None

    @classmethod
    def parse(cls, options: Mapping[str, str], mode: Mode) -> ReadOptions:
        """Parse Spark's options.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing, or contradicts another.
        """
        table = _Table(options, _READ_KEYS, other_keys=_WRITE_KEYS, other="writing")
        selection = _parse_selection(table)
        start = _parse_bound(table, _STARTS)
        end = _parse_bound(table, _ENDS)
        if mode is Mode.STREAM:
            table.refuse(_ENDS, "a stream has no end; it is for batch reads")
            start, end = start or Edge.LATEST, None
        else:
            start, end = start or Edge.EARLIEST, end or Edge.LATEST
        if mode is Mode.BATCH:
            _refuse_edge(start, "startingOffsets", Edge.LATEST, "a batch would always be empty")
        if end is not None:
            _refuse_edge(end, "endingOffsets", Edge.EARLIEST, "a batch would always be empty")
            _check_order(start, end)
        for key, bound in (("startingOffsets", start), ("endingOffsets", end)):
            _check_logs_named(key, bound, selection)
        return cls(
            address=_parse_address(table),
            logs=selection,
            start=start,
            end=end,
            fail_on_data_loss=table.parse("failOnDataLoss", _parse_boolean, default=True),
            min_partitions=table.parse("minPartitions", _parse_positive, default=None),
            max_records_per_partition=table.parse(
                "maxRecordsPerPartition", _parse_positive, default=None
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """A user's own identity of a batch write."""

    app_id: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Where to write; `log` is None when the data has a column ``log``."""

    address: Address
    log: str | None
    transaction: Transaction | None
    lock_timeout_s: float | None = None
    """None for what the namespace's configuration says."""

    @classmethod
    def parse(cls, options: Mapping[str, str], mode: Mode) -> WriteOptions:
        """Parse Spark's options.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing, or contradicts another.
        """
        table = _Table(options, _WRITE_KEYS, other_keys=_READ_KEYS, other="reading")
        if mode is Mode.STREAM:
            table.refuse(
                ("txnAppId", "txnVersion"),
                "a stream is identified by its query id and batch id; it is for batch writes",
            )
        return cls(
            address=_parse_address(table),
            log=None if table.get("log") is None else table.parse("log", _parse_log, default=""),
            transaction=_parse_transaction(table),
            lock_timeout_s=table.parse("lockTimeoutMs", _parse_milliseconds, default=None),
        )


class _Table:
    """Options by their canonical key; refuses unknown ones when built."""

    def __init__(
        self,
        options: Mapping[str, str],
        keys: tuple[str, ...],
        *,
        other_keys: tuple[str, ...],
        other: str,
    ) -> None:
        canonical = {key.lower(): key for key in keys}
        elsewhere = {key.lower() for key in other_keys}
        self._values: dict[str, str] = {}
        for given, value in options.items():
            lowered = given.lower()
            if lowered in canonical:
                self._values[canonical[lowered]] = value
            elif lowered == "path":
                raise ConfigurationError(
                    f"a dlog source has no path, not {value!r}: name the log with "
                    f'.option("log", {value!r}) and call load(), save() or start() without argument'
                )
            elif lowered not in _ADDED_BY_SPARK:
                raise ConfigurationError(
                    _describe_unknown(given, value, keys, other if lowered in elsewhere else None)
                )

    def get(self, key: str) -> str | None:
        """Return the text of an option."""
        return self._values.get(key)

    def parse(self, key: str, parser: Callable[[str, str], _T], *, default: _T) -> _T:
        """Return an option's parsed value, or `default` when it is not given."""
        text = self._values.get(key)
        return default if text is None else parser(key, text)

    def given(self, keys: tuple[str, ...]) -> list[str]:
        """Return those of `keys` that are given."""
        return [key for key in keys if key in self._values]

    def refuse(self, keys: tuple[str, ...], why: str) -> None:
        """Raise if any of `keys` is given."""
        for key in self.given(keys):
            raise ConfigurationError(
                f"option {key}={self._values[key]!r} is not allowed here: {why}"
            )


def _describe_unknown(given: str, value: str, keys: tuple[str, ...], other: str | None) -> str:
    if other is not None:
        return f"option {given}={value!r} is for {other}, not allowed here; expected {_join(keys)}"
    lowered = {key.lower(): key for key in keys}
    close = difflib.get_close_matches(given.lower(), lowered, n=1)
    advice = f"did you mean {lowered[close[0]]}?" if close else f"expected {_join(keys)}"
    return f"unknown option {given}={value!r}: {advice}"


def _join(keys: tuple[str, ...]) -> str:
    return f"{', '.join(keys[:-1])} or {keys[-1]}"


def _parse_address(table: _Table) -> Address:
    files = {key: table.get(key) for key in _TLS_KEYS}
    ca, cert, key = (text or "" for text in files.values())
    try:
        tls = TlsFiles.of(ca=ca, cert=cert, key=key)
    except ConfigurationError as error:
        given = ", ".join(f"{key}={text!r}" for key, text in files.items() if text is not None)
        raise ConfigurationError(f"options {given}: {error}") from error
    return Address(uri=_parse_uri(table), tls=tls)


def _parse_uri(table: _Table) -> str:
    uri = table.get("uri")
    if uri is None:
        raise ConfigurationError(f"option uri is missing: {_URI_RULE}")
    if not re.match(r"distributedlog(-bk)?://[^/]+/.", uri.strip(), re.IGNORECASE):
        raise ConfigurationError(f"option uri={uri!r}: {_URI_RULE}")
    return uri.strip()


def _parse_selection(table: _Table) -> LogSelection:
    given = table.given(_SELECTORS)
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise ConfigurationError(
            f"expected exactly one of the options {_join(_SELECTORS)}: {found}"
        )
    single: tuple[str, ...] = table.parse("log", lambda *text: (_parse_log(*text),), default=())
    return LogSelection(
        names=single or table.parse("logs", _parse_names, default=()),
        pattern=table.parse("logsPattern", _parse_pattern, default=None),
    )


def _parse_log(key: str, text: str) -> str:
    try:
        return validate_log_name(text.strip())
    except ConfigurationError as error:
        raise ConfigurationError(f"option {key}={text!r}: {error}") from error


def _parse_names(key: str, text: str) -> tuple[str, ...]:
    names = [_parse_log(key, part) for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigurationError(f"option {key}={text!r} names no log: expected clicks,views")
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"option {key}={text!r} names the log {name!r} twice")
    return tuple(names)


def _parse_pattern(key: str, text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"option {key}={text!r} is not a regular expression: {error}"
        ) from error
    if not text:
        raise ConfigurationError(f"option {key}='' matches no log: expected a regular expression")
    return text


def _parse_bound(table: _Table, keys: tuple[str, ...]) -> Bound | None:
    given = table.given(keys)
    if len(given) > 1:
        raise ConfigurationError(
            f"expected at most one of the options {_join(keys)}: {' and '.join(given)} are given"
        )
    if not given:
        return None
    offsets, txid, timestamp = keys
    parsers: dict[str, Callable[[str, str], Bound]] = {
        offsets: parse_offsets,
        txid: parse_txid,
        timestamp: parse_timestamp,
    }
    return parsers[given[0]](given[0], table.get(given[0]) or "")


def _refuse_edge(bound: Bound, key: str, edge: Edge, why: str) -> None:
    positions = bound.positions if isinstance(bound, PositionsByLog) else {"": bound}
    for log, position in positions.items():
        if position is edge:
            where = f" for log {log!r}" if log else ""
            raise ConfigurationError(f"option {key}={edge.value!r}{where} is not allowed: {why}")


def _check_order(start: Bound, end: Bound) -> None:
    if isinstance(start, PositionsByLog) and isinstance(end, PositionsByLog):
        for log in start.positions.keys() & end.positions.keys():
            _check_pair(f" of log {log!r}", start.positions[log], end.positions[log])
    else:
        _check_pair("", start, end)


def _check_pair(where: str, start: Bound, end: Bound) -> None:
    match start, end:
        case DLSN() as first, DLSN() as last:
            is_reversed = first > last
        case (TxidBound(low), TxidBound(high)) | (TimestampBound(low), TimestampBound(high)):
            is_reversed = low > high
        case _:
            is_reversed = False
    if is_reversed:
        raise ConfigurationError(f"the read{where} would end at {end} before it starts at {start}")


def _check_logs_named(key: str, bound: Bound | None, selection: LogSelection) -> None:
    if not isinstance(bound, PositionsByLog):
        return
    for log in bound.positions:
        if not selection.matches(log):
            raise ConfigurationError(f"option {key} names the log {log!r}, which is not selected")
    for log in selection.names:
        if log not in bound.positions:
            raise ConfigurationError(f"option {key} names no position for the selected log {log!r}")


def _parse_boolean(key: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ConfigurationError(f"option {key}={text!r}: expected true or false")
    return word == "true"


def _parse_positive(key: str, text: str) -> int | None:
    return parse_integer(key, text, minimum=1)


def _parse_milliseconds(key: str, text: str) -> float | None:
    return parse_integer(key, text, minimum=0) / 1000


def _parse_transaction(table: _Table) -> Transaction | None:
    app_id, version = table.get("txnAppId"), table.get("txnVersion")
    if app_id is None and version is None:
        return None
    if app_id is None or version is None:
        missing = "txnAppId" if app_id is None else "txnVersion"
        raise ConfigurationError(
            f"options txnAppId and txnVersion go together: {missing} is missing"
        )
    if not app_id.strip() or len(app_id.encode()) > _APP_ID_BYTES_MAX:
        raise ConfigurationError(
            f"option txnAppId={app_id!r}: expected 1 … {_APP_ID_BYTES_MAX} bytes of text"
        )
    return Transaction(app_id=app_id, version=parse_integer("txnVersion", version, minimum=0))
