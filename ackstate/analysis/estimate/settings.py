"""Settings of a policy in words, and as those of a Pulsar 4.2 broker: ``broker.conf`` and ``pulsar-admin``.

Source: `ServiceConfiguration` of Pulsar. None of the settings of the persists of a cursor is dynamic there
(``@FieldContext(dynamic = true)``), so ``pulsar-admin brokers update-dynamic-config`` refuses them. The rate of writes
is also a policy of a namespace, which takes effect at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate import pulsar_conf
from ackstate.analysis.replay.policy import DEFAULT
from ackstate.cursor.formats import Format
from ackstate.selection import Keep
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ackstate.analysis.replay.policy import Policy


_SECOND_MS = 1_000


def policy_text(policy: Policy, varied: Iterable[str] = ()) -> str:
    """Return a policy in words: the settings that differ from the default, and some others."""
    # The flush interval is shown even if it is the default: every policy has one.
    shown = {"flush_interval_ms", *varied, *policy.to_mapping()}
    return ", ".join(setting_text(key, text) for key, text in policy.texts.items() if key in shown)


def varied_settings(policies: Iterable[Policy]) -> list[str]:
    """Return the settings in which some policies differ, in the order of `KEYS`."""
    texts = [each.texts for each in policies]
    return [key for key in DEFAULT.texts if len({each[key] for each in texts}) > 1]


def change_text(key: str, new: str, old: str) -> str:
    """Return the change of a setting in words: ``flush every 5 s instead of 60 s``."""
    said_new, said_old = setting_text(key, new), setting_text(key, old)
    # "flush every 5 s instead of 60 s": a common prefix is shown once.
    shared = 0
    for one, other in zip(said_new.split(), said_old.split(), strict=False):
        if one != other:
            break
        shared += 1
    return f"{said_new} instead of {' '.join(said_old.split()[shared:]) or said_old}"


def setting_text(key: str, text: str) -> str:
    """Return a setting in words."""
    return _WORDS[key](text) if key in _WORDS else f"{key} {text}"


def _seconds(text: str) -> str:
    return f"{int(text) / _SECOND_MS:g} s"


def _number(text: str) -> str:
    return f"{int(text):,}"


def _rate(text: str) -> str:
    if text == "0":
        return "persist at the flush interval only"
    return f"persist at an ack up to {'once' if text == '1' else f'{text} times'} a second"


def _blocking(text: str) -> str:
    return "never stop dispatch" if text == "0" else f"stop dispatch at {_number(text)} bytes not yet durable"


_RULES = {
    "EXACT": "the limit says",
    "PULSAR_4_2": "Pulsar 4.2",
    "PULSAR_5_0_M1": "Pulsar 5.0.0-M1",
    "PULSAR_5_0": "Pulsar 5.0",
}
_WORDS: dict[str, Callable[[str], str]] = {
    "flush_interval_ms": lambda text: f"flush every {_seconds(text)}",
    "mark_delete_rate_limit": _rate,
    "range_count_max": lambda text: f"persist {'any number of' if text == 'none' else _number(text)} ranges",
    "keep": lambda text: f"keep the {text.lower()} ranges first",
    "become_old_ack_record_seconds": lambda text: f"hold acks back for {text} s",
    "max_unpersisted_ack_record_bytes": _blocking,
    "format": lambda text: "write Pulsar's format" if text == "PULSAR" else "write the native format",
    "range_limit_rule": lambda text: f"count ranges as {_RULES.get(text, text)}",
    "timing": lambda text: "write when Pulsar does" if text == "PULSAR" else "write at ticks of its own",
    "flush_phase_ms": lambda text: f"flush {_seconds(text)} after each multiple of that",
    "ledger_creation_ms": lambda text: f"wait {_seconds(text)} for the first ledger",
    "tick_ms": lambda text: f"check each cursor every {_seconds(text)}",
    "ledger_writable": lambda text: "with ledgers that can be written" if text == "true" else "with no ledger written",
    "ledger_rollover_ms": lambda text: f"roll ledgers over {'never' if text == '0' else f'after {_seconds(text)}'}",
    "compaction_bytes_min": lambda text: f"compact journals of at least {_number(text)} bytes",
    "ledger_entry_count_max": lambda text: f"end ledgers at {_number(text)} entries",
    "metadata_bytes_max": lambda text: f"give the metadata store up to {_number(text)} bytes",
}


# The default of Pulsar 4.2.
_RANGES = 10_000


class BrokerSetting(NamedTuple):
    """A setting of ``broker.conf``."""

    key: str  # Its name
    value: str  # Its value
    is_dynamic: bool  # Whether a running broker accepts it

    @property
    def line(self) -> str:
        """The line of ``broker.conf``."""
        return f"{self.key}={self.value}"


PULSAR_KEYS = frozenset({"format", "range_limit_rule", "timing"})
"""Settings that are the same in all policies of a Pulsar 4.2 broker."""


def runs_on_pulsar(policy: Policy) -> bool:
    """Return whether a Pulsar 4.2 broker can run a policy: every setting has a key there, and a value that it takes."""
    config = policy.cursor
    if config.format is not Format.PULSAR or config.range_limit_rule is not LimitRule.PULSAR_4_2:
        return False
    has_own_settings = policy.blocks or config.become_old_ack_record_seconds != 0 or config.keep is not Keep.LOWEST
    # Without a limit on writes, Pulsar writes at each ack, and has no need of an interval.
    is_paced = config.mark_delete_rate_limit > 0 or config.flush_interval_ms == 0
    in_seconds = config.flush_interval_ms % _SECOND_MS == 0 and config.ledger_rollover_ms % _SECOND_MS == 0
    return is_paced and in_seconds and not has_own_settings and policy.ledger_writable


def broker_settings_of(policy: Policy, keys: Iterable[str]) -> list[BrokerSetting]:
    """Return some settings of a policy as those of a broker; settings without a key there are left out."""
    found: dict[str, BrokerSetting] = {}
    for key in keys:
        # Without a limit on writes there is nothing to flush.
        if key in _BROKER_KEYS and (key != "flush_interval_ms" or policy.cursor.flush_interval_ms):
            broker_key, value_of = _BROKER_KEYS[key]
            found[broker_key] = BrokerSetting(broker_key, value_of(policy), broker_key in DYNAMIC_KEYS)
    return list(found.values())


def admin_commands(settings: Sequence[BrokerSetting], namespaces: Sequence[str]) -> list[str]:
    """Return the commands that change settings of a running cluster."""
    commands = [
        f"pulsar-admin brokers update-dynamic-config --config {each.key} --value {each.value}"
        for each in settings
        if each.is_dynamic
    ]
    rates = [each.value for each in settings if each.key == pulsar_conf.MARK_DELETE_RATE]
    commands += [
        f"pulsar-admin namespaces set-persistence --bookkeeper-ensemble 2 --bookkeeper-write-quorum 2 "
        f"--bookkeeper-ack-quorum 2 --ml-mark-delete-max-rate {rate} {namespace}"
        for rate in rates
        for namespace in namespaces
    ]
    return commands


PAUSE_KEY = "dispatcherPauseOnAckStatePersistentEnabled"
"""Stops dispatch to a subscription that has more ranges than can be persisted, instead of losing acks in a crash."""
DYNAMIC_KEYS = frozenset({PAUSE_KEY})
"""The dynamic settings of Pulsar 4.2 among those that concern redelivery after a crash."""


def _whole_seconds(milliseconds: int) -> str:
    return str(milliseconds // _SECOND_MS)


def _ranges(policy: Policy) -> str:
    limit = policy.cursor.range_count_max
    return str(_RANGES if limit is None else limit)


_BROKER_KEYS: dict[str, tuple[str, Callable[[Policy], str]]] = {
    "flush_interval_ms": (pulsar_conf.FLUSH_SECONDS, lambda policy: _whole_seconds(policy.cursor.flush_interval_ms)),
    "mark_delete_rate_limit": (
        pulsar_conf.MARK_DELETE_RATE, lambda policy: f"{policy.cursor.mark_delete_rate_limit:g}"
    ),
    "range_count_max": (pulsar_conf.RANGES, _ranges),
    "batch_count_max": (pulsar_conf.BATCHES, lambda policy: str(policy.cursor.batch_count_max)),
    "metadata_range_count_max": (
        pulsar_conf.METADATA_RANGES, lambda policy: str(policy.cursor.closing_range_count_max)
    ),
    "ledger_entry_count_max": (pulsar_conf.LEDGER_ENTRIES, lambda policy: str(policy.cursor.ledger_entry_count_max)),
    "ledger_rollover_ms": (
        pulsar_conf.ROLLOVER_SECONDS, lambda policy: _whole_seconds(policy.cursor.ledger_rollover_ms)
    ),
    "range_form": (
        pulsar_conf.AS_WORDS, lambda policy: str(policy.cursor.range_form.name == "WORDS").lower()
    ),
    "compression": (pulsar_conf.COMPRESSION, lambda policy: policy.cursor.compression.name),
    "compression_bytes_min": (
        pulsar_conf.COMPRESSION_BYTES, lambda policy: str(policy.cursor.compression_bytes_min)
    ),
    "batch_index_acks": (pulsar_conf.BATCH_INDEX_ACKS, lambda policy: str(policy.cursor.batch_index_acks).lower()),
}  # fmt: skip
