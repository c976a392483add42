"""Python data sources and a sink that do nothing: what Spark itself costs.

One source has the schema of a byte log and yields ready-made Arrow batches without any I/O, or
follows a file, of which each byte is a row that is there at once; the other has the batches of a
file that it maps into memory.  The sink drops what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema

from dlspark.arrow import ROW_SCHEMA, ROWS_PER_BATCH
from dlspark.schema import READ_SCHEMA, read_schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

VALUE_BYTES = 100


def ready_made_batch(row_count: int, value_bytes: int) -> pa.RecordBatch:
    """Return rows like those of a log."""
    numbers = np.arange(row_count, dtype=np.int64)
    zeros = np.zeros(row_count, dtype=np.int64)
    dlsn = pa.StructArray.from_arrays(
        [pa.array(zeros), pa.array(zeros), pa.array(numbers)], fields=list(ROW_SCHEMA.field(1).type)
    )
    columns = [
        pa.array(["bench"] * row_count),
        dlsn,
        pa.array(numbers),
        pa.array(numbers),
        pa.array(numbers, pa.timestamp("us", tz="UTC")),
        pa.array([b"x" * value_bytes] * row_count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


@dataclass(frozen=True)
class Rows(InputPartition):
    """A number of rows, the bytes of each, the rows of a batch, and the columns."""

    count: int
    value_bytes: int = VALUE_BYTES
    batch_rows: int = ROWS_PER_BATCH
    columns: tuple[str, ...] = tuple(ROW_SCHEMA.names)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield one batch again and again."""
        batch = ready_made_batch(min(self.count, self.batch_rows), self.value_bytes)
        batch = batch.select(list(self.columns))
        for first in range(0, self.count, batch.num_rows):
            yield batch.slice(0, min(batch.num_rows, self.count - first))


class NoopReader(DataSourceReader):
    """Yields rows without I/O."""

    def __init__(self, rows: Rows, partitions: int) -> None:
        self._partitions = [replace(rows, count=rows.count // partitions)] * partitions

    def partitions(self) -> list[Rows]:
        """Return equal parts."""
        return self._partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part."""
        assert isinstance(partition, Rows)
        return partition.batches()


class NoopStreamReader(DataSourceStreamReader):
    """Has one new row at every trigger."""

    def __init__(self) -> None:
        self._latest = 0

    def initialOffset(self) -> dict[str, int]:
        """Return the start."""
        return {"row": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # the form without limits
        """Return a later end than the last time."""
        self._latest += 1
        return {"row": self._latest}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Rows]:
        """Return one part."""
        return [Rows(end["row"] - start["row"])] if end["row"] > start["row"] else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part."""
        assert isinstance(partition, Rows)
        return partition.batches()


class FileReader(NoopStreamReader):
    """Has a row for each byte that a file gets while it is read."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def initialOffset(self) -> dict[str, int]:
        """Return where the file ends now."""
        return self.latestOffset()

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # the form without limits
        """Return how long the file is."""
        return {"row": Path(self._path).stat().st_size}


class NoopStreamWriter(DataSourceStreamArrowWriter):
    """Drops every row."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take the rows and forget them."""
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing."""


class NoopDataSource(DataSource):
    """``format("bench_noop")``; its options are those of a batch read."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "bench_noop"

    def schema(self) -> StructType:
        """Return the schema of a byte log, or what is wanted of it."""
        return read_schema_of(self._columns)

    @property
    def _columns(self) -> tuple[str, ...]:
        wanted = self.options.get("columns")
        return tuple(wanted.split(",")) if wanted else tuple(READ_SCHEMA.names)

    def reader(self, schema: StructType) -> NoopReader:
        """Return the batch reader."""
        rows, value_bytes, batch_rows, partitions = (
            int(self.options[name]) for name in ("rows", "value_bytes", "batch_rows", "partitions")
        )
        return NoopReader(Rows(rows, value_bytes, batch_rows, self._columns), partitions)

    def streamReader(self, schema: StructType) -> NoopStreamReader:
        """Return the stream reader."""
        path = self.options.get("path")
        return NoopStreamReader() if path is None else FileReader(path)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoopStreamWriter:
        """Return the stream writer."""
        return NoopStreamWriter()


@dataclass(frozen=True)
class Batches(InputPartition):
    """Batches of a file, by their numbers."""

    path: str
    first: int
    end: int


class ReadyReader(DataSourceReader):
    """Yields what a file of Arrow batches holds, as it lies in memory."""

    def __init__(self, path: str, partitions: int) -> None:
        with pa.memory_map(path) as source:
            count = pa.ipc.open_file(source).num_record_batches
        cuts = [count * number // partitions for number in range(partitions + 1)]
        self._partitions = [Batches(path, first, end) for first, end in pairwise(cuts)]

    def partitions(self) -> list[Batches]:
        """Return equal parts."""
        return self._partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one part."""
        assert isinstance(partition, Batches)
        file = pa.ipc.open_file(pa.memory_map(partition.path))
        return (file.get_batch(number) for number in range(partition.first, partition.end))


class ReadyDataSource(DataSource):
    """``format("bench_ready")``; its options are `path` and `partitions`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "bench_ready"

    def schema(self) -> StructType:
        """Return the schema of the file."""
        with pa.memory_map(self.options["path"]) as source:
            return from_arrow_schema(pa.ipc.open_file(source).schema)

    def reader(self, schema: StructType) -> ReadyReader:
        """Return the batch reader."""
        return ReadyReader(self.options["path"], int(self.options["partitions"]))
