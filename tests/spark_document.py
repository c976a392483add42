"""The parts of the pages on Spark about options and schemas, made of the tables in the code.

``python -m tests.spark_document`` writes them anew between their marks; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlspark.metadata import COLUMNS, schema_of
from dlspark.option_table import OPTIONS, Option, Use
from dlspark.options import MetadataTable
from dlspark.schema import READ_SCHEMA
from tests.fixtures.made_parts import remade

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.types import StructType

FOLDER = Path(__file__).resolve().parents[1] / "docs"
DOCUMENTS = [FOLDER / f"spark-{each}.md" for each in ("read", "sql", "write")]


def render(text: str) -> str:
    """Return the document with what stands between its marks made anew."""
    return remade(text, _PARTS)


def _options(of: set[Use], batch: Use, stream: Use) -> str:
    lines = ["| option | for | values | default | meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        if of & set(option.uses):
            uses = _uses(option, batch, stream)
            values, default = option.values.replace("|", "\\|"), option.default or "—"
            lines.append(f"| `{option.name}` | {uses} | {values} | {default} | {option.meaning} |")
    return "\n".join(lines) + "\n"


def _uses(option: Option, batch: Use, stream: Use) -> str:
    if batch in option.uses and stream in option.uses:
        return "both"
    if batch in option.uses:
        return "batch"
    return "stream" if stream in option.uses else "tables"


def _schema(schema: StructType) -> str:
    return ", ".join(f"`{field.name} {field.dataType.simpleString()}`" for field in schema.fields)


def _tables() -> str:
    lines = ["| `metadata` | columns |", "|---|---|"]
    lines += [f"| `{table.value}` | {_schema(schema_of(table))} |" for table in MetadataTable]
    assert len(lines) == 2 + len(COLUMNS)
    return "\n".join(lines) + "\n"


_PARTS: dict[str, Callable[[], str]] = {
    "reading": lambda: _options(
        {Use.BATCH_READ, Use.STREAM_READ, Use.METADATA}, Use.BATCH_READ, Use.STREAM_READ
    ),
    "writing": lambda: _options(
        {Use.BATCH_WRITE, Use.STREAM_WRITE}, Use.BATCH_WRITE, Use.STREAM_WRITE
    ),
    "records": lambda: _schema(READ_SCHEMA) + "\n",
    "tables": _tables,
}


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(render(document.read_text(encoding="utf-8")), encoding="utf-8")
