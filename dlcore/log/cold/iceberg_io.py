"""Files of Iceberg tables in the store of the tier, for the library pyiceberg.

A file is written once, where there is none, and is on disk when its commit is asked for: the
library's own files leave that to the system.  The library deletes manifests after a commit that the
catalog refused.  Here they stay, because the commit may have been made: if the answer to a request
is lost, the request is sent again, and the catalog refuses the second one.
"""

from __future__ import annotations

import io

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from dlcore.log.cold import stores
from dlcore.log.cold.iceberg_format import METADATA_SUFFIX


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
            stores.delete(url)


class _Input(InputFile):
    def __len__(self) -> int:
        return _size_of(self.location)

    def exists(self) -> bool:
        return stores.size_of(self.location) is not None

    def open(self, seekable: bool = True) -> InputStream:
        found = stores.read_whole(self.location)
        if found is None:
            raise FileNotFoundError(self.location)
        return io.BytesIO(found)


class _Output(OutputFile):
    def __len__(self) -> int:
        return _size_of(self.location)

    def exists(self) -> bool:
        return stores.size_of(self.location) is not None

    def to_input_file(self) -> InputFile:
        return _Input(self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Stream(self.location)


def _size_of(location: str) -> int:
    found = stores.size_of(location)
    if found is None:
        raise FileNotFoundError(location)
    return found


class _Stream(io.BytesIO):
    """Bytes that are stored when the stream is closed, unless by an error."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self._location = location
        self._stored = False

    def close(self) -> None:
        if not self._stored:
            self._stored = True
            stores.put_new(self._location, self.getvalue())  # names are new ones
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stored = self._stored or kind is not None
        self.close()
