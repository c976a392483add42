"""Appends to several logs, staged on bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.appends import AtomicAppends
from dlcore.backends.direct.opened_namespace import DirectOpenedNamespace
from dlcore.log.metadata.commit_records import last_version, list_commits

if TYPE_CHECKING:
    from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
    from dlcore.log.staging.append import DirectStagedAppend
    from dlcore.log.staging.writer import DirectStagingWriter


class DirectAppends(DirectOpenedNamespace, AtomicAppends):
    """Appends whose ledgers belong to this process until they are committed."""

    @override
    async def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,
        strict: bool = False,
        after: int | None = None,
        token: str | None = None,
    ) -> DirectStagedAppend:
        # Loaded here, because most commands of `dlog` append nothing.
        from dlcore.log.staging.append import DirectStagedAppend

        self._require_open()
        return DirectStagedAppend(
            self.log_context,
            self.staging_owner,
            identity,
            version,
            shared=shared,
            run=run,
            lock_timeout_s=(
                self.log_context.config.lock_timeout_s if lock_timeout_s is None else lock_timeout_s
            ),
            config=self.log_context.config,
            keep_record=keep_record,
            strict=strict,
            after=after,
            token=token,
        )

    @override
    async def open_staging_writer(
        self, *, identity: str, shared: bool = False
    ) -> DirectStagingWriter:
        from dlcore.log.staging.append import check_identity
        from dlcore.log.staging.writer import DirectStagingWriter

        self._require_open()
        check_identity(identity)
        return DirectStagingWriter(
            self.log_context, self.staging_owner, identity, self.log_context.config
        )

    @override
    async def last_version(self, identity: str) -> int:
        return await last_version(self.log_context, identity)

    @override
    async def list_commits(self) -> list[CommitStatus]:
        self._require_open()
        return await list_commits(self.log_context)
