"""Finds the jars of BookKeeper's Java client."""

from __future__ import annotations

import os
from pathlib import Path

from ackstate.stores.base import StoreError

CLASS_PATH_VARIABLE = "ACKSTATE_BOOKKEEPER_CLASSPATH"
_PULSAR_HOME_VARIABLE = "PULSAR_HOME"


def find_jars(class_path: str | None) -> list[str]:
    """Return the jars of a class path, or of the environment's.

    Raises:
        StoreError: There is none; the message lists the settings.
    """
    pulsar_home = os.environ.get(_PULSAR_HOME_VARIABLE)
    from_pulsar = str(Path(pulsar_home, "lib")) if pulsar_home else ""
    found = class_path or os.environ.get(CLASS_PATH_VARIABLE) or from_pulsar
    jars = [jar for part in found.split(os.pathsep) if part for jar in _jars_in(part)]
    if not jars:
        name = f"{found} has no jars" if found else "BookKeeper's Java client is missing"
        raise StoreError(
            f"{name}: name a folder with the jars of bookkeeper-server and its dependencies by class_path or"
            f" {CLASS_PATH_VARIABLE}, or a Pulsar installation by {_PULSAR_HOME_VARIABLE}"
        )
    return jars


def _jars_in(part: str) -> list[str]:
    folder = Path(part.removesuffix("*")) if part.endswith(("/*", "/")) else Path(part)
    if folder.is_dir():
        return sorted(map(str, folder.glob("*.jar")))
    return [part] if folder.exists() else []
