"""A machine's transaction: the effect that stores it, and the attempts until it is stored.

A conflict means that nothing was stored and that another client was first.  Without an answer it
may have been stored.  Both mean: pause, look again, and plan by what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataConnectionError
from dlcore.base.machines import Pause
from dlcore.metadata.port import CONFLICTS, UNANSWERED

if TYPE_CHECKING:
    from dlcore.base.errors import DLError
    from dlcore.metadata.port import Op

ATTEMPTS_MAX = 100
_DELAY_S_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Store:
    """Effect: apply these in one transaction; answer with `STORED`, or with `CallFailed`."""

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts of one transaction that failed: a value, as copies of a machine share it.

    Attributes:
        subject: the job that the transaction belongs to, for the error of the last attempt.
        goal: the end of the sentence that begins with the number of attempts.
        count: how many failed.
    """

    subject: str
    goal: str
    count: int = 0

    def none(self) -> Attempts:
        """Return those of another transaction, none of which has failed."""
        return replace(self, count=0)

    def failed(self, error: DLError) -> Attempts:
        """Return these with one more, which failed; `pause_after` is what comes then.

        Raises:
            DLError: `error`, if it is neither a conflict nor a missing answer.
            MetadataConnectionError: that was the last attempt.
        """
        if not isinstance(error, (*CONFLICTS, *UNANSWERED)):
            raise error
        if self.count + 1 == ATTEMPTS_MAX:
            raise MetadataConnectionError(
                f"{self.subject}: {ATTEMPTS_MAX} attempts {self.goal} were overtaken or not "
                "answered"
            )
        return replace(self, count=self.count + 1)


def pause_after(error: DLError) -> Pause:
    """Return the pause after an attempt that failed."""
    return Pause(_DELAY_S_MAX, error)
