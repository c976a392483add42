"""Options: every right value becomes what it says, every wrong one an error that names it.

Goal: a user who mistypes anything learns at once what and what would be right.  Method: tables of
options and of the words the message must have.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.zookeeper import ZooKeeperAccess
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlspark import options as options_module
from dlspark.limits import Limits
from dlspark.option_table import OPTIONS, Use
from dlspark.options import (
    READ_COLUMNS,
    Address,
    Division,
    LogSelection,
    MetadataOptions,
    MetadataTable,
    Mode,
    ReadOptions,
    Transaction,
    WriteOptions,
)
from dlspark.positions import Edge, PositionsByLog, TimestampBound, TxidBound

URI = "distributedlog://127.0.0.1:2181/dlog"
LOG = {"uri": URI, "log": "clicks"}


def parse(mode: Mode = Mode.BATCH, /, **options: str) -> ReadOptions:
    """Parse options of a read of one log."""
    return ReadOptions.parse(LOG | options, mode)


def test_defaults_differ_between_batch_and_stream() -> None:
    """A batch reads everything, a stream what is new; both stop at lost data."""
    batch, stream = parse(Mode.BATCH), parse(Mode.STREAM)
    assert (batch.bounds.start, batch.bounds.end) == (Edge.EARLIEST, Edge.LATEST)
    assert (stream.bounds.start, stream.bounds.end) == (Edge.LATEST, None)
    assert batch.fail_on_data_loss
    assert stream.fail_on_data_loss
    assert batch.logs == LogSelection(names=("clicks",))
    assert batch.division == Division(max_bytes=128 * 1024 * 1024)
    assert batch.limits == stream.limits == Limits()
    assert (batch.bounds.must_reach_start, stream.bounds.must_reach_start) == (False, True)
    assert batch.columns is None
    assert batch.byte_columns == READ_COLUMNS


def test_each_option_of_the_table_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a parser would be an option that is taken and does nothing."""
    asked: set[str] = set()
    get, parse_one = options_module._Table.get, options_module._Table.parse

    def noting_get(self: Any, key: str) -> str | None:
        asked.add(key)
        return get(self, key)

    def noting_parse(self: Any, key: str, *given: Any, **named: Any) -> Any:
        asked.add(key)
        return parse_one(self, key, *given, **named)

    monkeypatch.setattr(options_module._Table, "get", noting_get)
    monkeypatch.setattr(options_module._Table, "parse", noting_parse)
    ReadOptions.parse({"uri": URI, "logs": "clicks"}, Mode.BATCH)
    ReadOptions.parse(LOG, Mode.STREAM)
    MetadataOptions.parse({"uri": URI, "metadata": "logs"})
    for mode in (Mode.BATCH, Mode.STREAM):
        WriteOptions.parse(LOG, mode)
    not_parsed = {option.name for option in OPTIONS} - asked
    assert not not_parsed, "these options need a parser in dlspark/options.py"


def test_keys_ignore_case() -> None:
    """Spark hands keys over in lower case."""
    options = {"URI": URI, "logspattern": "a.*", "FAILONDATALOSS": "False", "minpartitions": " 4 "}
    parsed = ReadOptions.parse(options, Mode.STREAM)
    assert parsed.logs.pattern == "a.*"
    assert not parsed.fail_on_data_loss
    assert parsed.division.min_partitions == 4


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"startingOffsets": "Earliest"}, Edge.EARLIEST),
        ({"startingOffsets": "3:17:0"}, DLSN(3, 17, 0)),
        (
            {"startingOffsets": '{"clicks": "3:17:2"}'},
            PositionsByLog({"clicks": DLSN(3, 17, 2)}),
        ),
        ({"startingTxid": "0"}, TxidBound(0)),
        ({"startingTimestamp": "1714564800000"}, TimestampBound(1714564800000)),
        ({"startingTimestamp": "2024-05-01T12:00:00Z"}, TimestampBound(1714564800000)),
        ({"startingTimestamp": "2024-05-01 12:00:00"}, TimestampBound(1714564800000)),
        ({"startingTimestamp": "2024-05-01T14:00:00+02:00"}, TimestampBound(1714564800000)),
        ({"startingTimestamp": "2024-05-01T12:00:00.000001Z"}, TimestampBound(1714564800001)),
    ],
)
def test_starts(options: dict[str, str], start: object) -> None:
    """Each way to say where to begin."""
    assert parse(Mode.BATCH, **options).bounds.start == start


def test_end_of_a_batch() -> None:
    """Each way to say where to end."""
    assert parse(endingOffsets="latest").bounds.end is Edge.LATEST
    assert parse(endingOffsets="4:0:0").bounds.end == DLSN(4, 0, 0)
    assert parse(endingTxid="7").bounds.end == TxidBound(7)
    assert parse(endingTimestamp="7").bounds.end == TimestampBound(7)


def test_list_of_logs_is_trimmed() -> None:
    """Blanks and empty parts of a list do not matter, a leading slash of a name neither."""
    parsed = ReadOptions.parse({"uri": URI, "logs": " a , /b/c,"}, Mode.BATCH)
    assert parsed.logs.names == ("a", "b/c")
    assert parsed.logs.matches("b/c")
    assert not parsed.logs.matches("b")


def test_pattern_matches_whole_names() -> None:
    """A pattern that matches a part of a name does not select it."""
    selection = LogSelection(pattern="click.")
    assert selection.matches("clicks")
    assert not selection.matches("clicks2")
    assert not selection.matches("aclicks")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffset": "latest"}, ["unknown option", "startingOffset=", "startingOffsets?"]),
        ({"frobnicate": "1"}, ["unknown option frobnicate='1'", "logsPattern"]),
        ({"txnAppId": "a"}, ["txnAppId", "for writing"]),
        ({"checkpointLocation2": "a"}, ["checkpointLocation2"]),
        ({"path": "views"}, ["no path", ".option(\"log\", 'views')"]),
        ({"logs": "a"}, ["exactly one", "log and logs are given"]),
        ({"startingOffsets": "3:17"}, ["startingOffsets='3:17'", "3:17:0"]),
        ({"startingOffsets": "{"}, ["startingOffsets='{'", "expected JSON"]),
        ({"startingOffsets": "{}"}, ["names no log"]),
        ({"startingOffsets": '{"clicks": 3}'}, ["'clicks' is 3"]),
        ({"startingOffsets": '{"clicks": "x"}'}, ["log 'clicks'", "'x'"]),
        ({"startingOffsets": '{"clicks":"1:0:0","clicks":"2:0:0"}'}, ["'clicks' occurs twice"]),
        ({"startingOffsets": '{"views": "1:0:0"}'}, ["'views'", "not selected"]),
        ({"startingOffsets": "latest"}, ["startingOffsets='latest'", "empty"]),
        ({"startingOffsets": '{"clicks": "latest"}'}, ["'latest' for log 'clicks'"]),
        ({"endingOffsets": "earliest"}, ["endingOffsets='earliest'", "empty"]),
        ({"startingTxid": "-1"}, ["startingTxid='-1'", "0 …"]),
        ({"startingTxid": "abc"}, ["startingTxid='abc'", "integer"]),
        ({"startingTxid": "9223372036854775807"}, ["startingTxid"]),
        ({"startingTimestamp": "yesterday"}, ["startingTimestamp='yesterday'", "ISO-8601"]),
        ({"startingTimestamp": "1969-01-01"}, ["1970"]),
        ({"startingTimestamp": "-5"}, ["startingTimestamp='-5'"]),
        ({"startingOffsets": "3:0:0", "endingOffsets": "2:9:9"}, ["end at 2:9:9", "3:0:0"]),
        ({"startingTxid": "5", "endingTxid": "4"}, ["end at transaction id 4 before", "id 5"]),
        ({"startingTimestamp": "5", "endingTimestamp": "4"}, ["timestamp 4 before", "timestamp 5"]),
        (
            {"startingOffsets": '{"clicks":"3:0:0"}', "endingOffsets": '{"clicks":"1:0:0"}'},
            ["'clicks'", "1:0:0", "3:0:0"],
        ),
        ({"failOnDataLoss": "yes"}, ["failOnDataLoss='yes'", "true or false"]),
        ({"minPartitions": "0"}, ["minPartitions='0'", ">= 1"]),
        ({"maxRecordsPerPartition": "1.5"}, ["maxRecordsPerPartition='1.5'"]),
        ({"maxRecordsPerPartition": str(2**63)}, ["expected an integer >= 1 and < 2**63"]),
        ({"startingTimestamp": "9" * 5000}, ["expected epoch milliseconds"]),
        ({"startingOffsets": "9" * 5000 + ":0:0"}, ["startingOffsets=", "3:17:0"]),
        ({"startingOffsets": '{"a":' * 100_000}, ["startingOffsets=", "expected JSON"]),
        ({"maxBytesPerPartition": "9" * 5000}, ["expected bytes > 0 and < 2**63"]),
        ({"uri": "http://x/y"}, ["uri='http://x/y'", "distributedlog://"]),
        ({"uri": "distributedlog://host:1"}, ["uri=", "/path"]),
        ({"log": "a b"}, ["log='a b'", "' '"]),
        ({"log": ""}, ["log=''", "empty"]),
    ],
)
def test_wrong_batch_options(options: dict[str, str], words: list[str]) -> None:
    """The message names option and value and says what is right."""
    with pytest.raises(ConfigurationError) as caught:
        ReadOptions.parse(LOG | options, Mode.BATCH)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log": "a"}, ["uri is missing"]),
        ({"uri": URI}, ["log, logs or logsPattern", "none is given"]),
        ({"uri": URI, "logs": " , "}, ["logs=' , '", "names no log"]),
        ({"uri": URI, "logs": "a,b,/a"}, ["names the log 'a' twice"]),
        ({"uri": URI, "logsPattern": "a("}, ["logsPattern='a('", "regular expression"]),
        ({"uri": URI, "logsPattern": ""}, ["logsPattern"]),
        ({"uri": URI, "logsPattern": "a{99999999999}"}, ["logsPattern='a{9", "regular expression"]),
        ({"uri": URI, "logsPattern": "(" * 5000 + ")" * 5000}, ["regular expression"]),
        ({"uri": URI, "logs": "a,b", "startingOffsets": '{"a":"1:0:0"}'}, ["'b'"]),
        ({"uri": URI, "log": "a", "endingOffsets": "latest"}, ["endingOffsets", "no end"]),
        ({"uri": URI, "log": "a", "endingTxid": "1"}, ["endingTxid='1'", "no end"]),
    ],
)
def test_wrong_stream_options(options: dict[str, str], words: list[str]) -> None:
    """The same for streams."""
    with pytest.raises(ConfigurationError) as caught:
        ReadOptions.parse(options, Mode.STREAM)
    for word in words:
        assert word in str(caught.value)


def test_before_spark_says_batch_or_stream_only_common_errors_are_found() -> None:
    """At `load` either may follow: what one of them allows passes."""
    parse(Mode.LOAD, startingOffsets="latest")
    parse(Mode.LOAD, endingTxid="1")
    with pytest.raises(ConfigurationError, match="unknown option"):
        parse(Mode.LOAD, nonsense="1")


def test_tls_options_name_files() -> None:
    """For reading and writing; only paths are kept, and pickled."""
    files = {"tlsCa": "/tls/ca.pem", "tlsCert": "/tls/c.pem", "tlsKey": "/tls/c.key"}
    tls = TlsFiles(ca="/tls/ca.pem", cert="/tls/c.pem", key="/tls/c.key")
    address = Address(uri=URI, tls=tls)
    assert parse(**files).address == address
    assert WriteOptions.parse(LOG | files, Mode.BATCH).address == address
    assert pickle.loads(pickle.dumps(address)) == address  # our own bytes
    assert str(address) == URI
    assert parse(tlsCa="/tls/ca.pem").address.tls == TlsFiles(ca="/tls/ca.pem")
    of_zookeeper = parse(zkTlsCa="/tls/ca.pem", zkAuthFile="/user").address.zookeeper
    assert of_zookeeper == ZooKeeperAccess(tls=TlsFiles(ca="/tls/ca.pem"), auth_file="/user")
    assert parse().address.zookeeper is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tlsCert": "c.pem", "tlsKey": "c.key"}, ["tlsCert='c.pem'", "no ca"]),
        ({"zkTlsCert": "c.pem"}, ["zkTlsCert='c.pem'", "zk_tls_ca"]),
        ({"tlsCa": "ca.pem", "tlsKey": "c.key"}, ["tlsKey='c.key'", "expected both files or none"]),
    ],
)
def test_half_of_the_tls_options_is_refused(files: dict[str, str], words: list[str]) -> None:
    """Rather than connecting in plain text, or to an untrusted server."""
    with pytest.raises(ConfigurationError) as caught:
        parse(**files)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600), ("1s", 1), ("24h", 86400)])
def test_capabilities_have_a_time(text: str, seconds: int) -> None:
    """For reading and writing; without the option none are used."""
    address = Address(uri=URI, capabilities_s=seconds)
    assert parse(capabilities=text).address == address
    assert WriteOptions.parse(LOG | {"capabilities": text}, Mode.BATCH).address == address
    assert parse().address.capabilities_s is None


@pytest.mark.parametrize("text", ["true", "0s", "999ms", "25h", ""])
def test_a_time_of_capabilities_that_is_none_is_refused(text: str) -> None:
    """Bookies refuse one of more than a day."""
    with pytest.raises(ConfigurationError, match=f"option capabilities='{text}': expected a time"):
        parse(capabilities=text)


def test_the_file_of_a_token_is_for_proxies() -> None:
    """Only its path is kept; a namespace that is opened directly takes no token."""
    options = {"endpoint": "grpc://a:1", "log": "clicks", "tokenFile": "/etc/dlog/token"}
    address = ReadOptions.parse(options, Mode.BATCH).address
    assert address == Address(uri="grpc://a:1", token_file="/etc/dlog/token")
    with pytest.raises(ConfigurationError, match=r"tokenFile='x'.*expected endpoint as well"):
        parse(tokenFile="x")


def test_capabilities_are_not_for_proxies() -> None:
    """These read from bookies themselves."""
    options = {"endpoint": "grpc://a:1", "log": "clicks", "capabilities": "1h"}
    with pytest.raises(ConfigurationError, match=r"capabilities='1h' .*which the proxies read"):
        ReadOptions.parse(options, Mode.BATCH)


def test_write_options() -> None:
    """The log may be left to a column; Spark's own key of streaming sinks is passed over."""
    parsed = WriteOptions.parse(
        {"uri": URI, "checkpointlocation": "/tmp/x", "queryname": "q"}, Mode.STREAM
    )
    assert parsed == WriteOptions(address=Address(uri=URI), log=None, transaction=None)
    parsed = WriteOptions.parse(LOG | {"txnAppId": "job", "txnVersion": "3"}, Mode.BATCH)
    assert parsed.log == "clicks"
    assert parsed.transaction == Transaction(app_id="job", version=3)
    assert parsed.lock_timeout_s is None
    parsed = WriteOptions.parse(LOG | {"lockTimeoutMs": "1500"}, Mode.STREAM)
    assert parsed.lock_timeout_s == 1.5


@pytest.mark.parametrize(
    ("options", "mode", "words"),
    [
        ({"txnAppId": "a"}, Mode.BATCH, ["go together", "txnVersion is missing"]),
        ({"txnVersion": "1"}, Mode.BATCH, ["go together", "txnAppId is missing"]),
        ({"txnAppId": " ", "txnVersion": "1"}, Mode.BATCH, ["txnAppId=' '"]),
        ({"txnAppId": "a", "txnVersion": "-1"}, Mode.BATCH, ["txnVersion='-1'", ">= 0"]),
        ({"txnAppId": "a", "txnVersion": "1"}, Mode.STREAM, ["txnAppId", "batch id"]),
        ({"lockTimeoutMs": "5s"}, Mode.STREAM, ["lockTimeoutMs='5s'", ">= 0"]),
        ({"startingOffsets": "latest"}, Mode.BATCH, ["startingOffsets", "for reading"]),
        ({"topicc": "latest"}, Mode.BATCH, ["unknown option topicc", "uri, endpoint, log"]),
        ({"path": "views"}, Mode.BATCH, ["no path"]),
    ],
)
def test_wrong_write_options(options: dict[str, str], mode: Mode, words: list[str]) -> None:
    """The same for writing."""
    with pytest.raises(ConfigurationError) as caught:
        WriteOptions.parse(LOG | options, mode)
    for word in words:
        assert word in str(caught.value)


def test_each_log_of_a_batch_may_have_bounds_of_its_own() -> None:
    """Only bounds of one log and one kind are compared."""
    options = {
        "uri": URI,
        "logs": "clicks,views",
        "startingOffsets": '{"clicks": "3:0:0", "views": "earliest"}',
        "endingOffsets": '{"clicks": "3:0:0", "views": "1:0:0"}',
    }
    parsed = ReadOptions.parse(options, Mode.BATCH)
    assert parsed.bounds.start == PositionsByLog({"clicks": DLSN(3, 0, 0), "views": Edge.EARLIEST})
    assert parsed.bounds.end == PositionsByLog({"clicks": DLSN(3, 0, 0), "views": DLSN(1, 0, 0)})
    mixed = parse(startingOffsets='{"clicks": "3:0:0"}', endingTxid="1")
    assert mixed.bounds.end == TxidBound(1)


def test_precedence_of_starts_and_ends_as_in_kafkas_source() -> None:
    """By time, by time of each log, by transaction id, by position; the others are checked too."""
    given = {
        "startingTimestamp": "5",
        "startingOffsetsByTimestamp": '{"clicks": 6}',
        "startingTxid": "7",
        "startingOffsets": "1:0:0",
    }
    expected = [
        TimestampBound(5),
        PositionsByLog({"clicks": TimestampBound(6)}),
        TxidBound(7),
        DLSN(1, 0, 0),
    ]
    for bound in expected:
        assert parse(**given).bounds.start == bound
        ending = {key.replace("starting", "ending"): value for key, value in given.items()}
        assert parse(**ending).bounds.end == bound
        given.pop(next(iter(given)))
    with pytest.raises(ConfigurationError, match="startingTxid='x'"):
        parse(startingTimestamp="5", startingTxid="x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"clicks": 1714564800000}', 1714564800000),
        ('{"clicks": "2024-05-01T12:00Z"}', 1714564800000),
    ],
)
def test_starting_offsets_by_timestamp(text: str, expected: int) -> None:
    """Milliseconds or ISO-8601, by log."""
    for mode in (Mode.BATCH, Mode.STREAM):
        start = parse(mode, startingOffsetsByTimestamp=text).bounds.start
        assert start == PositionsByLog({"clicks": TimestampBound(expected)})


def test_starting_offsets_by_timestamp_strategy() -> None:
    """A stream fails where nothing matches, a batch is empty, unless it is said otherwise."""
    key = "startingOffsetsByTimestampStrategy"
    assert parse(Mode.BATCH, **{key: "Error"}).bounds.must_reach_start
    assert not parse(Mode.STREAM, **{key: "latest"}).bounds.must_reach_start


def test_limits_of_a_stream() -> None:
    """All of them together."""
    limits = parse(
        Mode.STREAM,
        maxRecordsPerTrigger="100",
        maxBytesPerTrigger="64m",
        minRecordsPerTrigger="10",
        maxTriggerDelay="90s",
    ).limits
    assert limits == Limits(max_records=100, max_bytes=64 * 1024**2, min_records=10, max_delay_s=90)
    for text, seconds in (("250ms", 0.25), ("15m", 900), ("2min", 120), ("1h", 3600)):
        waits = parse(Mode.STREAM, minRecordsPerTrigger="1", maxTriggerDelay=text).limits
        assert waits.max_delay_s == seconds
    for text, size in (("1", 1), ("512k", 512 * 1024), ("2 GB", 2 * 1024**3)):
        assert parse(Mode.STREAM, maxBytesPerTrigger=text).limits.max_bytes == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxOffsetsPerTrigger": "5"}, ["maxOffsetsPerTrigger='5'", "use maxRecordsPerTrigger"]),
        ({"minoffsetspertrigger": "5"}, ["Kafka", "use minRecordsPerTrigger"]),
        ({"subscribe": "a"}, ["use log or logs"]),
        ({"subscribePattern": "a"}, ["use logsPattern"]),
        ({"kafka.bootstrap.servers": "h:1"}, ["use uri"]),
        ({"kafka.group.id": "g"}, ["no consumer groups", "leave it out"]),
        ({"kafka.max.poll.records": "5"}, ["Kafka client", "leave it out"]),
        ({"includeHeaders": "true"}, ["no headers", "leave it out"]),
        ({"maxRecordsPerTrigger": "0"}, ["maxRecordsPerTrigger='0'", ">= 1"]),
        ({"maxBytesPerTrigger": "0"}, ["maxBytesPerTrigger='0'", "64m"]),
        ({"maxBytesPerTrigger": "5t"}, ["maxBytesPerTrigger='5t'", "64m"]),
        (
            {"minRecordsPerTrigger": "5", "maxTriggerDelay": "soon"},
            ["maxTriggerDelay='soon'", "90s"],
        ),
        ({"maxTriggerDelay": "5s"}, ["maxTriggerDelay='5s'", "minRecordsPerTrigger"]),
        (
            {"minRecordsPerTrigger": "5", "maxRecordsPerTrigger": "4"},
            ["minRecordsPerTrigger=5", "maxRecordsPerTrigger=4"],
        ),
        ({"startingOffsetsByTimestamp": "5"}, ["startingOffsetsByTimestamp='5'", "names no log"]),
        ({"startingOffsetsByTimestamp": "{}"}, ["names no log", "1714564800000"]),
        ({"startingOffsetsByTimestamp": '{"clicks": true}'}, ["log 'clicks' is True"]),
        ({"startingOffsetsByTimestamp": '{"clicks": "x"}'}, ["(log 'clicks')='x'", "ISO-8601"]),
        (
            {"startingOffsetsByTimestamp": '{"views": 5}'},
            ["option startingOffsetsByTimestamp names the log 'views'", "not selected"],
        ),
        (
            {"startingTimestamp": "5", "startingOffsets": '{"views": "latest"}'},
            ["option startingOffsets names the log 'views'", "not selected"],
        ),
        ({"startingOffsetsByTimestampStrategy": "end"}, ["Strategy='end'", "error or latest"]),
        ({"columns": "txid,txid"}, ["'txid' twice"]),
        ({"columns": " , "}, ["names no column"]),
        ({"endingOffsetsByTimestamp": '{"clicks": 5}'}, ["not allowed", "has no end"]),
        ({"metadata": "logs"}, ["metadata='logs'", "tables about the system"]),
        ({"createLog": "true"}, ["for writing"]),
    ],
)
def test_wrong_options_of_limits_and_of_kafkas_source(
    options: dict[str, str], words: list[str]
) -> None:
    """Those of Kafka's source are answered with what takes their place."""
    with pytest.raises(ConfigurationError) as caught:
        parse(Mode.STREAM, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_limits_are_for_streams() -> None:
    """A batch reads all there is."""
    with pytest.raises(ConfigurationError, match="maxRecordsPerTrigger='5' is not allowed here"):
        parse(Mode.BATCH, maxRecordsPerTrigger="5")


def test_columns_of_logs_of_bytes() -> None:
    """Typed logs have others, so they are looked at when it is known what the log is."""
    with pytest.raises(ConfigurationError, match="columns='key': a log of bytes has no column"):
        _ = parse(columns="key").byte_columns


def test_columns_keep_the_order_in_which_they_are_named() -> None:
    """And blanks do not matter."""
    assert parse(columns="value, txid,").columns == ("value", "txid")


def test_metadata_tables() -> None:
    """With or without a choice of logs; options of records are not for them."""
    assert MetadataOptions.parse(LOG) is None
    options = MetadataOptions.parse({"uri": URI, "METADATA": "Segments"})
    assert options is not None
    assert (options.table, options.logs) == (MetadataTable.SEGMENTS, None)
    chosen = MetadataOptions.parse(LOG | {"metadata": "extents"})
    assert chosen is not None
    assert chosen.logs == LogSelection(names=("clicks",))
    for table in ("ledgers", "bookies", "commits"):
        with pytest.raises(ConfigurationError, match=rf"log='\w+'.*{table} is of the whole"):
            MetadataOptions.parse(LOG | {"metadata": table})
    with pytest.raises(ConfigurationError, match=r"metadata='x': expected logs, .* or commits"):
        MetadataOptions.parse({"uri": URI, "metadata": "x"})
    with pytest.raises(ConfigurationError, match="minPartitions='2' is for reading records"):
        MetadataOptions.parse({"uri": URI, "metadata": "logs", "minPartitions": "2"})


def test_options_of_a_catalog_table() -> None:
    """Behind ``option.``, among the table's properties; for reading and writing alike."""
    table = {
        "provider": "dlog",
        "comment": "made by hand",
        "option.uri": URI,
        "option.log": "clicks",
        "option.startingTxid": "5",
        "option.createLog": "true",
    }
    assert ReadOptions.parse(table, Mode.BATCH).bounds.start == TxidBound(5)
    assert WriteOptions.parse(table, Mode.BATCH).create_log
    dynamic = table | {"startingtxid": "7"}
    assert ReadOptions.parse(dynamic, Mode.BATCH).bounds.start == TxidBound(7)
    with pytest.raises(ConfigurationError, match=r"unknown option startngtxid.*startingTxid\?"):
        ReadOptions.parse(table | {"option.startngtxid": "5"}, Mode.BATCH)
    metadata = MetadataOptions.parse(
        {"provider": "dlog", "option.uri": URI, "option.metadata": "logs"}
    )
    assert metadata is not None
    with pytest.raises(ConfigurationError, match="option uri is missing"):
        ReadOptions.parse({"provider": "dlog", "log": "clicks"}, Mode.BATCH)


def test_every_option_of_the_table_is_known_to_the_parser() -> None:
    """Where the table says what it is for, it is taken, or refused for its value."""
    for option in OPTIONS:
        for use in option.uses:
            given = {"uri": URI, option.name: "\0"} | ({} if option.name == "log" else {"log": "a"})
            if use is Use.METADATA:
                given.setdefault("metadata", "logs")
            try:
                if use is Use.METADATA:
                    MetadataOptions.parse(given)
                elif use in (Use.BATCH_READ, Use.STREAM_READ):
                    ReadOptions.parse(given, Mode.STREAM if use is Use.STREAM_READ else Mode.BATCH)
                else:
                    WriteOptions.parse(given, Mode.BATCH)
            except ConfigurationError as error:
                words = str(error)
                assert "unknown option" not in words, words
                assert "not allowed here" not in words, words
                assert option.name in words or "exactly one" in words, words


def test_an_endpoint_takes_the_place_of_the_uri() -> None:
    """For reads of records and for writes; tables about the system say what works instead."""
    endpoint = {"endpoint": " grpc://a:1,b:2 ", "log": "clicks"}
    address = ReadOptions.parse(endpoint, Mode.STREAM).address
    assert address == Address(uri="grpc://a:1,b:2")
    secure = {"endpoint": "grpc+tls://a:1", "tlsCa": "ca.pem", "log": "clicks"}
    assert ReadOptions.parse(secure, Mode.BATCH).address.tls == TlsFiles(ca="ca.pem")
    for wrong, reason in (
        (endpoint | {"uri": URI}, "expected exactly one of them"),
        ({"endpoint": "a:1", "log": "b"}, "option endpoint='a:1': expected grpc://"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            ReadOptions.parse(wrong, Mode.BATCH)
    assert WriteOptions.parse(endpoint, Mode.BATCH).address == address
    with pytest.raises(ConfigurationError, match="read with the option uri"):
        MetadataOptions.parse(endpoint | {"metadata": "logs"})
