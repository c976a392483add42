"""The Spark data source ``dlog``: checks options and schemas, and creates readers and writers.

Readers and writers, and with them pyarrow, are imported at first use, because Spark imports every
``pyspark_*`` module in the process that looks up data sources.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from dlcore.base.errors import ConfigurationError
from dlspark.options import MetadataOptions, Mode, ReadOptions, WriteOptions
from dlspark.schema import (
    check_read_schema,
    check_write_schema,
    is_of_bytes,
    is_of_typed,
    options_of,
    read_schema_of,
    with_options,
)

if TYPE_CHECKING:
    import pyarrow as pa
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
        """Return the schema of a read, after a first check of the options.

        The schema of typed logs is looked up.  The read keeps it, even if the logs' schema changes
        later.
        """
        metadata = MetadataOptions.parse(self.options)
        if metadata is not None:
            from dlspark.metadata import schema_of

            return with_options(schema_of(metadata.table), self.options)
        options = ReadOptions.parse(self.options, Mode.LOAD)
        return with_options(_read_schema(options), self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        given = options_of(schema, self.options)
        metadata = MetadataOptions.parse(given)
        if metadata is not None:
            from dlspark.metadata import MetadataReader, schema_of

            check_read_schema(schema, schema_of(metadata.table))
            return MetadataReader(metadata)
        from dlspark.batch import batch_reader

        return batch_reader(_shaped(ReadOptions.parse(given, Mode.BATCH), schema))

    def streamReader(self, schema: StructType) -> DlogStreamReader:
        """Return the reader of a stream."""
        from dlspark.stream import DlogStreamReader

        options = ReadOptions.parse(options_of(schema, self.options), Mode.STREAM)
        return DlogStreamReader(_shaped(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DlogWriter:
        """Return the writer of a batch."""
        from dlspark.batch import DlogWriter

        options = WriteOptions.parse(self.options, Mode.BATCH)
        columns = _check_write(options, schema, overwrite=overwrite)
        return DlogWriter(options, columns, overwrite=overwrite)

    def streamWriter(
        self,
        schema: StructType,
        overwrite: bool,
    ) -> DlogStreamWriter:
        """Return the writer of a stream."""
        from dlspark.stream import DlogStreamWriter
        from dlspark.workers import only_commits

        options = WriteOptions.parse(self.options, Mode.STREAM)
        # Spark creates a writer to plan each micro-batch, and another one to commit it.  The second
        # one does not look up again what the first one has found, to keep triggers short.
        columns = None if only_commits() else _check_write(options, schema, overwrite=overwrite)
        return DlogStreamWriter(options, columns, overwrite=overwrite)


def _read_schema(options: ReadOptions) -> StructType:
    """Return the schema of the rows of the selected logs."""
    from dlspark.reading import find_schema
    from dlspark.typed import read_schema

    found = find_schema(options)
    if found is None:
        if options.include_metadata:
            raise ConfigurationError(
                "option includeMetadata=true is for typed logs: those of bytes have these columns "
                "without it"
            )
        return read_schema_of(options.byte_columns)
    return read_schema(found, options.columns, include_metadata=options.include_metadata)


def _shaped(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Return the options of a read with the shape of rows that Spark expects.

    Only a schema that `_read_schema` did not return is checked: one of the user, or of a table.
    """
    if not is_of_typed(schema):
        if is_of_bytes(schema, options.columns):
            return options
        check_read_schema(schema, _read_schema(options))
    from dlspark.typed import shape_of

    return replace(options, shape=shape_of(schema))


def _check_write(options: WriteOptions, schema: StructType, *, overwrite: bool) -> WriteColumns:
    """Determine whether a write is to typed logs, and prepare its log."""
    if overwrite and options.log is None:
        raise ConfigurationError(
            "an overwrite needs the option log: with a column log it is unknown which logs without "
            "rows to overwrite; use append, or write log by log"
        )
    from dlspark.sessions import find_schemas, find_unsealed, require_logs
    from dlspark.typed import prepare_typed, writes_typed
    from dlspark.workers import freeze_imports

    freeze_imports()
    found: dict[str, pa.Schema | None] = {}
    if options.log is not None and options.transaction is None:
        found = find_unsealed(options.address, options.log)
    elif options.log is not None:
        # The commit decides of a seal, for a repetition adds nothing to what is there.
        found = find_schemas(options.address, [options.log])
    if writes_typed(options, schema.fieldNames(), found):
        return prepare_typed(options, schema, found)
    missing = [] if options.log is None or options.log in found else [options.log]
    if missing and not options.create_log:  # an error about columns would not tell it
        require_logs(options.address, missing)
    if options.merge_schema:
        raise ConfigurationError(
            "option mergeSchema=true: logs of bytes have no schema to add to; leave it out"
        )
    columns = check_write_schema(schema, needs_log=options.log is None)
    if missing:
        require_logs(options.address, missing, create=True)
    return columns
