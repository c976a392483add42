"""Logs as tables of SQL: created, read, inserted into, and what is refused in words.

Goal: a user of SQL needs no DataFrame for a log.  Method: tables of Spark's catalog over
a log, and each statement that a user would try.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlspark.admission import has_admission_control
from dlspark.schema import READ_SCHEMA
from tests.fixtures.spark import message_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.fixtures.spark import LogBench

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture
def table(spark: SparkSession, logs: LogBench) -> Iterator[tuple[str, str]]:
    """A table over a fresh log of five records; its name and the log's."""
    log = logs.create("sql")
    logs.append(log, [(n, b"%d" % n) for n in range(5)])
    name = f"t_{log.rpartition('-')[2]}"
    spark.sql(
        f"CREATE TABLE {name} USING dlog OPTIONS (uri '{logs.uri}', log '{log}') "
        "COMMENT 'clicks' TBLPROPERTIES ('owner-team' = 'web')"
    )
    yield name, log
    spark.sql(f"DROP TABLE {name}")


def test_create_table_select_and_spark_table(
    spark: SparkSession, logs: LogBench, table: tuple[str, str], tmp_path: Path
) -> None:
    """By SQL, by name, as a stream; each read sees what the log holds then."""
    name, log = table
    columns = [(field.name, field.dataType) for field in spark.table(name).schema.fields]
    assert columns == [(field.name, field.dataType) for field in READ_SCHEMA.fields]
    assert spark.sql(f"SELECT count(*), max(txid) FROM {name}").first() == (5, 4)
    logs.append(log, [(9, b"9")])
    assert spark.table(name).count() == 6
    found: list[int] = []
    query = (
        spark.readStream.option("startingOffsets", "earliest")
        .table(name)
        .writeStream.foreachBatch(lambda rows, _: found.extend(r.txid for r in rows.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert found == [0, 1, 2, 3, 4, 9]


def test_options_of_a_single_statement(
    spark: SparkSession, logs: LogBench, table: tuple[str, str]
) -> None:
    """`WITH` says where a read of a table begins and ends; of a temporary view Spark ignores it."""
    name, log = table
    part = "WITH (startingTxid = '1', endingTxid = '3')"
    assert spark.sql(f"SELECT txid FROM {name} {part}").collect() == [(1,), (2,)]
    assert spark.sql(f"SELECT count(*) FROM {name}").first() == (5,)
    # Spark makes one source of a table that a statement names twice, with the first options.
    joined = f"SELECT count(*) FROM {name} {part} AS a JOIN {name} AS b ON a.txid < b.txid"
    assert spark.sql(joined).first() == (1,)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW all_rows USING dlog OPTIONS (uri '{logs.uri}', "
        f"log '{log}')"
    )
    assert spark.sql(f"SELECT count(*) FROM all_rows {part}").first() == (5,)


def test_describe(spark: SparkSession, table: tuple[str, str]) -> None:
    """The columns are those of the log; what was said of the table beside, Spark does not keep."""
    columns = [(each.name, each.dataType.simpleString()) for each in READ_SCHEMA.fields]
    found = spark.sql(f"DESCRIBE {table[0]}").collect()
    assert [(row.col_name, row.data_type) for row in found] == columns
    found = spark.sql(f"SHOW COLUMNS IN {table[0]}").collect()
    assert [row.col_name for row in found] == [name for name, _ in columns]


def test_insert_into_a_temporary_view(
    spark: SparkSession, logs: LogBench, table: tuple[str, str]
) -> None:
    """Columns by name, the others are the log's to fill in; a table of the catalog is refused."""
    name, log = table
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW into_log USING dlog OPTIONS (uri '{logs.uri}', "
        f"log '{log}')"
    )
    rows = "SELECT CAST(value AS BINARY) AS value FROM VALUES ('a'), ('b') AS rows(value)"
    spark.sql(f"INSERT INTO into_log BY NAME {rows}")
    assert sorted(logs.payloads(log)) == [b"0", b"1", b"2", b"3", b"4", b"a", b"b"]
    text = message_of(lambda: spark.sql("INSERT INTO into_log VALUES (CAST('y' AS BINARY))"))
    assert "not enough data columns" in text
    for statement in (f"INSERT INTO {name} BY NAME {rows}", f"INSERT INTO {name} TABLE into_log"):
        text = message_of(lambda sql=statement: spark.sql(sql))  # type: ignore[misc]
        assert "insert into a temporary view" in text
    assert len(logs.payloads(log)) == 7


def test_insert_overwrite(spark: SparkSession, logs: LogBench, table: tuple[str, str]) -> None:
    """The rows of a view replace the former ones, also if there are none.

    A table of the catalog is refused, and its log keeps what it holds.
    """
    name, log = table
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW over_log USING dlog OPTIONS (uri '{logs.uri}', "
        f"log '{log}')"
    )
    text = message_of(lambda: spark.sql(f"INSERT OVERWRITE {name} TABLE over_log"))
    assert "insert into a temporary view" in text
    assert len(logs.payloads(log)) == 5
    one = "SELECT CAST('a' AS BINARY) AS value"
    spark.sql(f"INSERT OVERWRITE TABLE over_log BY NAME {one}")
    assert logs.payloads(log) == [b"a"]
    spark.sql(f"INSERT OVERWRITE over_log BY NAME {one} WHERE false")
    assert logs.payloads(log) == []


def test_create_table_as_select(spark: SparkSession, logs: LogBench) -> None:
    """Refused in words that say what works: no row is written, and no table is left."""
    log = logs.create("sql")
    text = message_of(
        lambda: spark.sql(
            f"CREATE TABLE t_ctas USING dlog OPTIONS (uri '{logs.uri}', log '{log}') "
            "AS SELECT CAST('a' AS BINARY) AS value"
        )
    )
    assert "insert into a temporary view" in text
    assert not spark.catalog.tableExists("t_ctas")
    assert logs.payloads(log) == []


@pytest.mark.prove  # what Spark makes of it, not dlog
def test_save_as_table(spark: SparkSession, logs: LogBench) -> None:
    """Spark tells a source nothing of the table: the rows are written, and it cannot be read."""
    log = logs.create("sql")
    rows = spark.sql("SELECT CAST('a' AS BINARY) AS value")
    rows.write.format("dlog").options(uri=logs.uri, log=log).saveAsTable("t_saved")
    try:
        assert logs.payloads(log) == [b"a"]
        text = message_of(lambda: spark.table("t_saved").collect())
        assert "option uri is missing" in text
        assert "saveAsTable" in text
    finally:
        spark.sql("DROP TABLE t_saved")


@pytest.mark.prove  # what Spark makes of it, not dlog
def test_create_or_replace_table_as_select(
    spark: SparkSession, logs: LogBench, table: tuple[str, str]
) -> None:
    """Refused when Spark has dropped the table; the log is as it was."""
    name, log = table
    create = f"CREATE OR REPLACE TABLE {name} USING dlog OPTIONS (uri '{logs.uri}', log '{log}')"
    text = message_of(lambda: spark.sql(f"{create} AS SELECT CAST('a' AS BINARY) AS value"))
    assert "insert into a temporary view" in text
    assert not spark.catalog.tableExists(name)
    assert len(logs.payloads(log)) == 5
    spark.sql(create.replace(" OR REPLACE", ""))


@pytest.mark.prove  # what Spark makes of it, not dlog
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE {} SET txid = 1",
        "DELETE FROM {}",
        "MERGE INTO {0} USING {0} AS other ON {0}.txid = other.txid WHEN MATCHED THEN DELETE",
    ],
)
def test_statements_that_change_rows(
    spark: SparkSession, logs: LogBench, table: tuple[str, str], statement: str
) -> None:
    """Spark refuses them to every Python source, by name."""
    name, log = table
    assert statement.split()[0] in message_of(lambda: spark.sql(statement.format(name))).upper()
    assert len(logs.payloads(log)) == 5


@pytest.mark.prove  # what Spark makes of it, not dlog
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("SELECT txid FROM {} VERSION AS OF 1", "time travel"),
        ("SELECT txid FROM {} TIMESTAMP AS OF '2026-01-01'", "time travel"),
        ("TRUNCATE TABLE {}", "truncate"),
        ("ANALYZE TABLE {} COMPUTE STATISTICS", "analyze table"),
        ("DESCRIBE TABLE EXTENDED {} AS JSON", "as json"),
        ("SHOW PARTITIONS {}", "partition"),
        ("SELECT * FROM dlog.`{}`", "direct query"),
    ],
)
def test_statements_that_spark_refuses(
    spark: SparkSession, table: tuple[str, str], statement: str, said: str
) -> None:
    """By name, for every Python source."""
    assert said in message_of(lambda: spark.sql(statement.format(table[0])).collect()).lower()


@pytest.mark.prove  # what Spark makes of it, not dlog
def test_create_table_like(spark: SparkSession, table: tuple[str, str]) -> None:
    """PySpark 4.1 makes a table of the same log; later versions refuse it."""
    statement = f"CREATE TABLE t_alike LIKE {table[0]}"
    if not has_admission_control():
        spark.sql(statement)
        try:
            assert spark.table("t_alike").collect() == spark.table(table[0]).collect()
        finally:
            spark.sql("DROP TABLE t_alike")
    else:
        assert "create table like" in message_of(lambda: spark.sql(statement)).lower()


@pytest.mark.prove  # what Spark makes of it, not dlog
def test_columns_that_are_added_to_a_table(spark: SparkSession, table: tuple[str, str]) -> None:
    """Spark notes them, and the next read says what to do."""
    spark.sql(f"ALTER TABLE {table[0]} ADD COLUMNS (more INT)")
    text = message_of(lambda: spark.table(table[0]).collect())
    assert "leave .schema(...) out, and the columns of CREATE TABLE" in text


@pytest.mark.prove  # the tests before it make both by SQL
def test_catalog_create_table_and_temporary_view(spark: SparkSession, logs: LogBench) -> None:
    """A table by the catalog's own face, with options for reading; a view for this session."""
    log = logs.create("sql")
    logs.append(log, [(n, b"%d" % n) for n in range(5)])
    spark.catalog.createTable(
        "t_catalog",
        source="dlog",
        uri=logs.uri,
        log=log,
        startingTxid="3",
        columns="txid,value",
    )
    try:
        assert [row.txid for row in spark.table("t_catalog").collect()] == [3, 4]
        other = logs.create("sql")
        logs.save(spark.table("t_catalog"), log=other)
        assert logs.payloads(other) == [b"3", b"4"]
    finally:
        spark.sql("DROP TABLE t_catalog")
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW v USING dlog OPTIONS (uri '{logs.uri}', log '{log}')"
    )
    assert spark.sql("SELECT count(*) FROM v").first() == (5,)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW x USING dlog OPTIONS (uri '{logs.uri}', log '{log}', "
        "metadata 'segments')"
    )
    assert spark.sql("SELECT sum(records) FROM x").first() == (5,)


def test_a_table_of_a_typed_log(spark: SparkSession, logs: LogBench) -> None:
    """It has the columns of the log as they were then, keeps them, and takes rows by a view."""
    log = f"sql-{uuid4().hex}"

    def save(rows: str) -> None:
        frame = spark.sql(rows)
        logs.save(frame, log=log, createLog="true", mergeSchema="true")

    save("SELECT 'Paris' AS city, 12.5D AS fare")
    where = f"USING dlog OPTIONS (uri '{logs.uri}', log '{log}')"
    spark.sql(f"CREATE TABLE t_typed {where}")
    try:
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW into_typed {where}")
        spark.sql("INSERT INTO into_typed VALUES ('Rome', 9)")
        save("SELECT 'Oslo' AS city, 30D AS fare, 2.5D AS tip")
        found = spark.sql("SELECT * FROM t_typed WHERE fare > 9 ORDER BY fare")
        assert found.dtypes == [("city", "string"), ("fare", "double")]
        assert found.collect() == [("Paris", 12.5), ("Oslo", 30.0)]
    finally:
        spark.sql("DROP TABLE t_typed")


def test_wrong_tables_say_what_is_right(spark: SparkSession, logs: LogBench) -> None:
    """An option that is unknown; columns that a log does not have."""
    where = f"USING dlog OPTIONS (uri '{logs.uri}', log 'a'"
    text = message_of(lambda: spark.sql(f"CREATE TABLE wrong {where}, startngTxid '3')"))
    assert "did you mean startingTxid?" in text
    spark.sql(f"CREATE TABLE wrong (value BINARY) {where})")
    try:
        text = message_of(lambda: spark.table("wrong").collect())
        assert "created without columns of its own" in text
    finally:
        spark.sql("DROP TABLE wrong")
