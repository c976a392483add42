"""Options: every right value becomes what it says, every wrong one an error that names it.

Goal: a user who mistypes anything learns at once what and what would be right.  Method: tables of
options and of the words the message must have.
"""

from __future__ import annotations

import pickle

import pytest

from dlcore.errors import ConfigurationError
from dlcore.ids import DLSN
from dlcore.tls import TlsFiles
from dlspark.options import Address, LogSelection, Mode, ReadOptions, Transaction, WriteOptions
from dlspark.positions import Edge, PositionsByLog, TimestampBound, TxidBound

URI = "distributedlog://127.0.0.1:2181/dlog"
LOG = {"uri": URI, "log": "clicks"}


def parse(mode: Mode = Mode.BATCH, /, **options: str) -> ReadOptions:
    """Parse options of a read of one log."""
    return ReadOptions.parse(LOG | options, mode)


def test_defaults_differ_between_batch_and_stream() -> None:
    """A batch reads everything, a stream what is new; both stop at lost data."""
    batch, stream = parse(Mode.BATCH), parse(Mode.STREAM)
    assert (batch.start, batch.end) == (Edge.EARLIEST, Edge.LATEST)
    assert (stream.start, stream.end) == (Edge.LATEST, None)
    assert batch.fail_on_data_loss
    assert stream.fail_on_data_loss
    assert batch.logs == LogSelection(names=("clicks",))
    assert (batch.min_partitions, batch.max_records_per_partition) == (None, None)


def test_keys_ignore_case() -> None:
    """Spark hands keys over in lower case."""
    options = {"URI": URI, "logspattern": "a.*", "FAILONDATALOSS": "False", "minpartitions": " 4 "}
    parsed = ReadOptions.parse(options, Mode.STREAM)
    assert parsed.logs.pattern == "a.*"
    assert not parsed.fail_on_data_loss
    assert parsed.min_partitions == 4


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
    assert parse(Mode.BATCH, **options).start == start


def test_end_of_a_batch() -> None:
    """Each way to say where to end."""
    assert parse(endingOffsets="latest").end is Edge.LATEST
    assert parse(endingOffsets="4:0:0").end == DLSN(4, 0, 0)
    assert parse(endingTxid="7").end == TxidBound(7)
    assert parse(endingTimestamp="7").end == TimestampBound(7)


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
        ({"startingTxid": "1", "startingOffsets": "earliest"}, ["at most one", "startingTxid"]),
        ({"endingTxid": "1", "endingTimestamp": "1"}, ["at most one", "endingTxid"]),
        ({"startingOffsets": "3:0:0", "endingOffsets": "2:9:9"}, ["end at 2:9:9", "3:0:0"]),
        ({"startingTxid": "5", "endingTxid": "4"}, ["4", "5"]),
        ({"startingTimestamp": "5", "endingTimestamp": "4"}, ["4", "5"]),
        (
            {"startingOffsets": '{"clicks":"3:0:0"}', "endingOffsets": '{"clicks":"1:0:0"}'},
            ["'clicks'", "1:0:0", "3:0:0"],
        ),
        ({"failOnDataLoss": "yes"}, ["failOnDataLoss='yes'", "true or false"]),
        ({"minPartitions": "0"}, ["minPartitions='0'", ">= 1"]),
        ({"maxRecordsPerPartition": "1.5"}, ["maxRecordsPerPartition='1.5'"]),
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
        ({"uri": URI, "logs": "a,b", "startingOffsets": '{"a":"1:0:0"}'}, ["'b'"]),
        ({"uri": URI, "log": "a", "endingOffsets": "latest"}, ["endingOffsets", "no end"]),
        ({"uri": URI, "log": "a", "endingTxid": "1"}, ["endingTxid='1'", "no end"]),
    ],
)
def test_wrong_stream_options(options: dict[str, str], words: list[str]) -> None:
    """Likewise for streams."""
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


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tlsCert": "c.pem", "tlsKey": "c.key"}, ["tlsCert='c.pem'", "no ca"]),
        ({"tlsCa": "ca.pem", "tlsKey": "c.key"}, ["tlsKey='c.key'", "expected both files or none"]),
    ],
)
def test_half_of_the_tls_options_is_refused(files: dict[str, str], words: list[str]) -> None:
    """Rather than connecting in plain text, or to whom nobody trusts."""
    with pytest.raises(ConfigurationError) as caught:
        parse(**files)
    for word in words:
        assert word in str(caught.value)


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
        ({"topicc": "latest"}, Mode.BATCH, ["unknown option topicc", "uri, log"]),
        ({"path": "views"}, Mode.BATCH, ["no path"]),
    ],
)
def test_wrong_write_options(options: dict[str, str], mode: Mode, words: list[str]) -> None:
    """Likewise for writing."""
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
    assert parsed.start == PositionsByLog({"clicks": DLSN(3, 0, 0), "views": Edge.EARLIEST})
    assert parsed.end == PositionsByLog({"clicks": DLSN(3, 0, 0), "views": DLSN(1, 0, 0)})
    mixed = parse(startingOffsets='{"clicks": "3:0:0"}', endingTxid="1")
    assert mixed.end == TxidBound(1)
