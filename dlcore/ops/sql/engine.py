"""Runs one query over logs in DuckDB, which sees each of them as an Arrow dataset.

DuckDB asks the dataset for columns and a filter, so only these columns are read, and only the part
of the log that the filter can keep.  It reaches no file, no network and no object of Python beside
these datasets, and its configuration is locked before the statement is seen.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    InvalidLogNameError,
    LogNotFoundError,
    UnsupportedError,
)
from dlcore.base.extras import missing_packages_explained
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.entries.batches import read_schema, typed_read_fields
from dlcore.ops.sql.narrowing import columns_in, narrowed
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import duckdb
    import pyarrow.compute as pc

    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.records import RecordPlace
    from dlcore.sync import DistributedLogManager, Namespace

PATIENCE_S = 10.0
"""A call to the proxies fails after this time without a proxy that answers."""
_BATCH_ROWS = 8_192
_LOGS_MAX = 20
"""Most tables of a statement."""
_NO_MEMORY = "Out of Memory Error"
"""DuckDB's text on a lack of memory begins so; Arrow makes an `OSError` of one between rows."""


def opened(endpoint: str, *, tls: TlsFiles | None, token: str | None) -> Namespace:
    """Return the logs behind proxies, with the rights of a token.  Raises: ConfigurationError."""
    return open_namespace(endpoint, patience_s=PATIENCE_S, tls=tls, token=token)


def table_schema(own: pa.Schema | None) -> pa.Schema:
    """Return the columns of a log's table: its own, and those that each record has."""
    return read_schema() if own is None else pa.schema([*own, *typed_read_fields()])


class LogTable(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """A log as a dataset, with the columns that each of its rows has beside its own."""

    def __init__(self, namespace: Namespace, log: DistributedLogManager) -> None:
        # The base is one of C++ objects, and this is none: DuckDB asks for the two members below.
        self._namespace = namespace
        self._log = log
        self._columns = table_schema(log.get_schema())
        self.error: DLError | None = None
        """Why the log could not be read; DuckDB tells only its text."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._columns

    def scanner(self, columns: list[str] | None = None, **asked: Any) -> _Scan:
        """Return the rows that a `filter` keeps, with these columns."""
        where: pc.Expression | None = asked.get("filter")
        names = self._columns.names if columns is None else columns
        schema = pa.schema([self._columns.field(name) for name in names])
        return _Scan(schema, self._noted(self._rows(schema, where)))

    def _noted(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except DLError as error:
            self.error = error
            raise

    def _rows(self, schema: pa.Schema, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        start, end, needed = None, None, list(schema.names)
        if where is not None:
            needed += [n for n in columns_in(where, self._columns) if n not in needed]
            first, last = self._part(where)
            start, end = first.dlsn, last.dlsn
        for batch in self._log.read(start, end, columns=needed or self._columns.names[:1]):
            rows = batch if where is None else batch.filter(where)
            arrays = [rows.column(name) for name in schema.names]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            else:
                yield rows.select([])

    def _part(self, where: pc.Expression) -> tuple[RecordPlace, RecordPlace]:
        snapshot = self._log.get_snapshot()
        first, end = self._namespace.find_places(
            [(snapshot, snapshot.first), (snapshot, snapshot.end)]
        )

        def place_at(number: int) -> RecordPlace:
            wanted = NotLessThan(RecordField.SEQUENCE_ID, number)
            (place,) = self._namespace.find_places([(snapshot, wanted)])
            return place

        return narrowed(where, self._columns, place_at, first, end)


class _Scan:
    """Rows for DuckDB, in place of Arrow's scanner, which reads sixteen batches ahead."""

    def __init__(self, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> None:
        self._rows = rows
        self.projected_schema = schema

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._rows)


class Query:
    """One statement; iterating it yields its rows, once.

    Raises:
        ConfigurationError: DuckDB refuses the statement; UnsupportedError: it is no query.
        LogNotFoundError: it names a log that does not exist.
        DLError: a log may not be read, or cannot be.
        MemoryError: it takes more memory than it may.
    """

    def __init__(self, sql: str, namespace: Namespace, *, memory_bytes: int) -> None:
        self._tables: list[LogTable] = []
        self._unknown: dict[str, DLError] = {}
        with self._own_errors():
            connection = _connect(memory_bytes)
            registered: dict[str, str] = {}
            for name in _names_in(connection, sql):
                try:
                    self._tables.append(LogTable(namespace, namespace.open_log(name)))
                except (LogNotFoundError, InvalidLogNameError) as error:
                    self._unknown[name] = error  # unless it is a name within the statement
                    continue
                other = registered.setdefault(name.lower(), name)
                if other != name:
                    raise UnsupportedError(
                        f"logs {other!r} and {name!r} in one statement: DuckDB takes names that "
                        "differ in case only for one table; expected a statement for each"
                    )
                _require_apart(name, self._tables[-1].schema.names)
                connection.register(name, self._tables[-1])
            connection.execute("SET lock_configuration = true")
            self._rows: pa.RecordBatchReader = connection.sql(sql).to_arrow_reader(_BATCH_ROWS)

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return self._rows.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self._own_errors():
            yield from self._rows

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Raise errors of DuckDB as ours, and those of logs as they were.

        DuckDB's text on a lack of memory names settings that its callers cannot reach, and the one
        on an unknown table recommends tables of its own.
        """
        with missing_packages_explained():
            import duckdb
        try:
            yield
        except duckdb.OutOfMemoryException as error:
            raise MemoryError from error
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if str(error).startswith(_NO_MEMORY):
                raise MemoryError from error
            for name, unknown in self._unknown.items():
                if f"Table with name {name} does not exist" in str(error):
                    raise unknown from error
            for each in self._tables:
                if each.error is not None:
                    raise each.error from error
            raise ConfigurationError(f"{type(error).__name__}: {error}") from error


def _require_apart(log: str, columns: Sequence[str]) -> None:
    """Require that no two columns of a log are one for DuckDB, which would give the first one."""
    first: dict[str, str] = {}
    for name in columns:
        other = first.setdefault(name.lower(), name)
        if other != name:
            raise UnsupportedError(
                f"log {log!r} has columns {other!r} and {name!r}: DuckDB does not tell names apart "
                "that differ in case only; read the log in another way"
            )


def _connect(memory_bytes: int) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "memory_limit": f"{memory_bytes}B",
            "max_temp_directory_size": "0B",
            "temp_directory": "",  # DuckDB lets statements reach the files of this folder
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    for setting in (
        "python_enable_replacements = false", "TimeZone = 'UTC'", "enable_external_access = false",
    ):  # fmt: skip
        connection.execute(f"SET {setting}")
    return connection


def _names_in(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Return the names of tables in a statement, which must be one query.

    Raises: ConfigurationError, UnsupportedError.
    """
    # All rows are fetched, for DuckDB takes no other statement before.
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    tree = json.loads(text)
    if tree.get("error"):
        reason = tree.get("error_message", "it is none")
        if tree.get("error_type") == "parser":
            raise ConfigurationError(f"the statement does not parse: {reason}")
        raise UnsupportedError(f"expected one SELECT statement: {reason}")
    if len(tree["statements"]) != 1:
        raise UnsupportedError(f"{len(tree['statements'])} statements: expected one SELECT")
    names = sorted(set(_tables(tree)))
    if len(names) > _LOGS_MAX:
        raise ConfigurationError(f"{len(names)} tables: expected at most {_LOGS_MAX}")
    return names


def _tables(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE":
            yield node["table_name"]
        for each in node.values():
            yield from _tables(each)
    elif isinstance(node, list):
        for each in node:
            yield from _tables(each)
