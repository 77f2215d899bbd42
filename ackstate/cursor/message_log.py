"""The former place of these names, for one release: import them from `ackstate.cursor`."""

from typing import TYPE_CHECKING

from ackstate.renamed import moved_names

__all__ = ["NO_DELAY", "Message", "MessageLog"]

if TYPE_CHECKING:
    from ackstate.topic.message_log import NO_DELAY, Message, MessageLog
else:
    __getattr__ = moved_names(__name__, "ackstate.cursor", __all__)
