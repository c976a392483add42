"""Bugs of the ZooKeeper store and of registration that named tests catch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.membership import (
    identity as identity_module,
    registration as registration_module,
)
from bookie.membership.registration import Announcement, Looked, Registration
from bookie.membership.registration_driver import Registrar
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata import sending as sending_module, zookeeper as zookeeper_module
from dlcore.metadata.port import Check
from dlcore.metadata.sending import Requests
from dlcore.metadata.watches import Watches
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.metadata.zookeeper_session import KazooConnection, ZooKeeperSession
from tests.fixtures.simulated_store import SimulatedStore
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

_STORE = "dlcore/metadata/test_zookeeper.py"
_CONTRACT = "contracts/test_metadata_store.py"
_REGISTRATION = "bookie/test_registration.py"


@caught_by(f"{_CONTRACT}::test_a_watch_is_called_for_every_kind_of_change")
def a_watch_speaks_once() -> Iterator[None]:
    """ZooKeeper's watches fire once: they are not armed again."""

    def once(self: Watches, path: str) -> None:
        if path in self._paths:
            self._make_all_due(path)

    with patch.object(Watches, "_on_change", once):
        yield


@caught_by(f"{_CONTRACT}::test_a_watch_is_called_for_every_kind_of_change")
def children_are_not_watched() -> Iterator[None]:
    """A watch hears of the node's data and not of its children."""

    def data_only(self: Watches, path: str) -> None:
        if self._is_connected():
            self._requests.enqueue(
                f"watch {path}", lambda: self._client.exists_async(path, watch=self._watcher)
            ).add_done_callback(partial(self._on_armed, path))

    with patch.object(Watches, "_arm", data_only):
        yield


@caught_by(f"{_CONTRACT}::test_a_watch_survives_the_session")
def watches_end_with_the_session() -> Iterator[None]:
    """A new session has no watches, and no one arms them again."""

    def forget(self: Watches) -> None:
        """Set none."""

    with patch.object(Watches, "set_all", forget):
        yield


@caught_by(f"{_CONTRACT}::test_multi_is_all_or_nothing")
def the_wrong_operation_is_blamed() -> Iterator[None]:
    """A transaction fails with what ZooKeeper says of the operations that were rolled back."""
    with patch.object(zookeeper_module, "_NOT_TO_BLAME", ()):
        yield


@caught_by(f"{_CONTRACT}::test_put_compares_and_sets")
def writes_have_no_version() -> Iterator[None]:
    """A compare-and-set only sets."""
    put = ZooKeeperStore.put

    async def blind(self: ZooKeeperStore, path: str, value: bytes, *, version: int) -> int:
        return await put(self, path, value, version=-1)

    with patch.object(ZooKeeperStore, "put", blind):
        yield


@caught_by(f"{_CONTRACT}::test_ephemeral_nodes_vanish_when_their_session_is_closed")
def ephemeral_nodes_stay() -> Iterator[None]:
    """A node that should die with its session lives for ever."""
    create = ZooKeeperStore.create

    async def for_ever(self: ZooKeeperStore, path: str, value: bytes = b"", **how: Any) -> None:
        await create(self, path, value, **{**how, "ephemeral": False})

    with patch.object(ZooKeeperStore, "create", for_ever):
        yield


@caught_by(f"{_STORE}::test_a_lost_reply_is_unknown_and_the_write_is_not_sent_again")
def a_lost_write_is_sent_again() -> Iterator[None]:
    """Section 3.4: the second one meets the first, and learns that it lost."""
    with patch.object(Requests, "write", Requests.read):
        yield


@caught_by(f"{_STORE}::test_a_read_is_sent_again")
def a_lost_read_is_an_error() -> Iterator[None]:
    """Every reconnection ends all readers."""
    with patch.object(sending_module, "_READ_ATTEMPTS_MAX", 1):
        yield


@caught_by(f"{_STORE}::test_a_session_that_expires_while_the_store_is_cut_off")
def an_expiry_is_not_reported() -> Iterator[None]:
    """#4879: ephemeral nodes are gone, and no one makes them again."""
    on_state = ZooKeeperSession._on_state

    def quiet(self: ZooKeeperSession, state: str, token: str, is_dead: bool) -> None:
        from kazoo.protocol.states import KazooState

        if state != KazooState.LOST:
            on_state(self, state, token, is_dead)

    with patch.object(ZooKeeperSession, "_on_state", quiet):
        yield


@caught_by(f"{_STORE}::test_a_dead_connection_thread_is_replaced")
def a_dead_connection_thread_stays_dead() -> Iterator[None]:
    """kazoo's thread may die of an error of its own: the store is cut off for ever."""

    async def nothing(self: KazooConnection) -> None:
        """Start no other one."""

    with patch.object(KazooConnection, "_revive", nothing):
        yield


@caught_by(
    "dlcore/metadata/test_memory.py::test_a_session_never_goes_back_and_a_new_one_begins_with_all"
)
def a_new_connection_shows_older_data() -> Iterator[None]:
    """The store in memory: another server is behind what the session has read."""
    reconnect = SimulatedStore.reconnect

    def elsewhere(self: SimulatedStore) -> None:
        from dlcore.metadata.tree import Tree

        self._server.view = Tree()
        self._server.view.apply([], 0)
        reconnect(self)

    with patch.object(SimulatedStore, "reconnect", elsewhere):
        yield


@caught_by(f"{_REGISTRATION}::test_a_bookie_without_a_cookie_is_not_registered")
def bookies_without_a_cookie_register() -> Iterator[None]:
    """#515: one that was decommissioned comes back unnoticed."""
    multi = SimulatedStore.multi

    async def lenient(self: SimulatedStore, ops: Any) -> None:
        await multi(self, [each for each in ops if not isinstance(each, Check)])

    with patch.object(SimulatedStore, "multi", lenient):
        yield


@caught_by(f"{_REGISTRATION}::test_a_registration_survives_its_session")
def a_registration_ends_with_its_session() -> Iterator[None]:
    """#3306: a bookie whose session expired is never seen again."""

    with patch.object(Registrar, "_watch", lambda _: None):
        yield


@caught_by(f"{_REGISTRATION}::test_a_restart_on_the_same_port_does_not_lean_on_the_old_session")
def a_registration_leans_on_an_old_session() -> Iterator[None]:
    """A node that looks right is kept, although it dies with the session before."""
    looked = Registration._looked

    def lean(self: Registration, seen: Looked) -> Any:
        node = seen.nodes.get(self.nodes.available)
        if node is not None and self.announced.address.encode() in node.value:
            self._own_session = seen.session
            return self._settled()
        return looked(self, seen)

    with patch.object(Registration, "_looked", lean):
        yield


@caught_by(f"{_REGISTRATION}::test_another_incarnation_under_the_name_is_waited_out_or_refused")
def any_registration_under_the_name_is_taken_over() -> Iterator[None]:
    """#2612: two incarnations push each other out, and neither says so."""
    with patch.object(Announcement, "require_own", lambda *_, **__: None):
        yield


@caught_by(f"{_REGISTRATION}::test_a_change_of_space_never_unregisters")
def a_change_of_space_unregisters() -> Iterator[None]:
    """Section 8: the node is made anew whenever the disk's space changes."""
    with patch.object(registration_module, "decode", _without_owner):
        yield


def _without_owner(kind: type[Any], value: bytes, *, source: str) -> Any:
    from msgspec.structs import replace

    from dlcore.metadata.stored import decode

    found = decode(kind, value, source=source)
    return replace(found, session="") if kind is BookieRegistration else found


@caught_by(f"{_REGISTRATION}::test_folders_that_are_not_this_bookies_are_refused")
def any_folder_is_taken() -> Iterator[None]:
    """#2091: a bookie starts on the folder of another one."""
    with patch.object(identity_module, "_check_folder", lambda *_, **__: None):
        yield


@caught_by(f"{_REGISTRATION}::test_a_cluster_that_lost_or_changed_the_cookie_is_noticed")
def the_cluster_is_not_asked_for_the_cookie() -> Iterator[None]:
    """#515: a bookie of which the cluster knows nothing starts with its old data."""
    with patch.object(identity_module, "_check_remote", lambda *_: None):
        yield


@caught_by(f"{_REGISTRATION}::test_a_crash_at_any_step_of_the_first_start_heals")
def a_first_start_leaves_no_provisional_cookie() -> Iterator[None]:
    """#4812: a start that was interrupted cannot be distinguished from a lost disk."""
    with patch.object(identity_module, "_PROVISIONAL_FILE", "cookie"):
        yield


@caught_by(f"{_REGISTRATION}::test_a_registration_moves_with_the_state_and_goes_with_the_bookie")
def a_full_bookie_stays_writable() -> Iterator[None]:
    """Section 4.6: writers go on choosing a bookie that refuses them."""
    with patch.object(Registrar, "set_read_only", lambda *_, **__: None):
        yield
