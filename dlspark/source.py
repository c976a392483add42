"""The Spark data source ``dlog``: checks what it is given, and makes readers and writers.

Readers and writers, and with them pyarrow, are imported when they are asked for: Spark imports
every ``pyspark_*`` module in the process that looks data sources up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from dlcore.errors import ConfigurationError
from dlspark.options import MetadataOptions, Mode, ReadOptions, WriteOptions
from dlspark.schema import (
    check_read_schema,
    check_write_schema,
    options_of,
    read_schema_of,
    with_options,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from dlspark.batch import DlogWriter
    from dlspark.schema import WriteColumns
    from dlspark.stream import DlogStreamReader, DlogStreamWriter


class DistributedLogDataSource(DataSource):
    """``format("dlog")`` of batch and stream, reading and writing.

    Its options are described in `dlspark.options`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "dlog"

    def schema(self) -> StructType:
        """Return the schema of a read, after a first check of the options."""
        metadata = MetadataOptions.parse(self.options)
        if metadata is not None:
            from dlspark.metadata import schema_of

            return with_options(schema_of(metadata.table), self.options)
        columns = ReadOptions.parse(self.options, Mode.LOAD).columns
        return with_options(read_schema_of(columns), self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        given = options_of(schema, self.options)
        metadata = MetadataOptions.parse(given)
        if metadata is not None:
            from dlspark.metadata import MetadataReader, schema_of

            check_read_schema(schema, schema_of(metadata.table))
            return MetadataReader(metadata)
        from dlspark.batch import batch_reader

        options = ReadOptions.parse(given, Mode.BATCH)
        check_read_schema(schema, read_schema_of(options.columns))
        return batch_reader(options)

    def streamReader(self, schema: StructType) -> DlogStreamReader:
        """Return the reader of a stream."""
        from dlspark.stream import DlogStreamReader

        options = ReadOptions.parse(options_of(schema, self.options), Mode.STREAM)
        check_read_schema(schema, read_schema_of(options.columns))
        return DlogStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DlogWriter:
        """Return the writer of a batch."""
        from dlspark.batch import DlogWriter
        from dlspark.sessions import require_log

        options = WriteOptions.parse(self.options, Mode.BATCH)
        columns = _check_write(options, schema, overwrite=overwrite)
        if options.log is not None:
            require_log(options.address, options.log, create=options.create_log)
        return DlogWriter(options, columns, overwrite=overwrite)

    def streamWriter(
        self,
        schema: StructType,
        overwrite: bool,
    ) -> DlogStreamWriter:
        """Return the writer of a stream."""
        from dlspark.sessions import require_log
        from dlspark.stream import DlogStreamWriter

        options = WriteOptions.parse(self.options, Mode.STREAM)
        columns = _check_write(options, schema, overwrite=overwrite)
        if options.log is not None:
            require_log(options.address, options.log, create=options.create_log)
        return DlogStreamWriter(options, columns, overwrite=overwrite)


def _check_write(options: WriteOptions, schema: StructType, *, overwrite: bool) -> WriteColumns:
    if overwrite and options.log is None:
        raise ConfigurationError(
            "to overwrite, name the log with the option log: which logs the rows of a column log "
            "leave out cannot be told; use append, or write log by log"
        )
    return check_write_schema(schema, needs_log=options.log is None)
