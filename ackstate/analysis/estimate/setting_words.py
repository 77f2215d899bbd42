"""Names the settings of a policy in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.replay.policy import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
