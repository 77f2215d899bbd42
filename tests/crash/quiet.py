"""Silences loggers, because the faults of a layer are planned."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager


@contextmanager
def quiet(*names: str):
    with ExitStack() as restored:
        for logger in map(logging.getLogger, names):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        yield
