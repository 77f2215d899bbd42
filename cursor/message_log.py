"""The former place of these names, for one release: import them from `ackstate.cursor`."""

from ackstate.cursor.topic.message_log import NO_DELAY, Message, MessageLog

__all__ = ["NO_DELAY", "Message", "MessageLog"]
