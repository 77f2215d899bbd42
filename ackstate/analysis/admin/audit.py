"""The audit log: a line for each change of a policy, written after the change is durable."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from ackstate.analysis.admin.guard import WHO

if TYPE_CHECKING:
    from fastapi import Request

    from ackstate.topic.policy_store import PolicyOwner

_LOG = logging.getLogger("ackstate.admin.audit")


def log_change(request: Request, owner: PolicyOwner, policy: str, *, before: object, after: object) -> None:
    """Log a change of a policy as a JSON object in ASCII: the author, the address, and the values before and after.

    Args:
        request: The request for the change.
        owner: The namespace or topic whose policy was changed.
        policy: The name of the policy.
        before: The earlier value as JSON, None for none.
        after: The new value.
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
