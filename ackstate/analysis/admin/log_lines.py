"""The server's log on standard error: one line per event, for any input from clients."""

from __future__ import annotations

import logging
import sys
from typing import final

from ackstate.analysis.wording import printable

LOG = logging.getLogger("ackstate.admin")


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
