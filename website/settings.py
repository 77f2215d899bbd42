"""The page with all settings, next to Pulsar's keys and defaults.

Which setting a key changes is in the table of `ackstate.pulsar_conf`.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from inspect import cleandoc
from typing import Any, NamedTuple

from ackstate import CursorConfig, DeadLetterPolicy, TopicSettings
from ackstate.delay import DelayConfig
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import BrokerDelayedDelivery, DelayedDeliveryPolicies, GateLimits
from ackstate.pulsar_conf import SETTINGS
from ackstate.topic import Retention
from website.markdown import table

_INTRODUCTION = """# Settings

Each class below is frozen and checks its values when it is created. Units are in the names. `from_pulsar_conf` of a
class reads [Pulsar's keys](#keys-of-pulsar) from a mapping or from the path of a `broker.conf`; a key that looks like a
misspelling is refused.
"""
_KEYS_INTRODUCTION = """## Keys of Pulsar

Every key of a `broker.conf` that ackstate reads, with Pulsar's defaults. If a class has another default of its own, the
tables above show it; a `broker.conf` without the key keeps the default of the class.
"""


class SettingRow(NamedTuple):
    """One setting: its name, its default as Python writes it, Pulsar's keys, and its description."""

    name: str
    default: str
    keys: tuple[str, ...]
    description: str


CLASSES = (
    TopicSettings,
    CursorConfig,
    GateLimits,
    SubscriptionOptions,
    DeadLetterPolicy,
    Retention,
    DelayConfig,
    DelayedDeliveryPolicies,
    BrokerDelayedDelivery,
)
"""Classes whose fields are settings, in the order of the page."""


def keys_of_setting(kind: type, name: str) -> tuple[str, ...]:
    """Return the keys that set a field of a class, in the order of the table."""
    return tuple(each.key for each in SETTINGS if (each.kind, each.field) == (kind.__name__, name))


def settings(kind: type) -> list[SettingRow]:
    """Return the settings of a class in the order of its fields."""
    assert is_dataclass(kind)
    described = descriptions(kind)
    return [
        SettingRow(each.name, _default(each), keys_of_setting(kind, each.name), described.get(each.name, ""))
        for each in fields(kind)
    ]


def descriptions(kind: type) -> dict[str, str]:
    """Return the section `Attributes` of a class docstring: name -> description."""
    found: dict[str, str] = {}
    text = cleandoc(kind.__doc__ or "")  # Python 3.13 does that itself.
    section = re.search(r"^Attributes:\n(.*?)(?:\n\s*\n|\Z)", text, re.MULTILINE | re.DOTALL)
    name = ""
    for line in (section[1] if section else "").splitlines():
        started = re.match(r"^ {4}(\w+): (.*)$", line)
        if started:
            name = started[1]
            found[name] = started[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}"
    return found


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(kind) for kind in CLASSES), _KEYS_INTRODUCTION, _key_table()])


def _section(kind: type) -> str:
    summary = (kind.__doc__ or "").partition("\n")[0]
    listed = settings(kind)
    rows = [
        (f"`{each.name}`", f"`{each.default}`", _code(each.description), " ".join(f"`{key}`" for key in each.keys))
        for each in listed
    ]
    # A class that no key of Pulsar's changes has no column for keys.
    columns = 4 if any(each.keys for each in listed) else 3
    head = ("setting", "default", "meaning", "Pulsar's key")[:columns]
    return f"## {kind.__name__}\n\n{summary}\n\n" + table(head, [row[:columns] for row in rows])


def _key_table() -> str:
    rows = [(f"`{each.key}`", each.default, each.default_5 or each.default, _affected(each.key), each.remark)
            for each in SETTINGS if each.default]  # fmt: skip
    return table(("key", "Pulsar 4.2", "Pulsar 5.0", "setting", "remark"), rows)


def _affected(key: str) -> str:
    return ", ".join(f"`{each.kind}.{each.field}`" for each in SETTINGS if each.key == key and each.field) or "none"


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return str(each.default) if isinstance(each.default, Enum) else repr(each.default)
    if each.default_factory is not MISSING:
        return f"{type(each.default_factory()).__name__}()"
    return "required"


def _code(text: str) -> str:
    """Return a text with Markdown's single backticks in place of the double ones of docstrings."""
    return text.replace("``", "`")
