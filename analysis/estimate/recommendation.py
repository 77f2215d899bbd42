"""Recommends a policy of a grid, in a sentence: the one that buys most for its price, compared with the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.replay.policy import AS_RECORDED, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.analysis.estimate.results import Estimate, PolicyResult

_SECOND_MS = 1_000


def choose(results: Sequence[PolicyResult], baseline: PolicyResult) -> PolicyResult | None:
    """Return the policy with less redelivery than the baseline that buys most for its price; None if there is none.

    It minimises redelivery plus the highest of its prices, each as a share of the highest value among the policies on
    the front and the baseline.
    """
    front = [each for each in results if each.is_on_front]
    better = [each for each in front if each.badness[0] < baseline.badness[0]]
    compared = front if baseline.policy is AS_RECORDED else [*front, baseline]
    most = [max(values) for values in zip(*(each.badness for each in [*compared, baseline]), strict=True)]
    return min(better, key=lambda each: _distance(each, most), default=None)


def sentence(chosen: PolicyResult | None, baseline: PolicyResult) -> str:
    """Return the recommendation as one sentence."""
    if chosen is None:
        expected = f"expected duplicates {baseline.total.expected or 0:,.0f}"
        return f"no setting of the grid is better than {_settings(baseline)}: {expected}"
    return f"{_difference(chosen, baseline)}: {_gain(chosen.total, baseline.total)}"


def _distance(result: PolicyResult, most: Sequence[float]) -> float:
    redelivery, *prices = (mine / worst if worst else 0.0 for mine, worst in zip(result.badness, most, strict=True))
    return redelivery + max(prices)


def _difference(chosen: PolicyResult, other: PolicyResult) -> str:
    if chosen.policy is AS_RECORDED or other.policy is AS_RECORDED:
        return f"{_settings(chosen)} instead of {_settings(other)}"
    before, after = other.policy.texts, chosen.policy.texts
    changes = [_change(key, after[key], before[key]) for key in after if after[key] != before[key]]
    return "; ".join(changes)


def _settings(result: PolicyResult) -> str:
    if result.policy is AS_RECORDED:
        return "as recorded"
    # The flush interval is shown even if it is the default: every policy has one.
    texts = {"flush_interval_ms": DEFAULT.texts["flush_interval_ms"]} | result.policy.to_mapping()
    return ", ".join(_said(key, text) for key, text in texts.items())


def _change(key: str, new: str, old: str) -> str:
    said_new, said_old = _said(key, new), _said(key, old)
    # "flush every 5 s instead of 60 s": a common prefix is shown once.
    shared = 0
    for one, other in zip(said_new.split(), said_old.split(), strict=False):
        if one != other:
            break
        shared += 1
    return f"{said_new} instead of {' '.join(said_old.split()[shared:]) or said_old}"


def _said(key: str, text: str) -> str:
    """Return one setting in words."""
    return _WORDS[key](text) if key in _WORDS else f"{key} {text}"


def _seconds(text: str) -> str:
    return f"{int(text) / _SECOND_MS:g} s"


def _number(text: str) -> str:
    return f"{int(text):,}"


def _rate(text: str) -> str:
    return "persist at the flush interval only" if text == "0" else f"persist at an ack up to {text} times a second"


def _young(text: str) -> str:
    if not text.startswith("AUTO"):
        return f"hold acks back for {text} s"
    share = text.partition(":")[2].partition(":")[0]
    return "hold acks back for an automatic time" + (f" so that a share of {share} is late" if share else "")


def _blocking(text: str) -> str:
    return "never stop dispatch" if text == "0" else f"stop dispatch at {_number(text)} bytes not yet durable"


_WORDS: dict[str, Callable[[str], str]] = {
    "flush_interval_ms": lambda text: f"flush every {_seconds(text)}",
    "mark_delete_rate_limit": _rate,
    "range_count_max": lambda text: f"persist {'any number of' if text == 'none' else _number(text)} ranges",
    "keep": lambda text: f"keep the {text.lower()} ranges first",
    "become_old_ack_record_seconds": _young,
    "max_unpersisted_ack_record_bytes": _blocking,
    "format": lambda text: "write Pulsar's format" if text == "PULSAR" else "write the native format",
    "tick_ms": lambda text: f"check each cursor every {_seconds(text)}",
    "ledger_writable": lambda text: "with ledgers that can be written" if text == "true" else "with no ledger written",
    "ledger_rollover_ms": lambda text: f"roll ledgers over {'never' if text == '0' else f'after {_seconds(text)}'}",
    "compaction_bytes_min": lambda text: f"compact journals of at least {_number(text)} bytes",
    "ledger_entry_count_max": lambda text: f"end ledgers at {_number(text)} entries",
    "metadata_bytes_max": lambda text: f"give the metadata store up to {_number(text)} bytes",
}


def short_number(number: float, *, sign: str = "-") -> str:
    """Return a number with three digits, or more if it has more before the point: ``13,312``, ``0.0125``.

    Args:
        number: Any number.
        sign: ``+`` to give positive numbers a sign, too.
    """
    return f"{number:{sign},.0f}" if abs(number) >= 999.5 else f"{number:{sign},.3g}"


def _gain(chosen: Estimate, other: Estimate) -> str:
    told = [f"expected duplicates {other.expected or 0:,.0f} -> {chosen.expected or 0:,.0f}"]
    pairs = [
        (chosen.per_second(chosen.write_count), other.per_second(other.write_count), "writes/s"),
        (chosen.per_second(chosen.bytes_written), other.per_second(other.bytes_written), "bytes/s"),
    ]
    # A recording may lack these numbers.
    known = ((after, before, unit) for after, before, unit in pairs if after is not None and before is not None)
    told += [f"{short_number(after - before, sign='+')} {unit}" for after, before, unit in known]
    if chosen.blocked_ms is not None and chosen.blocked_ms != (other.blocked_ms or 0):
        blocked_s = (chosen.blocked_ms - (other.blocked_ms or 0)) / _SECOND_MS
        told.append(f"{short_number(blocked_s, sign='+')} s blocked")
    return ", ".join(told)
