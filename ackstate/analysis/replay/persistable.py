"""Separates the policies of a grid that a broker could run from those it could not, before a trace is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.replay.policy import AS_RECORDED, PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.replay.policy import Policy


def persistable(policies: Sequence[Policy | None]) -> tuple[list[Policy | None], list[tuple[str, str]]]:
    """Return the policies under which a new cursor can be opened, and the others by label with the reason.

    Raises:
        PolicyError: No policy except the recording can be opened.
    """
    found: list[Policy | None] = []
    refused: list[tuple[str, str]] = []
    for policy in policies:
        reason = "" if policy is AS_RECORDED else _refusal(policy)
        if policy is not AS_RECORDED and reason:
            refused.append((policy.label, reason))
        else:
            found.append(policy)
    if refused and all(policy is AS_RECORDED for policy in found):
        raise PolicyError(f"policy: {refused[0][0]}: {refused[0][1]}")
    return found, refused


def _refusal(policy: Policy) -> str:
    from ackstate.analysis.replay.cursor_replay import CursorReplay  # noqa: PLC0415 - most grids need no cursor
    from ackstate.stores.base import StoreError  # noqa: PLC0415 - most grids need no cursor

    try:
        CursorReplay(policy, {0: 1}, opened_ms=0)
    except StoreError as error:
        return f"not even an empty cursor can be written: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
    return ""
