"""The former place of these names, for one release: import them from `ackstate.cursor`."""

from typing import TYPE_CHECKING, Any

from ackstate.renamed import warn_renamed

if TYPE_CHECKING:
    from ackstate.cursor.topic.message_log import NO_DELAY, Message, MessageLog
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ackstate import cursor  # noqa: PLC0415 - which imports this package

        warn_renamed(f"{__name__}.{name}", f"ackstate.cursor.{name}")
        return getattr(cursor, name)


__all__ = ["NO_DELAY", "Message", "MessageLog"]
