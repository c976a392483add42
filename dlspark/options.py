"""The options of ``format("dlog")``, parsed into frozen values; every check is here.

`dlspark.option_table` lists them.
"""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.zookeeper import ZK_KEYS, ZooKeeperAccess
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, validate_log_name
from dlspark.keeping import parse_subscription
from dlspark.limits import DELAY_S_MAX, Limits
from dlspark.option_table import (
    CATALOG_ADVICE,
    CATALOG_PREFIX,
    KAFKA_NAMES,
    KAFKA_ONLY,
    OPTIONS,
    PARTITION_BYTES_MAX,
    Use,
    names_for,
)
from dlspark.positions import (
    Bound,
    Bounds,
    Edge,
    PositionsByLog,
    TimestampBound,
    TxidBound,
    parse_duration,
    parse_integer,
    parse_lifetime,
    parse_offsets,
    parse_size,
    parse_timestamp,
    parse_timestamps,
    parse_txid,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlspark.arrow import RowShape

_SELECTORS = ("log", "logs", "logsPattern")
_BOUNDS: dict[str, Callable[[str, str], Bound]] = {
    "Timestamp": parse_timestamp,
    "OffsetsByTimestamp": parse_timestamps,
    "Txid": parse_txid,
    "Offsets": parse_offsets,
}
"""Parsers of the options that set where a read starts or ends, in order of priority."""
_ENDS = tuple(f"ending{key}" for key in _BOUNDS)
_STRATEGY = "startingOffsetsByTimestampStrategy"
_OF_STREAMS = tuple(option.name for option in OPTIONS if option.uses == (Use.STREAM_READ,))
_TLS_KEYS = ("tlsCa", "tlsCert", "tlsKey")
_ZK_KEYS = ("zkTlsCa", "zkTlsCert", "zkTlsKey", "zkAuthFile")
_ADDED_BY_SPARK = frozenset({"checkpointlocation", "queryname"})  # streaming sinks get these
_CATALOG_KEY = "provider"  # a property of every table in Spark's catalog
_WORDS = {
    Use.BATCH_WRITE: "writing",
    Use.STREAM_WRITE: "writing",
    Use.METADATA: "tables about the system",
}
READ_COLUMNS = ("log", "dlsn", "txid", "sequence_id", "timestamp", "value")
"""The columns of a byte log's records."""
_ENDPOINT_RULE = "expected grpc://host:port[,host:port], or with TLS grpc+tls://…"
_URI_RULE = "expected distributedlog://host:port[,host:port]/path"
_APP_ID_BYTES_MAX = 128
_T = TypeVar("_T")


class Mode(enum.Enum):
    """The use of a set of options; `LOAD` is used before Spark has chosen batch or stream."""

    LOAD = "a read"
    BATCH = "a batch"
    STREAM = "a stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Location of a namespace, and files for its connections; pickled with the paths only."""

    uri: str
    """A namespace, or an endpoint of proxies."""
    tls: TlsFiles | None = None
    token_file: str | None = None
    """The path of a file, on every host, with the token for proxies."""
    zookeeper: ZooKeeperAccess | None = None
    encryption_keys: str | None = None
    capabilities_s: int | None = None
    """Seconds for which capabilities of partitions are valid; None: none are used."""

    def __str__(self) -> str:
        return self.uri


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """The logs to read: names, or a pattern for whole names."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    def matches(self, log: str) -> bool:
        """Whether `log` is selected."""
        return log in self.names if self.pattern is None else bool(re.fullmatch(self.pattern, log))

    def __str__(self) -> str:
        if self.pattern is not None:
            return f"logsPattern={self.pattern!r}"
        return f"{'logs' if len(self.names) > 1 else 'log'}={','.join(self.names)!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Wanted division of a read into partitions; None for no preference."""

    min_partitions: int | None = None
    max_records: int | None = None
    max_bytes: int = PARTITION_BYTES_MAX


class MetadataTable(enum.Enum):
    """Tables that the option `metadata` reads."""

    LOGS = "logs"
    SEGMENTS = "segments"
    EXTENTS = "extents"
    LEDGERS = "ledgers"
    BOOKIES = "bookies"
    COMMITS = "commits"


_TABLES_OF_LOGS = (MetadataTable.LOGS, MetadataTable.SEGMENTS, MetadataTable.EXTENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataOptions:
    """The table about the system to read, and its logs; `logs` is None for all."""

    address: Address
    table: MetadataTable
    logs: LogSelection | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> MetadataOptions | None:
        """Parse Spark's options; return None if they read records.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing, or contradicts another.
        """
        names = {key.lower().removeprefix(CATALOG_PREFIX) for key in options}
        if "metadata" not in names:
            return None
        _refuse_endpoint(options, "what stands in ZooKeeper is read with the option uri")
        table = _Table(options, Use.METADATA)
        which = table.parse("metadata", _parse_table, default=MetadataTable.LOGS)
        if which not in _TABLES_OF_LOGS:
            table.refuse(_SELECTORS, f"the table {which.value} is of the whole namespace")
        return cls(
            address=_parse_address(table),
            table=which,
            logs=_parse_selection(table) if table.given(_SELECTORS) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The records to read."""

    address: Address
    logs: LogSelection
    columns: tuple[str, ...] | None
    """None for all columns of the logs."""
    include_metadata: bool
    bounds: Bounds
    fail_on_data_loss: bool
    limits: Limits
    division: Division
    subscription: str | None
    """The subscriber of a stream; None for one that is made."""
    shape: RowShape | None = None
    """Shape of the rows of typed logs, once it is known; None for byte logs."""

    @property
    def byte_columns(self) -> tuple[str, ...]:
        """The columns to read of byte logs.  Raises: ConfigurationError: they have no such one."""
        columns = self.columns or READ_COLUMNS
        for name in columns:
            if name not in READ_COLUMNS:
                raise ConfigurationError(
                    f"option columns={','.join(columns)!r}: a log of bytes has no column {name!r}, "
                    f"expected some of {', '.join(READ_COLUMNS)}"
                )
        return columns

    @classmethod
    def parse(cls, options: Mapping[str, str], mode: Mode) -> ReadOptions:
        """Parse Spark's options.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing, or contradicts another.
        """
        table = _Table(options, Use.BATCH_READ, Use.STREAM_READ)
        address = _parse_address(table)
        selection = _parse_selection(table)
        start = _parse_bound(table, "starting", selection)
        end = _parse_bound(table, "ending", selection)
        is_stream = mode is Mode.STREAM
        if is_stream:
            table.refuse(_ENDS, "a stream has no end; it is for batch reads")
            start, end = start or Edge.LATEST, None
        else:
            start, end = start or Edge.EARLIEST, end or Edge.LATEST
        if mode is Mode.BATCH:
            table.refuse(_OF_STREAMS, "a batch reads all there is; it is for streams")
            _refuse_edge(start, "startingOffsets", Edge.LATEST, "a batch would always be empty")
        if end is not None:
            _refuse_edge(end, "endingOffsets", Edge.EARLIEST, "a batch would always be empty")
            _check_order(start, end)
        return cls(
            address=address,
            logs=selection,
            columns=table.parse("columns", _parse_columns, default=None),
            include_metadata=table.parse("includeMetadata", _parse_boolean, default=False),
            bounds=Bounds(
                start=start,
                must_reach_start=table.parse(_STRATEGY, _parse_strategy, default=is_stream),
                end=end,
            ),
            fail_on_data_loss=table.parse("failOnDataLoss", _parse_boolean, default=True),
            limits=_parse_limits(table),
            division=_parse_division(table),
            subscription=table.parse("subscription", parse_subscription, default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """A user's own identity of a batch write."""

    app_id: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The target of a write; `log` is None if the data has a column ``log``."""

    address: Address
    log: str | None
    transaction: Transaction | None
    create_log: bool = False
    typed: bool | None = None
    """Whether the log is typed, or is to be created as such; None: the log or the columns decide.
    """
    merge_schema: bool = False
    lock_timeout_s: float | None = None
    """None for the value of the namespace's configuration."""

    @classmethod
    def parse(cls, options: Mapping[str, str], mode: Mode) -> WriteOptions:
        """Parse Spark's options.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing, or contradicts another.
        """
        table = _Table(options, Use.BATCH_WRITE, Use.STREAM_WRITE)
        if mode is Mode.STREAM:
            table.refuse(
                ("txnAppId", "txnVersion"),
                "a stream is identified by its query id and batch id; it is for batch writes",
            )
        return cls(
            address=_parse_address(table),
            log=None if table.get("log") is None else table.parse("log", _parse_log, default=""),
            transaction=_parse_transaction(table),
            create_log=table.parse("createLog", _parse_boolean, default=False),
            typed=table.parse("typed", _parse_boolean, default=None),
            merge_schema=table.parse("mergeSchema", _parse_boolean, default=False),
            lock_timeout_s=table.parse("lockTimeoutMs", _parse_milliseconds, default=None),
        )


class _Table:
    """Options by their canonical key; refuses unknown ones when built.

    A table of Spark's catalog passes its options with the prefix ``option.``.  Its other properties
    are ignored.  Options of a single read or write take precedence.  The table has one set of
    options for reading and writing, so those for the other use are ignored.
    """

    def __init__(self, options: Mapping[str, str], *uses: Use) -> None:
        self._values: dict[str, str] = {}
        keys = names_for(*uses)
        canonical = {key.lower(): key for key in keys}
        everywhere = {option.name.lower() for option in OPTIONS}
        given = {key.lower(): value for key, value in options.items()}
        of_catalog = {
            key.removeprefix(CATALOG_PREFIX): value
            for key, value in given.items()
            if key.startswith(CATALOG_PREFIX)
        }
        if of_catalog or _CATALOG_KEY in given:
            known = {key: value for key, value in given.items() if key in everywhere}
            options = {**of_catalog, **known}
            canonical |= dict.fromkeys(everywhere - canonical.keys(), "")
        for key, value in options.items():
            name = canonical.get(key.lower())
            if name:
                self._values[name] = value
            elif key.lower() == "path":
                raise ConfigurationError(
                    f"a dlog source has no path, not {value!r}: name the log with "
                    f'.option("log", {value!r}) and call load(), save() or start() without argument'
                )
            elif name is None and key.lower() not in _ADDED_BY_SPARK:
                raise ConfigurationError(_describe_unknown(key, value, keys))

    def get(self, key: str) -> str | None:
        """Return the text of an option, None if it is not given."""
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


def _describe_unknown(given: str, value: str, keys: tuple[str, ...]) -> str:
    lowered = given.lower()
    for option in OPTIONS:
        if option.name.lower() == lowered:
            words = (_WORDS.get(use, "reading records") for use in option.uses)
            uses = " and ".join(dict.fromkeys(words))
            return (
                f"option {given}={value!r} is for {uses}, not allowed here; expected {_join(keys)}"
            )
    for name, ours in KAFKA_NAMES.items():
        if name.lower() == lowered:
            return f"option {given}={value!r} is one of Kafka's source: use {ours}"
    reasons = {name.lower(): why for name, why in KAFKA_ONLY.items()}
    if lowered in reasons or lowered.startswith("kafka."):
        reason = reasons.get(lowered, "no option goes on to a Kafka client")
        return f"option {given}={value!r} is one of Kafka's source: {reason}; leave it out"
    candidates = {key.lower(): key for key in keys}
    close = difflib.get_close_matches(lowered, candidates, n=1)
    advice = f"did you mean {candidates[close[0]]}?" if close else f"expected {_join(keys)}"
    return f"unknown option {given}={value!r}: {advice}"


def _join(keys: tuple[str, ...]) -> str:
    return f"{', '.join(keys[:-1])} or {keys[-1]}"


def _parse_address(table: _Table) -> Address:
    files = {key: table.get(key) for key in (*_TLS_KEYS, *_ZK_KEYS)}
    ca, cert, key, *of_zookeeper = (text or "" for text in files.values())
    try:
        tls = TlsFiles.of(ca=ca, cert=cert, key=key)
        zookeeper = ZooKeeperAccess.of(dict(zip(ZK_KEYS, of_zookeeper, strict=True)))
    except ConfigurationError as error:
        given = ", ".join(f"{key}={text!r}" for key, text in files.items() if text is not None)
        raise ConfigurationError(f"options {given}: {error}") from error
    token_file = table.get("tokenFile")
    if table.get("endpoint") is not None:
        table.refuse(("capabilities", "encryptionKeys"), "for bookies, which the proxies read")
    elif token_file is not None:
        raise ConfigurationError(f"option tokenFile={token_file!r}: expected endpoint as well")
    return Address(
        uri=_parse_uri(table),
        tls=tls,
        token_file=token_file,
        zookeeper=zookeeper if any(of_zookeeper) else None,
        encryption_keys=table.get("encryptionKeys"),
        capabilities_s=table.parse("capabilities", parse_lifetime, default=None),
    )


def _refuse_endpoint(options: Mapping[str, str], why: str) -> None:
    for key, value in options.items():
        if key.lower() == "endpoint":
            raise ConfigurationError(f"option endpoint={value!r} is not allowed here: {why}")


def _parse_uri(table: _Table) -> str:
    uri, endpoint = table.get("uri"), table.get("endpoint")
    if endpoint is not None:
        if uri is not None:
            raise ConfigurationError(
                f"options uri={uri!r} and endpoint={endpoint!r}: expected exactly one of them"
            )
        if re.match(r"grpc(\+tls)?://[^/]+$", endpoint.strip()) is None:
            raise ConfigurationError(f"option endpoint={endpoint!r}: {_ENDPOINT_RULE}")
        return endpoint.strip()
    if uri is None:
        raise ConfigurationError(
            f"option uri is missing: {_URI_RULE}; or, to reach it through proxies alone, endpoint. "
            f"{CATALOG_ADVICE}"
        )
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
    except (re.error, OverflowError, RecursionError) as error:  # too large, or nested too deep
        raise ConfigurationError(
            f"option {key}={text!r} is not a regular expression: {error}"
        ) from error
    if not text:
        raise ConfigurationError(f"option {key}='' matches no log: expected a regular expression")
    return text


def _parse_bound(table: _Table, word: str, selection: LogSelection) -> Bound | None:
    """Return the value of the first option in order of priority; the others are checked too."""
    bounds = [
        (word + key, parser(word + key, text))
        for key, parser in _BOUNDS.items()
        if (text := table.get(word + key)) is not None
    ]
    for key, bound in bounds:
        _check_logs_named(key, bound, selection)
    return bounds[0][1] if bounds else None


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


def _check_logs_named(key: str, bound: Bound, selection: LogSelection) -> None:
    if not isinstance(bound, PositionsByLog):
        return
    for log in bound.positions:
        if not selection.matches(log):
            raise ConfigurationError(f"option {key} names the log {log!r}, which is not selected")
    for log in selection.names:
        if log not in bound.positions:
            raise ConfigurationError(f"option {key} names no position for the selected log {log!r}")


def _parse_boolean(key: str, text: str, words: tuple[str, str] = ("true", "false")) -> bool:
    word = text.strip().lower()
    if word not in words:
        raise ConfigurationError(f"option {key}={text!r}: expected {_join(words)}")
    return word == words[0]


def _parse_positive(key: str, text: str) -> int | None:
    return parse_integer(key, text, minimum=1)


def _parse_limits(table: _Table) -> Limits:
    limits = Limits(
        max_records=table.parse("maxRecordsPerTrigger", _parse_positive, default=None),
        max_bytes=table.parse("maxBytesPerTrigger", parse_size, default=None),
        min_records=table.parse("minRecordsPerTrigger", _parse_positive, default=None),
        max_delay_s=table.parse("maxTriggerDelay", parse_duration, default=DELAY_S_MAX),
    )
    if limits.min_records is not None and limits.min_records > (limits.max_records or 2**63):
        raise ConfigurationError(
            f"option minRecordsPerTrigger={limits.min_records} is above "
            f"maxRecordsPerTrigger={limits.max_records}: expected at most that"
        )
    if table.given(("maxTriggerDelay",)) and limits.min_records is None:
        raise ConfigurationError(
            f"option maxTriggerDelay={table.get('maxTriggerDelay')!r} limits the wait of "
            "minRecordsPerTrigger: give that option as well, or leave this one out"
        )
    return limits


def _parse_division(table: _Table) -> Division:
    return Division(
        min_partitions=table.parse("minPartitions", _parse_positive, default=None),
        max_records=table.parse("maxRecordsPerPartition", _parse_positive, default=None),
        max_bytes=table.parse("maxBytesPerPartition", parse_size, default=PARTITION_BYTES_MAX),
    )


def _parse_columns(key: str, text: str) -> tuple[str, ...] | None:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"option {key}={text!r} names the column {name!r} twice")
    if not names:
        raise ConfigurationError(
            f"option {key}={text!r} names no column: expected some of the log's, of a log of bytes "
            f"{', '.join(READ_COLUMNS)}"
        )
    return names


def _parse_strategy(key: str, text: str) -> bool:
    return _parse_boolean(key, text, ("error", "latest"))


def _parse_table(key: str, text: str) -> MetadataTable:
    word = text.strip().lower()
    for table in MetadataTable:
        if word == table.value:
            return table
    names = tuple(table.value for table in MetadataTable)
    raise ConfigurationError(f"option {key}={text!r}: expected {_join(names)}")


def _parse_milliseconds(key: str, text: str) -> float | None:
    return parse_integer(key, text, minimum=0) / 1000


def _parse_transaction(table: _Table) -> Transaction | None:
    app_id, version = table.get("txnAppId"), table.get("txnVersion")
    if app_id is None and version is None:
        return None
    if app_id is None or version is None:
        missing = "txnAppId" if app_id is None else "txnVersion"
        raise ConfigurationError(f"txnAppId and txnVersion go together: {missing} is missing")
    if not app_id.strip() or len(app_id.encode()) > _APP_ID_BYTES_MAX:
        raise ConfigurationError(
            f"option txnAppId={app_id!r}: expected 1 … {_APP_ID_BYTES_MAX} bytes of text"
        )
    return Transaction(app_id=app_id, version=parse_integer("txnVersion", version, minimum=0))
