"""The tiers that a cluster remembers: those that cold segments of any log ever went to.

A redaction looks into each of them, and so does the deletion of stray objects.  A store that is
gone for good would stop redactions for ever; therefore an operator can let the cluster forget it.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError, CorruptMetadataError, DLError, UnsupportedError
from dlcore.log.metadata.listing import list_logs
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.ops.upkeep.strays import tier_urls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.context import LogContext

_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class KnownTier:
    """A tier that the cluster remembers; `problem` says why it does not answer, "" if it does."""

    url: str
    problem: str = ""


async def known_tiers(context: LogContext) -> list[KnownTier]:
    """Return the tiers that the cluster remembers, and whether each answers.

    Raises:
        MetadataError: the metadata does not answer.
    """
    return [await _tried(context, url) for url in sorted(await tier_urls(context, fresh=True))]


async def forget_tier(context: LogContext, url: str) -> None:
    """Forget a tier: redactions and the deletion of stray objects look into it no more.

    Objects there stay.  The next segment that goes there makes the cluster remember the tier again.

    Raises:
        ConfigurationError: the cluster does not remember such a tier.
        UnsupportedError: the cluster's or a log's settings name the tier, or a ledger is there.
        CorruptMetadataError: of a damaged ledger it is not known whether it is there.
        MetadataError: the metadata does not answer.
    """
    known = sorted(await tier_urls(context, fresh=True))
    if url not in known:
        raise ConfigurationError(
            f"tier {url!r}: no segment ever went there, or it was forgotten already; the cluster "
            f"remembers {', '.join(known) or 'none'}"
        )
    if (user := await _user_of(context, url)) is not None:
        raise UnsupportedError(f"tier {url!r} is in use: {user}")
    await context.store.delete(context.paths.tier(url))


async def _tried(context: LogContext, url: str) -> KnownTier:
    try:
        async with aclosing(
            context.cold.objects.list_below(f"{url}/{context.cluster_id}")
        ) as pages:
            async for _ in pages:
                break
    except DLError as error:
        return KnownTier(url, str(error))
    return KnownTier(url)


async def _user_of(context: LogContext, url: str) -> str | None:
    """Return a sentence on the first user of a tier that is found; None if it has none."""
    tables = await ClusterSettingsStore(context.store, context.paths).read()
    if tables.get("autorecovery", {}).get("tier") == url:
        return "the setting autorecovery.tier of the cluster names it: change that first"
    async with aclosing(list_logs(context.store, context.paths)) as listed:
        async for logs in listed:
            for log, settings in zip(logs, await context.logs.read_settings_of(logs), strict=True):
                if settings.tier_url == url:
                    return f"the setting `tier` of log {log.name!r} names it: change that first"
    some: list[int] = []
    async with aclosing(context.ledger_store.list_ledgers()) as ledger_ids:
        async for ledger_id in ledger_ids:
            some.append(ledger_id)
            if len(some) == _AT_ONCE:
                if (found := await _ledger_at(context, url, some)) is not None:
                    return found
                some.clear()
    return await _ledger_at(context, url, some)


async def _ledger_at(context: LogContext, url: str, ledger_ids: Sequence[int]) -> str | None:
    for ledger_id, ledger in (await context.ledger_store.read_many(ledger_ids, fresh=True)).items():
        if isinstance(ledger, CorruptMetadataError):
            raise ledger
        if ledger.folder.startswith(f"{url}/"):
            log = ledger.custom.get("log", "")
            return (
                f"ledger {ledger_id} of log {log!r} has its entries there: delete or truncate the "
                "log first"
            )
    return None
