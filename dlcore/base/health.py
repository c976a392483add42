"""The health of a process: named checks, each of which holds or tells why it does not.

A process is live if it answers at all, ready if all of its checks hold, and it works if a trial of
its own succeeds: something is written and read back.  A trial costs something, so many callers
share one, and the next one begins only after a pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Check: TypeAlias = "Callable[[], str | None]"
"""Returns why something is not as it should be; None if it is."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The results of all checks: the reason of each that does not hold, None for the others."""

    reasons: Mapping[str, str | None]

    @classmethod
    def of(cls, checks: Mapping[str, Check]) -> Readiness:
        """Run the checks."""
        return cls({name: check() for name, check in checks.items()})

    @property
    def is_ready(self) -> bool:
        """Whether all hold."""
        return not any(self.reasons.values())

    def shown(self) -> dict[str, object]:
        """Return the answer to who asks, for JSON."""
        checks = {
            name: {"ok": reason is None} | ({} if reason is None else {"reason": reason})
            for name, reason in self.reasons.items()
        }
        return {"ready": self.is_ready, "checks": checks}


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial: the time of its end, its duration, and why it failed."""

    ended_s: float
    took_s: float
    reason: str | None

    def shown(self, *, now_s: float) -> dict[str, object]:
        """Return the answer to who asks, for JSON."""
        answer: dict[str, object] = {
            "works": self.reason is None,
            "took_s": round(self.took_s, 6),
            "age_s": round(now_s - self.ended_s, 3),
        }
        return answer if self.reason is None else answer | {"reason": self.reason}
