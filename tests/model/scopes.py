"""Scopes of the searches: `SMALL` by tests too, all of them by ``make model``."""

from __future__ import annotations

from tests.model.system import Scope

SMALL = {
    "a writer that closes, a recoverer": Scope(closes=True),
    "a bookie crashes": Scope(crashes=1),
    "an ensemble change against a recoverer": Scope(spares=1, time_outs=1),
    "two entries, an ensemble change, a lost reply": Scope(
        recoverers=0, entries=2, spares=1, time_outs=1, lost_replies=1
    ),
}
LARGE = {
    "two crashes": Scope(crashes=2),
    "a recovery that replaces a bookie": Scope(spares=1, recovery_time_outs=1),
    "an ensemble change whose reply is lost, against a recoverer": Scope(
        spares=1, time_outs=1, lost_replies=1
    ),
    "an ensemble change and a close": Scope(
        recoverers=0, entries=2, spares=1, time_outs=1, lost_replies=1, closes=True
    ),
    "a crash and a recovery that replaces a bookie": Scope(
        spares=1, recovery_time_outs=1, crashes=1
    ),
    "every bookie must hold every entry": Scope(ack_quorum_size=3, crashes=1, closes=True),
    "two entries, a recoverer": Scope(entries=2),
    "two recoverers": Scope(recoverers=2),
    "a crash and two recoverers": Scope(recoverers=2, crashes=1),
}
