"""Files of Iceberg tables in the store of the tier, for the library pyiceberg.

A file is written once, where there is none, and is on disk when its commit is asked for: the
library's own files leave that to the system.  The library deletes manifests after a commit that the
catalog refused; these files do not let it: a catalog also refuses the second one of two requests of
which the first one's answer was lost.
"""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from dlcore.log.cold.iceberg_format import METADATA_SUFFIX
from dlcore.log.cold.stores import place_in_store, sync_file

if TYPE_CHECKING:
    from types import TracebackType


class TierFiles(FileIO):
    """Files of any store that has a tier, by the variables of the environment that it takes."""

    def new_input(self, location: str) -> InputFile:
        """Return a file to read."""
        return _Input(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write."""
        return _Output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete old metadata, which a REST catalog deletes too, but no other file."""
        url = location if isinstance(location, str) else location.location
        if url.endswith(METADATA_SUFFIX):
            import obstore

            with suppress(FileNotFoundError):
                obstore.delete(*place_in_store(url))


class _Input(InputFile):
    def __len__(self) -> int:
        import obstore

        return int(obstore.head(*place_in_store(self.location))["size"])

    def exists(self) -> bool:
        return _exists(self.location)

    def open(self, seekable: bool = True) -> InputStream:
        import obstore

        return io.BytesIO(obstore.get(*place_in_store(self.location)).bytes())


class _Output(OutputFile):
    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        return _exists(self.location)

    def to_input_file(self) -> InputFile:
        return _Input(self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Stream(self.location)


class _Stream(io.BytesIO):
    """Bytes that are stored when the stream is closed, unless by an error."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self._location = location
        self._stored = False

    def close(self) -> None:
        if not self._stored:
            self._stored = True
            import obstore

            store, key = place_in_store(self._location)
            # Names are new ones; in one request, as the tier's objects are.
            obstore.put(store, key, self.getvalue(), mode="create", use_multipart=False)
            if self._location.startswith("file:"):
                sync_file(Path("/", key))
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stored = self._stored or kind is not None
        self.close()


def _exists(location: str) -> bool:
    import obstore

    try:
        obstore.head(*place_in_store(location))
    except FileNotFoundError:
        return False
    return True
