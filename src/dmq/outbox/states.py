"""The states of a message: of the business at the consumer, and of the row at the sender.

What always holds: a row goes NEW → SENT → one of the ends, or from NEW to an end at once if the result is quicker than
the mark. SENT becomes NEW again when it is to be sent again. From an end it never comes back, but for one case: where
no groups were named, a row that one group has made DONE may still be refused by another. Tables have these texts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["ENDS", "OPEN", "BusinessState", "SendState"]


class BusinessState(StrEnum):
    """What the consumer's business came to."""

    UNKNOWN = "UNKNOWN"  # what it is until it is set: counts as not consumed
    SUCCESS = "SUCCESS"
    ROLLBACK = "ROLLBACK"  # refused for a reason of the business: the sender takes its part back


class SendState(StrEnum):
    """What has become of a row of the sender table."""

    NEW = "NEW"  # committed, not yet acknowledged by a broker
    SENT = "SENT"  # a broker has it; not all results are here
    DONE = "DONE"  # every expected group answered SUCCESS, or none was expected
    ROLLED_BACK = "ROLLED_BACK"  # a group answered ROLLBACK, and no reverse business is registered
    REVERSED = "REVERSED"  # a group answered ROLLBACK, and the reverse business has run
    ALERTED = "ALERTED"  # the compensator gave up and told somebody; a late result still ends it


OPEN: Final = (SendState.NEW, SendState.SENT, SendState.ALERTED)  # a result may still come
ENDS: Final = (SendState.DONE, SendState.ROLLED_BACK, SendState.REVERSED)
