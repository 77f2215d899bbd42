"""The audit log: a line for each change of a policy, written when the change is on the disk."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from ackstate.analysis.admin.guard import WHO

if TYPE_CHECKING:
    from fastapi import Request

    from ackstate.cursor.topic.policy_store import PolicyOwner

_LOG = logging.getLogger("ackstate.admin.audit")


def log_change(request: Request, owner: PolicyOwner, policy: str, *, before: object, after: object) -> None:
    """Log who changed which policy, from where, and its values before and after, as a JSON object in ASCII.

    Args:
        request: What asked for it.
        owner: Whose policy was changed.
        policy: Its name.
        before: Its value before as JSON has it, None for none.
        after: Its value now.
    """
    entry = {
        "who": request.scope[WHO],
        "client": request.client.host if request.client else None,
        "action": request.method,
        "owner": str(owner),
        "policy": policy,
        "before": before,
        "after": after,
    }
    _LOG.info("%s", json.dumps(entry))
