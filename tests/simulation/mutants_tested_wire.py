"""Bugs of frames and of reading and adding many entries at once, which tests catch by name.

The simulation masks them: ledger clients verify each entry and turn to another replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import crc32c

from bookie.files import entry_reader as entry_reader_module
from bookie.files.commit_queue import UnsealedFiles
from bookie.files.index import LedgerState
from bookie.serving.receive_budget import ReceiveRoom
from bookie.serving.session import Patience
from dlcore.wire import frames as frames_module, receiving as memory_module
from dlcore.wire.client import _Reading
from dlcore.wire.receiving import Assembly, Frame
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dlcore.wire.frames import FrameRun


@caught_by("dlcore/wire/test_ends.py::test_a_big_payload_is_received_in_place")
def a_short_read_is_taken_for_a_frame() -> Iterator[None]:
    """The first received part of a payload is taken for all of it."""

    def take_partial(self: Assembly) -> Frame | None:
        partial = self._partial
        assert partial is not None
        self._partial = None
        return Frame(partial.header, partial.fields, partial.payload.toreadonly())

    with patch.object(Assembly, "_take_partial", take_partial):
        yield


@caught_by(
    "bookie/test_receive_budget.py::"
    "test_adds_that_have_begun_to_come_are_bounded_over_all_connections"
)
def what_has_begun_to_come_is_in_no_budget() -> Iterator[None]:
    """Each connection gets memory for the add that it sends, however many there are."""
    with patch.object(ReceiveRoom, "take", lambda *_: True):
        yield


@caught_by("bookie/test_receive_budget.py::test_a_stopped_sender_is_given_up_while_others_wait")
def who_stops_in_the_middle_holds_up_the_others() -> Iterator[None]:
    """A client that is not heard of holds its memory as long as it likes."""
    with patch.object(Patience, "sends_slowly", lambda *_, **__: False):
        yield


@caught_by("dlcore/wire/test_receiving.py::test_memory_in_use_is_not_given_again")
def memory_in_use_is_received_into() -> Iterator[None]:
    """A large payload is received over one that a client still looks at."""
    with patch.object(memory_module._Kept, "is_free", lambda _: True):
        yield


@caught_by(
    "bookie/test_follow.py::test_an_entry_that_is_not_durable_yet_holds_back_one_who_is_far_behind"
)
def who_is_far_behind_sees_what_is_not_durable() -> Iterator[None]:
    """Many entries at once are sent to a follower before they are durable."""
    with patch.object(UnsealedFiles, "is_durable_at", lambda *_: True):
        yield


@caught_by(
    "bookie/test_entry_runs.py::test_damage_among_many_entries_is_found_and_belongs_to_one_of_them"
)
def many_entries_are_sent_unread() -> Iterator[None]:
    """A bookie verifies entries one by one only."""
    with patch.object(entry_reader_module, "is_sound", lambda *_, **__: True):
        yield


@caught_by("dlcore/wire/test_frames.py::test_frames_cut_in_the_wrong_places_are_found")
def one_checksum_stands_for_all_frames() -> Iterator[None]:
    """The ledger and the ends of entries are ignored when their sum is right."""

    def headers(run: FrameRun, *_: Any) -> NDArray[Any] | None:
        if crc32c.crc32c(run.payload):
            return None
        headers = frames_module._pieces(run.payload, run.bounds[:-1], frames_module._header_dtype())
        return headers.view(frames_module._headers_dtype())

    with patch.object(frames_module, "_sound_headers", headers):
        yield


@caught_by("bookie/test_entry_runs.py::test_doubt_about_one_entry_makes_each_one_checked_alone")
def entries_that_come_together_pass_the_fence() -> Iterator[None]:
    """Only a single add is refused on a fenced ledger."""
    with patch.object(LedgerState, "accepts", lambda *_, **__: True):
        yield


@caught_by("dlcore/wire/test_client.py::test_a_read_that_is_not_answered_ends_by_the_read_time_out")
def reads_are_waited_for_for_ever() -> Iterator[None]:
    """Section 3.1: a bookie that lives and does not answer holds up recovery, however long."""
    wait = _Reading.next

    async def patient(self: _Reading, _: float | None) -> Any:
        return await wait(self, None)

    with patch.object(_Reading, "next", patient):
        yield
