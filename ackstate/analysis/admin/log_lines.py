"""The server's log on standard error: one line per event, for any input from clients."""

from __future__ import annotations

import logging
import sys
import time
from typing import final

from ackstate.analysis.wording import printable

LOG = logging.getLogger("ackstate.admin")
_REPEAT_SECONDS = 60.0


def log_to_stderr() -> None:
    """Write the server's log to standard error, including errors, but no warnings, of its libraries.

    Clients could cause any number of uvicorn's warnings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for logger, level in ((LOG, logging.INFO), (logging.getLogger("uvicorn.error"), logging.ERROR)):
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


@final
class _OneLine(logging.Formatter):
    """Escapes characters that could split a message or change its display; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides
        """Return the line of a record."""
        return printable(super().formatMessage(record))


@final
class RepeatedWarning:
    """Logs the first of many similar events at once, then at most one line a minute, with the count of the rest."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._left_out = 0

    def log(self, text: str) -> None:
        """Log an event, or count it."""
        now = time.monotonic()
        if now < self._silent_until:
            self._left_out += 1
            return
        LOG.warning("%s%s", text, f" ({self._left_out} more since the last such line)" if self._left_out else "")
        self._silent_until, self._left_out = now + _REPEAT_SECONDS, 0
