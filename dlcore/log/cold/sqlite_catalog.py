"""A catalog of Iceberg in a file of SQLite."""

from __future__ import annotations

from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import NullPool, create_engine


class SqliteCatalog(SqlCatalog):
    """Connects for each use, and closes the connection behind it.

    A pool would keep connections to a file that was replaced, and one that a thread uses while the
    catalog is closed would stay open until the garbage collector comes.  To connect to a file takes
    some tens of microseconds.
    """

    def __init__(self, name: str, **properties: Any) -> None:
        try:
            super().__init__(name, **properties)
        finally:
            self.close()  # the connection by which the library looked for its tables
        self.engine = create_engine(self.engine.url, echo=self.engine.echo, poolclass=NullPool)
