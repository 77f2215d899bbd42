"""The page with all settings, next to Pulsar's keys and defaults.

Which setting a key changes is found by reading a `broker.conf` with only that key.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate import CursorConfig, DeadLetterPolicy, TopicSettings
from ackstate.delay import DelayConfig
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import BrokerDelayedDelivery, BrokerLimit, DelayedDeliveryPolicies, GateLimits
from ackstate.topic import Retention
from website.markdown import table
from website.pulsar_keys import KEYS, PulsarKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


class _Readable(NamedTuple):
    """A class with settings that a `broker.conf` may name, and the values that it reads from one."""

    kind: type
    values: Callable[[Mapping[str, str]], Mapping[str, object]]


def _fields_read(kind: Any) -> _Readable:
    def values(conf: Mapping[str, str]) -> Mapping[str, object]:
        read = kind.from_pulsar_conf(conf)
        return {each.name: getattr(read, each.name) for each in fields(read)}

    return _Readable(kind, values)


def _broker_limit(conf: Mapping[str, str]) -> Mapping[str, object]:
    limit = BrokerLimit.from_pulsar_conf(conf)
    return {"max_unacked_messages": limit.max_unacked_messages, "blocked_share": limit.blocked_share}


READABLE = (
    _fields_read(CursorConfig),
    _fields_read(GateLimits),
    _Readable(BrokerLimit, _broker_limit),
    _fields_read(DelayConfig),
    _fields_read(BrokerDelayedDelivery),
)
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


def settings_changed_by(key: PulsarKey) -> list[tuple[type, str]]:
    """Return the settings that a `broker.conf` with only this key, and the keys that it needs, changes."""
    without, given = dict(key.needs), {**key.needs, key.name: key.other_value}
    return [
        (each.kind, name)
        for each in READABLE
        for name, value in each.values(given).items()
        if value != each.values(without)[name]
    ]


@cache
def keys_by_setting() -> Mapping[tuple[type, str], tuple[str, ...]]:
    """Return the keys that change each setting: class and name -> keys, in the order of `KEYS`."""
    found: dict[tuple[type, str], tuple[str, ...]] = {}
    for key in KEYS:
        for setting in settings_changed_by(key):
            found[setting] = (*found.get(setting, ()), key.name)
    return found


def settings(kind: type) -> list[SettingRow]:
    """Return the settings of a class in the order of its fields."""
    assert is_dataclass(kind)
    described = descriptions(kind)
    return [
        SettingRow(
            each.name, _default(each), keys_by_setting().get((kind, each.name), ()), described.get(each.name, "")
        )
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
    rows = [(f"`{key.name}`", key.default, key.default_5 or key.default, _affected(key), key.remark) for key in KEYS]
    return table(("key", "Pulsar 4.2", "Pulsar 5.0", "setting", "remark"), rows)


def _affected(key: PulsarKey) -> str:
    changed = [f"`{kind.__name__}.{name}`" for kind, name in settings_changed_by(key)]
    return ", ".join(changed) or "none"


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return str(each.default) if isinstance(each.default, Enum) else repr(each.default)
    if each.default_factory is not MISSING:
        return f"{type(each.default_factory()).__name__}()"
    return "required"


def _code(text: str) -> str:
    """Return a text with Markdown's single backticks in place of the double ones of docstrings."""
    return text.replace("``", "`")
