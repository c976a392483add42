"""The writing half of the entry log: each record gets its position, and full files are rolled.

A record gets its position when it is accepted, so the order of acceptance is the order on disk.
`EntryLog.commits` knows which records are durable, and `unsealed` knows which files are not sealed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import crc32c
import numpy as np

from bookie.files.commit_driver import GroupCommit
from bookie.files.entry_runs import interleaved
from bookie.files.format import (
    NOTE_BYTES,
    RECORD_HEADER_BYTES,
    RecordType,
    decode_file_header,
    encode_entry_headers,
    encode_fence,
    encode_file_header,
    encode_garbage,
    encode_lac,
    encode_record_header,
    file_header_bytes,
)
from bookie.files.index import FileIndex
from bookie.files.log_state import EntryLogEvents, UnsealedFile, UnsealedFiles
from bookie.files.replay import WritePosition
from dlcore.wire.frames import frame_check

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from bookie.config import StorageConfig
    from bookie.disks.port import Disk
    from bookie.files.replay import OpenedLog
    from dlcore.wire.frames import BytesLike, EntryFrame, FollowingFrames, FrameRun


_SECTOR_BYTES = 4096
"""Most bytes that a device loses at once."""
_MARK_BYTES = 2 * RECORD_HEADER_BYTES + _SECTOR_BYTES


class EntryLog:
    """Accepts records, on one event loop."""

    def __init__(
        self,
        disk: Disk,
        config: StorageConfig,
        opened: OpenedLog,
        *,
        owner: bytes,
        new_life: Callable[[], str],
        events: EntryLogEvents,
    ) -> None:
        self._config = config
        self._owner = owner
        self._new_life = new_life
        current = UnsealedFile(opened.index, opened.position, opened.content)
        current.file = opened.file
        current.is_noted = opened.is_noted
        self.unsealed = UnsealedFiles(current)
        self.commits = GroupCommit(disk, config, self.unsealed, events)
        self._records_ends = {each.number: each.records_end for each in opened.sealed}
        self.is_marked = opened.position.sequence == 0
        """Whether the last accepted record is a MARK, or there is no record."""
        self._roll_number = 0
        """The file with this number accepts no more records."""

    @property
    def claimed_bytes(self) -> int:
        """Bytes that accepted records still cost: their own, footers, a new file, a mark."""
        return (
            self.commits.queue.pending_bytes
            + self.unsealed.owed_footer_bytes
            + self.unsealed.current.index.footer_bytes
            + file_header_bytes(len(self._records_ends) + len(self.unsealed))
            + NOTE_BYTES
            + _MARK_BYTES
        )

    def append_entry(self, frame: EntryFrame) -> asyncio.Future[None]:
        """Accept a verified frame; the future is done when it is durable."""
        self.copy_entry(frame)
        return self.commits.watch()

    def append_run(self, run: FrameRun, what: FollowingFrames) -> asyncio.Future[None] | None:
        """Accept verified frames of new entries; the future is done once all are durable.

        All of them belong to one ledger.

        Returns None, and accepts nothing, if they do not fit into the current file and one batch.
        """
        self.commits.check()
        current, config = self.unsealed.current, self._config
        position, index = current.position, current.index
        count = len(run)
        size = len(run.payload) + count * RECORD_HEADER_BYTES
        if (
            size > config.batch_bytes_max
            or position.offset + size > config.file_bytes_max
            or index.entry_count + count > config.file_entries_max
            or position.sequence + count > config.file_records_max
            or index.number == self._roll_number
        ):
            return None
        # Nothing below awaits: the records get their bytes before the batch is written.
        batch = self.commits.queue.batch_for(size, is_apart=False)
        sizes = run.sizes
        headers = encode_entry_headers(
            sizes,
            what.checks,
            sequence=position.sequence,
            number=index.number,
            offset=position.offset,
            batch_offset=batch.offset,
            seed=position.header.seed,
        )
        batch.buffers.append(interleaved(headers, run))
        batch.ledger_ids.add(what.ledger_id)
        index.add_entries(
            ledger_id=what.ledger_id,
            first_entry_id=what.first_entry_id,
            offsets=headers["offset"].astype(np.int64) + RECORD_HEADER_BYTES,
            sizes=sizes,
            last_add_confirmed=int(what.last_add_confirmed.max()),
        )
        position.offset += size
        position.sequence += count
        self.is_marked = False
        self.commits.accept(size)
        return self.commits.watch()

    def copy_entry(self, frame: EntryFrame) -> None:
        """Accept a verified frame without a future; a flush makes it durable."""
        current = self._append(
            RecordType.ENTRY,
            frame.data,
            payload_crc=frame_check(frame.data),
            ledger=frame.ledger_id,
        )
        current.index.add_entry(
            ledger_id=frame.ledger_id,
            entry_id=frame.entry_id,
            offset=current.position.offset - len(frame.data),
            size=len(frame.data),
            last_add_confirmed=frame.last_add_confirmed,
        )

    def append_fence(self, ledger_id: int) -> None:
        """Accept a fence."""
        self._append_small(RecordType.FENCE, encode_fence(ledger_id), ledger_id).note_fence(
            ledger_id
        )

    def append_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        """Accept an explicit last add confirmed; the future is done when it is durable.

        The record is written together with the next other record, or at `GroupCommit.wake`.
        """
        self.copy_lac(ledger_id, last_add_confirmed)
        return self.commits.watch()

    def copy_lac(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Accept an explicit last add confirmed without a future."""
        payload = encode_lac(ledger_id, last_add_confirmed)
        current = self._append(
            RecordType.LAC,
            payload,
            payload_crc=crc32c.crc32c(payload),
            ledger=ledger_id,
            is_urgent=False,
        )
        current.index.note_lac(ledger_id, last_add_confirmed)

    def append_garbage(self, numbers: Sequence[int]) -> None:
        """Accept a record that declares sealed files garbage, before they are deleted."""
        index = self._append_small(RecordType.GARBAGE, encode_garbage(numbers), None)
        index.deleted_files.extend(numbers)
        for number in numbers:
            del self._records_ends[number]

    def append_mark(self) -> None:
        """Accept records that prove, once written, that all records before them were durable.

        They get a batch of their own: in one batch with the records before them they would prove
        nothing.  The second one begins a sector, so that the loss of one sector does not lose the
        last entry together with its proof.
        """
        end = self.unsealed.current.position.offset
        padding = bytes(-(end + RECORD_HEADER_BYTES) % _SECTOR_BYTES)
        for payload, is_apart in ((padding, True), (b"", False)):
            self._append(
                RecordType.MARK,
                payload,
                payload_crc=crc32c.crc32c(payload),
                ledger=None,
                is_apart=is_apart,
            )
        self.is_marked = True

    def roll_from(self, number: int) -> None:
        """Continue in a new file, if the current file is `number`.

        The newest file is read whole at a start, so one with a damaged record could not be opened
        again.  A sealed file is known by its footer.
        """
        is_current = number == self.unsealed.current.index.number != self._roll_number
        if is_current and not self.commits.has_failed:
            self._roll_number = number
            self.append_mark()

    def _append_small(self, kind: RecordType, payload: bytes, ledger: int | None) -> FileIndex:
        crc = crc32c.crc32c(payload)
        return self._append(kind, payload, payload_crc=crc, ledger=ledger).index

    def _append(
        self,
        kind: RecordType,
        payload: BytesLike,
        *,
        payload_crc: int,
        ledger: int | None,
        is_apart: bool = False,
        is_urgent: bool = True,
    ) -> UnsealedFile:
        self.commits.check()
        size = RECORD_HEADER_BYTES + len(payload)
        self._roll_if_full(size)
        current = self.unsealed.current
        position = current.position
        batch = self.commits.queue.batch_for(size, is_apart=is_apart)
        header = encode_record_header(
            kind,
            payload_bytes=len(payload),
            payload_crc=payload_crc,
            sequence=position.sequence,
            number=current.index.number,
            offset=position.offset,
            batch_offset=batch.offset,
            seed=position.header.seed,
        )
        batch.buffers += (header, payload)
        if ledger is not None:
            batch.ledger_ids.add(ledger)
        position.offset += size
        position.sequence += 1
        self.is_marked = False
        self.commits.accept(size, is_urgent=is_urgent)
        return current

    def _roll_if_full(self, size: int) -> None:
        """Direct the next records to a new file, which the writer task creates later."""
        current = self.unsealed.current
        position = current.position
        is_full = (
            position.offset + size > self._config.file_bytes_max
            or current.index.entry_count >= self._config.file_entries_max
            or position.sequence >= self._config.file_records_max
            or current.index.number == self._roll_number
        )
        # A file without records is never full: a record larger than a file gets one of its own.
        if not is_full or position.sequence == 0:
            return
        # The header of a file names all others with their ends, so that a start notices a loss.
        self._records_ends[current.index.number] = position.offset
        number = current.index.number + 1
        content = encode_file_header(
            number, owner=self._owner, life=self._new_life(), live_files=self._records_ends
        )
        header = decode_file_header(memoryview(content), number=number, owner=self._owner)
        position = WritePosition(header=header, offset=header.size, sequence=0)
        self.unsealed.roll(UnsealedFile(FileIndex(number), position, content))
