"""A session with ZooKeeper: kazoo's client, the states of the session, and its end.

kazoo has its own threads; `call_soon_threadsafe` passes its callbacks to the event loop, which
never waits for kazoo.  `sending.py` has how requests reach it, `watches.py` how changes are heard.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from dlcore.base.background import BackgroundTasks, outcome_of, reported_to_callers
from dlcore.base.errors import AlreadyClosedError, ConfigurationError, MetadataConnectionError
from dlcore.metadata.answers import ConnectionHandler, in_thread
from dlcore.metadata.port import SessionState, StoreFigures
from dlcore.metadata.requests import session_token_of
from dlcore.metadata.sending import Requests
from dlcore.metadata.session_states import SessionStates
from dlcore.metadata.watches import Watches

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.access.zookeeper import ZooKeeperAccess


class KazooLog(logging.LoggerAdapter[logging.Logger]):
    """The log of one client of kazoo.

    If another service listens at the port, kazoo tries again and again, and logs each attempt with
    a traceback of its own code.  Until there is a session, these messages go to the debug level.
    """

    def __init__(self, has_session: Callable[[], bool]) -> None:
        logger = logging.getLogger(__name__)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)  # the store reports what matters, once
        super().__init__(logger, {})
        self._has_session = has_session
        self._has_failed = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the message, at the debug level if it is about an attempt to connect."""
        if any(isinstance(each, Auth) for each in args):
            return  # it has the password
        if level >= logging.ERROR and not self._has_session():
            self._has_failed = True
            level = logging.DEBUG
        super().log(level, msg, *args, **kwargs)

    def explain(self, *, tls: str = "") -> str:
        """Return a hint if an attempt failed because another service answered, else nothing.

        With `tls`, the reason for which TLS failed, that is the hint.
        """
        if tls:
            return f"; {tls}"
        if not self._has_failed:
            return ""
        return "; what answers there is not ZooKeeper: is it the port of a bookie or a proxy?"


_RECONNECT_DELAY_MAX_S = 1.0
"""kazoo's own default grows to an hour."""


def client_of(
    servers: str,
    access: ZooKeeperAccess,
    log: KazooLog,
    *,
    session_timeout_s: float,
) -> Any:
    """Return a client that has not connected yet.

    Raises:
        ConfigurationError: a file of `access` cannot be read, or has wrong content.
    """
    tls = None
    if access.tls is not None:
        from dlcore.base.access.tls_in_use import TlsInUse  # not needed without TLS

        tls = TlsInUse(access.tls)
    handler, credentials = ConnectionHandler(tls), access.credentials()
    known: dict[str, Any] = {}
    if credentials is not None:
        # Not the ACL of all authenticated clients: the name in a client certificate would count,
        # too, and differs from process to process.
        user, _, password = credentials.secret.partition(":")
        known["auth_data"] = [("digest", credentials.secret)]
        known["default_acl"] = [make_digest_acl(user, password, all=True)]
    return KazooClient(
        hosts=servers,
        timeout=session_timeout_s,
        handler=handler,
        connection_retry=KazooRetry(
            max_tries=-1, max_delay=_RECONNECT_DELAY_MAX_S, sleep_func=handler.sleep_func
        ),
        logger=log,
        **known,
    )


logger = logging.getLogger(__name__)


class KazooConnection:
    """One client of kazoo with its threads, from its start until it ends, or its process does.

    It passes what kazoo's threads report to the event loop.

    Args:
        servers: the servers to connect to, one after the other.
        access: certificates, and the user.
        session_timeout_s: after this long without contact the session is over.
        has_session: whether there was a session yet; its log asks.
    """

    def __init__(
        self,
        servers: str,
        access: ZooKeeperAccess,
        *,
        session_timeout_s: float,
        has_session: Callable[[], bool],
    ) -> None:
        self.servers = servers
        self._loop = asyncio.get_running_loop()
        self._log = KazooLog(has_session)
        self.client = client_of(servers, access, self._log, session_timeout_s=session_timeout_s)
        self._handler: ConnectionHandler = self.client.handler
        self._revivals = BackgroundTasks()
        self._is_stopping = False  # by `end`, or at exit in another thread
        self._pid = os.getpid()
        _left_open.add(self)

    def start(self, on_state: Callable[[str, str, bool], None]) -> None:
        """Begin to connect; report each state of the connection.

        Args:
            on_state: gets the state, the token of its session, and whether kazoo's thread died.
        """
        self.client.add_listener(partial(self._on_kazoo_state, on_state))
        self.client.start_async()

    def _on_kazoo_state(self, on_state: Callable[[str, str, bool], None], state: str) -> None:
        # In kazoo's connection thread, so the session id belongs to this state.
        session = self.client.client_id
        token = "" if session is None else session_token_of(session[0])
        is_dead = self.client.client_state == KeeperState.CLOSED
        self.post(on_state, state, token, is_dead)

    def post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call something on the event loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop ended without aclose: there is no receiver.
            if not self._loop.is_closed():
                raise

    def revive(self) -> None:
        """Start kazoo's thread again, which died, unless it was stopped."""
        if not self._is_stopping:
            self._revivals.start(self._revive(), name="reviving kazoo")

    async def _revive(self) -> None:
        logger.error("kazoo's thread died, servers=%s; to do: report this defect", self.servers)
        await in_thread(self.client.start_async)

    def explain(self) -> str:
        """Return a hint why no attempt to connect succeeded, if there is one."""
        return self._log.explain(tls=self._handler.tls_failure)

    def require_own_process(self) -> None:
        """Raise if it was opened in another process, whose threads are not in this one."""
        if self._pid != os.getpid():
            raise ConfigurationError(
                f"this connection to ZooKeeper was opened in process {self._pid} and used after a "
                f"fork, in process {os.getpid()}: open the namespace in the process that uses it"
            )

    async def end(self) -> None:
        """End the session and the threads."""
        await self._revivals.finish()
        await in_thread(self._stop)
        _left_open.discard(self)  # not earlier: a child forked meanwhile must forget it

    def _stop(self) -> None:
        self._is_stopping = True
        if not self.client.connected:
            self._handler.give_up()
        try:
            self.client.stop()
            self.client.close()
        except (KazooException, OSError) as error:
            # The session ends by its time-out then; the threads are daemons.
            logger.info("kazoo did not stop cleanly: servers=%s error=%r", self.servers, error)

    def stop_at_exit(self) -> None:
        """End the session in a thread whose caller did not wait, unless it is ending."""
        if not self._is_stopping:
            self._stop()

    def forget(self) -> None:
        """Leave the session to the parent process, also at exit."""
        # A thread that is gone here may have held a lock that it would use.
        atexit.unregister(self._handler.stop)


_left_open: weakref.WeakSet[KazooConnection] = weakref.WeakSet()


def _end_sessions() -> None:
    """End at exit the sessions that are still open, so that their locks are free at once."""
    for connection in list(_left_open):
        connection.stop_at_exit()


def _forget_sessions() -> None:
    for connection in list(_left_open):
        connection.forget()
    _left_open.clear()


atexit.register(_end_sessions)
os.register_at_fork(after_in_child=_forget_sessions)


class ZooKeeperSession:
    """The session of one store: its state, over any number of connections, and its end.

    The store sends by `requests`, and hears of changes by `watches`.
    """

    def __init__(self, servers: str, *, session_timeout_s: float, access: ZooKeeperAccess) -> None:
        self.token = ""
        """Text that differs between any two sessions."""
        self.figures = StoreFigures()
        self.states = SessionStates(SessionState.SUSPENDED, self.figures)
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._closings = BackgroundTasks(reported_to_callers)
        self._is_connected = asyncio.Event()
        self.kazoo = KazooConnection(
            servers,
            access,
            session_timeout_s=session_timeout_s,
            has_session=self._is_connected.is_set,
        )
        self.requests = Requests(
            self.kazoo.client,
            self.figures.requests,
            timeout_s=session_timeout_s,
            is_connected=self._may_send,
            require_open=self.require_open,
            post=self.kazoo.post,
        )
        self.watches = Watches(
            self.kazoo.client,
            self.requests,
            is_connected=self._may_send,
            post=self.kazoo.post,
        )

    def __str__(self) -> str:
        return f"{self.kazoo.servers} {self.token} {self.states.now.name}"

    async def open(self, timeout_s: float) -> None:
        """Wait for the first connection.

        Raises:
            MetadataConnectionError: no server answered in time, and the session is closed.
        """
        try:
            self.kazoo.start(self._on_state)
            async with asyncio.timeout(timeout_s):
                await self._is_connected.wait()
        except TimeoutError:
            await self.aclose()
            raise MetadataConnectionError(
                f"no ZooKeeper answers at {self.kazoo.servers} (waited {timeout_s:g} s)"
                + self.kazoo.explain()
            ) from None
        # Also if it is cancelled: kazoo's threads would go on.
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the session; its ephemeral nodes vanish at once."""
        if self._closing is None:
            self._is_closed = True
            self.states.close()
            self.watches.close()
            self._closing = self._closings.start(self._close())
        # A cancelled caller must not leave kazoo's threads behind.
        await outcome_of(self._closing)

    async def _close(self) -> None:
        await self.kazoo.end()
        self.requests.close()

    def _on_state(self, state: str, token: str, is_dead: bool) -> None:
        if self._is_closed:
            return
        if state == KazooState.CONNECTED:
            self.token = token
            self._set_state(SessionState.CONNECTED)
            self.watches.set_all()
            self._is_connected.set()
            self.requests.pump()
        elif state == KazooState.SUSPENDED:
            self._set_state(SessionState.SUSPENDED)
        else:
            self._set_state(SessionState.EXPIRED)
            if is_dead:
                self.kazoo.revive()

    def _set_state(self, state: SessionState) -> None:
        about = (state.value, self.kazoo.servers, self.token)
        if state is SessionState.CONNECTED:
            logger.info("metadata session: state=%s servers=%s session=%s", *about)
        else:
            logger.warning(
                "metadata session: state=%s servers=%s session=%s; to do: wait, or see to the "
                "metadata server",
                *about,
            )
        self.states.become(state)

    def _may_send(self) -> bool:
        return self.states.now is SessionState.CONNECTED

    def require_open(self) -> None:
        """Raise if it is closed, or was opened in another process."""
        self.kazoo.require_own_process()
        if self._is_closed:
            raise AlreadyClosedError("the metadata store is closed")
