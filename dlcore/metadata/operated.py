"""The connection with the metadata store, as operators of a server see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.metrics import counter, gauge, histogram
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.health import Check
    from dlcore.base.metrics import Sample, Source
    from dlcore.metadata.port import MetadataStore

CONNECTED = gauge("metadata_connected", "Whether the metadata store answers (1 or 0)")
EXPIRATIONS = counter(
    "metadata_session_expirations_total", "Sessions with the metadata store that were lost"
)
REQUESTS = histogram(
    "metadata_request_seconds", "A request to the metadata store, from the call to the answer"
)
METRICS = (CONNECTED, EXPIRATIONS, REQUESTS)


def source_of(store: MetadataStore) -> Source:
    """Return what gives the samples of a process's connection."""

    def samples() -> Iterator[Sample]:
        yield CONNECTED.of(store.session_state is SessionState.CONNECTED)
        yield EXPIRATIONS.of(store.figures.sessions_lost)
        yield REQUESTS.of(store.figures.requests)

    return samples


def session_check(store: MetadataStore) -> Check:
    """Return the check that the session with the metadata store holds."""

    def check() -> str | None:
        state = store.session_state
        return None if state is SessionState.CONNECTED else f"the session is {state.value}"

    return check
