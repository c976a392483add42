"""The options of ``format("dlog")``, one row each: for parsing, and for the pages on Spark.

A row states the uses of an option, so that an option in a wrong place is refused by name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dlspark.limits import DELAY_S_MAX

PARTITION_BYTES_MAX = 128 * 1024 * 1024
"""Default of `maxBytesPerPartition`: the size of Spark's partitions of files."""
CATALOG_PREFIX = "option."
"""Catalogs store the options of a table once more under names with this prefix."""


class Use(enum.Enum):
    """The use of an option."""

    BATCH_READ = "batch read"
    STREAM_READ = "stream read"
    BATCH_WRITE = "batch write"
    STREAM_WRITE = "stream write"
    METADATA = "metadata read"


_READS = (Use.BATCH_READ, Use.STREAM_READ)
_BATCH_READ = (Use.BATCH_READ,)
_STREAM_READ = (Use.STREAM_READ,)
_BATCH_WRITE = (Use.BATCH_WRITE,)
_WRITES = (Use.BATCH_WRITE, Use.STREAM_WRITE)
_SELECTS = (*_READS, Use.METADATA)
_ALL = tuple(Use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option; the texts are Markdown."""

    name: str
    uses: tuple[Use, ...]
    values: str
    default: str
    meaning: str


OPTIONS = (
    Option(
        name="uri",
        uses=_ALL,
        values="`distributedlog://host:port[,host:port]/path`",
        default="required",
        meaning="The namespace; or give `endpoint`.",
    ),
    Option(
        name="endpoint",
        uses=(*_READS, *_WRITES),
        values="`grpc://host:port[,host:port]`, with TLS `grpc+tls://…`",
        default="",
        meaning="Proxies to read and write through, in place of `uri`: then neither the driver nor "
        "executors need a way to ZooKeeper or bookies. `metadata` needs `uri`.",
    ),
    Option(
        name="log",
        uses=_ALL,
        values="a name",
        default="",
        meaning="The log to read or to write. A write without it needs a column `log`, to "
        "typed logs `_log`.",
    ),
    Option(
        name="logs",
        uses=_SELECTS,
        values="`clicks,views`",
        default="",
        meaning="A list of logs to read; in place of `log`.",
    ),
    Option(
        name="logsPattern",
        uses=_SELECTS,
        values="a regular expression",
        default="",
        meaning="Logs whose whole name matches; in place of `log`. A stream finds new ones while "
        "it runs, and reads them from their beginning; one that is renamed to another name that "
        "matches goes on at its position.",
    ),
    Option(
        name="metadata",
        uses=(Use.METADATA,),
        values="`logs`, `segments`, `extents`, `ledgers`, `bookies` or `commits`",
        default="",
        meaning="Read a [table about the system](spark-sql.md#tables-about-the-system) instead of "
        "records. `log`, `logs` and `logsPattern` choose the logs of the first three; a log that "
        "is named and does not exist is an error.",
    ),
    Option(
        name="columns",
        uses=_READS,
        values="`txid,value`",
        default="all six; of typed logs their own",
        meaning="The columns to read, in this order. Others are neither decompressed nor made. "
        "With `log` and `sequence_id` alone (of typed logs `_log` and `_sequence_id`) "
        "tasks read nothing from bookies, and planning reads two entries of an open segment.",
    ),
    Option(
        name="includeMetadata",
        uses=_READS,
        values="`true` or `false`",
        default="`false`",
        meaning="For typed logs: add the columns `_log`, `_dlsn`, `_txid`, `_sequence_id` and "
        "`_timestamp` to their own, or to those that `columns` names.",
    ),
    Option(
        name="startingTimestamp",
        uses=_READS,
        values="epoch milliseconds or ISO-8601, UTC unless it says otherwise",
        default="",
        meaning="Start at the first record that is not older. If several options say where to "
        "start, the first of them in this table counts, as in Kafka's source. With a checkpoint "
        "none of them counts.",
    ),
    Option(
        name="startingOffsetsByTimestamp",
        uses=_READS,
        values='`{"clicks": 1714564800000}`, or times in ISO-8601',
        default="",
        meaning="The same by log.",
    ),
    Option(
        name="startingTxid",
        uses=_READS,
        values="an integer ≥ 0",
        default="",
        meaning="Start at the first record whose transaction id is not lower.",
    ),
    Option(
        name="startingOffsets",
        uses=_READS,
        values='`earliest`, `latest`, a DLSN, or JSON by log: `{"clicks": "3:17:0"}`',
        default="batch `earliest`, stream `latest`",
        meaning="Start at this position, inclusive. A batch cannot start at `latest`.",
    ),
    Option(
        name="startingOffsetsByTimestampStrategy",
        uses=_READS,
        values="`error` or `latest`",
        default="batch `latest`, stream `error`",
        meaning="The behavior if a log has no record yet that is as new as `startingTimestamp`, "
        "`startingOffsetsByTimestamp` or `startingTxid` asks: fail, or start at its end, where a "
        "batch is empty.",
    ),
    Option(
        name="endingTimestamp",
        uses=_BATCH_READ,
        values="as `startingTimestamp`",
        default="",
        meaning="End before the first record that is not older. If several options say where to "
        "end, the first of them in this table counts.",
    ),
    Option(
        name="endingOffsetsByTimestamp",
        uses=_BATCH_READ,
        values="as `startingOffsetsByTimestamp`",
        default="",
        meaning="The same by log.",
    ),
    Option(
        name="endingTxid",
        uses=_BATCH_READ,
        values="an integer ≥ 0",
        default="",
        meaning="End before the first record whose transaction id is not lower.",
    ),
    Option(
        name="endingOffsets",
        uses=_BATCH_READ,
        values="as `startingOffsets`",
        default="`latest`",
        meaning="End before this position. A batch cannot end at `earliest`.",
    ),
    Option(
        name="failOnDataLoss",
        uses=_READS,
        values="`true` or `false`",
        default="`true`",
        meaning="Whether a read fails for records that were truncated, or deleted with their log, "
        "before they were read. A stream also fails for a log of its checkpoint that its options "
        "do not select. With `false` the read goes on with the records that are there, reads none "
        "twice, and reports how many it skipped.",
    ),
    Option(
        name="maxRecordsPerTrigger",
        uses=_STREAM_READ,
        values="an integer ≥ 1",
        default="no limit",
        meaning="The most records of a micro-batch, exactly. If more logs than that have new "
        "records, the batch has one of each. Logs share the limit fairly: none takes more than "
        "another that still has records.",
    ),
    Option(
        name="maxBytesPerTrigger",
        uses=_STREAM_READ,
        values="bytes, or `512k`, `64m`, `2g`",
        default="no limit",
        meaning="About the most bytes of a micro-batch. Logs share them in the same way. A "
        "larger record is a batch of its own.",
    ),
    Option(
        name="minRecordsPerTrigger",
        uses=_STREAM_READ,
        values="an integer ≥ 1",
        default="none",
        meaning="Wait for so many records before the next micro-batch. The first batch of a run "
        "does not wait, and no batch with `Trigger.AvailableNow` or `Trigger.Once` does.",
    ),
    Option(
        name="maxTriggerDelay",
        uses=_STREAM_READ,
        values="`90s`, `15m`, `1h`",
        default=f"`{DELAY_S_MAX / 60:.0f}m`",
        meaning="The longest that `minRecordsPerTrigger` waits.",
    ),
    Option(
        name="subscription",
        uses=_STREAM_READ,
        values="a name, or `none`",
        default="`spark:` and an id in the checkpoint",
        meaning="The subscriber for whom the logs keep the query's position, so that "
        "`dlog log lag`, `dlog log subscriptions` and `dlog log truncate --read` know it "
        "([how far a query is](spark-watch.md#without-spark)).",
    ),
    Option(
        name="minPartitions",
        uses=_READS,
        values="an integer ≥ 1",
        default="",
        meaning="Split partitions, the largest first, until there are so many, or one for each "
        "entry. Without it there is one for each segment, and small ones are joined where there "
        "are many.",
    ),
    Option(
        name="maxRecordsPerPartition",
        uses=_READS,
        values="an integer ≥ 1",
        default="no limit",
        meaning="About the most records of a partition; it holds at least one entry.",
    ),
    Option(
        name="maxBytesPerPartition",
        uses=_READS,
        values="bytes, or `512k`, `64m`, `2g`",
        default=f"`{PARTITION_BYTES_MAX // 1024**2}m`",
        meaning="About the most bytes of a partition; it holds at least one entry.",
    ),
    Option(
        name="createLog",
        uses=_WRITES,
        values="`true` or `false`",
        default="`false`",
        meaning="Whether to create a log that does not exist, with the namespace's defaults.",
    ),
    Option(
        name="typed",
        uses=_WRITES,
        values="`true` or `false`",
        default="whether the DataFrame has no column `value`",
        meaning="With `createLog`: whether the log that is created is typed, with the DataFrame's "
        "columns. A log that exists must be of this kind.",
    ),
    Option(
        name="mergeSchema",
        uses=_WRITES,
        values="`true` or `false`",
        default="`false`",
        meaning="Whether a write first adds missing columns to the typed log, and widens types "
        "that are too narrow. It needs `log`. It does not change which columns can be null.",
    ),
    Option(
        name="txnAppId",
        uses=_BATCH_WRITE,
        values="1 to 128 bytes",
        default="",
        meaning="With `txnVersion`: a write whose version is not above the last that this "
        "application committed to the log is skipped. Versions belong to the id of the log: a "
        "renamed log keeps them, and a log that is created again has none. Writes without the "
        "option `log` count together, whichever logs their rows choose.",
    ),
    Option(
        name="txnVersion",
        uses=_BATCH_WRITE,
        values="an integer ≥ 0",
        default="",
        meaning="See `txnAppId`.",
    ),
    Option(
        name="lockTimeoutMs",
        uses=_WRITES,
        values="an integer ≥ 0",
        default="`20000`",
        meaning="How long a write waits for a writer that holds one of its logs; 0: not at all.",
    ),
    Option(
        name="tlsCa",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="Use TLS to bookies, or to proxies at `grpc+tls://…`, and trust these "
        "certificates.",
    ),
    Option(
        name="tlsCert",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="The client's certificate, where the servers ask for one.",
    ),
    Option(
        name="tlsKey",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="Its key.",
    ),
    Option(
        name="tokenFile",
        uses=(*_READS, *_WRITES),
        values="a file on every host",
        default="",
        meaning="With `endpoint`: send the token in this file to the proxies. The file is read "
        "again before the token expires ([users](access.md#expiry)).",
    ),
    Option(
        name="zkTlsCa",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="Use TLS to ZooKeeper, and trust these certificates.",
    ),
    Option(
        name="zkTlsCert",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="The client's certificate, where ZooKeeper asks for one.",
    ),
    Option(
        name="zkTlsKey",
        uses=_ALL,
        values="a PEM file on every host",
        default="",
        meaning="Its key.",
    ),
    Option(
        name="zkAuthFile",
        uses=_ALL,
        values="a file on every host",
        default="",
        meaning="The user of ZooKeeper to whom the namespace's nodes belong, as a line "
        "`user:password`.",
    ),
    Option(
        name="encryptionKeys",
        uses=_ALL,
        values="a file on every host, or `command:…`",
        default="",
        meaning="With `uri`: the keys of encrypted logs. Plans have the path only; the file is "
        "read by the driver and by executors "
        "([encryption](encryption.md)).",
    ),
    Option(
        name="capabilities",
        uses=_ALL,
        values="a time such as `1h`, at most `24h`",
        default="none are used",
        meaning="With `uri`: present capabilities to bookies in place of a certificate. Planning "
        "signs one for each partition, to read only this partition. It is valid for this time, "
        "which must be longer than the read takes. The driver, and tasks that write, must be "
        "allowed to read the cluster's keys in ZooKeeper; tasks that read need not "
        "([capabilities](capabilities.md)).",
    ),
)

CATALOG_ADVICE = (
    "If this is a table of Spark's catalog: Spark drops its options on the way to a Python source. "
    "A table that was created without columns of its own, and not by saveAsTable, can be read, and "
    "none inserted into: insert into a temporary view (CREATE TEMPORARY VIEW v USING dlog OPTIONS "
    "(uri '…', log '…')), or write a DataFrame"
)
KAFKA_NAMES = {
    "kafka.bootstrap.servers": "uri",
    "subscribe": "log or logs",
    "subscribePattern": "logsPattern",
    "assign": "logs",
    "to" + "pic": "log",  # The word has another meaning here, and is not used.
    "maxOffsetsPerTrigger": "maxRecordsPerTrigger",
    "minOffsetsPerTrigger": "minRecordsPerTrigger",
}
"""Options of Spark's Kafka source, and their replacements; options with the same name are left out.
"""

KAFKA_ONLY = {
    "includeHeaders": "records have no headers, pack what belongs to a record into its value",
    "groupIdPrefix": "there are no consumer groups, positions are in the query's checkpoint",
    "kafka.group.id": "there are no consumer groups, positions are in the query's checkpoint",
    "kafkaConsumer.pollTimeoutMs": "there is no consumer to wait for",
    "fetchOffset.numRetries": "metadata is asked again as long as it takes",
    "fetchOffset.retryIntervalMs": "metadata is asked again as long as it takes",
}
"""Options of Spark's Kafka source without a counterpart here, and the reason."""


def names_for(*uses: Use) -> tuple[str, ...]:
    """Return the options that any of `uses` has, in the order of the table."""
    return tuple(option.name for option in OPTIONS if set(uses) & set(option.uses))
