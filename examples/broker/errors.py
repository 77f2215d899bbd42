"""The errors of the protocol, and the numbers by which Pulsar's clients know them."""

from __future__ import annotations

from ackstate import AckStateError, ConsumerBusyError, CursorClosedError, StoreError, SubscriptionTypeError
from examples.broker.pulsar_api_pb2 import ServerError


class ProtocolError(AckStateError):
    """A client does not keep to the protocol: its connection is closed."""


class ChecksumError(AckStateError):
    """An entry was damaged on its way."""


class RefusedRequestError(AckStateError):
    """A request that the broker does not execute.

    Args:
        message: The reason.
        number: The reason, as Pulsar numbers it.
    """

    def __init__(self, message: str, number: int = ServerError.NotAllowedError) -> None:
        super().__init__(message)
        self.number = number


# By the errors of the library. Clients try again after some of the numbers, such as those of errors that pass.
_NUMBERS = {
    ChecksumError: ServerError.ChecksumError,
    ConsumerBusyError: ServerError.ConsumerBusy,
    CursorClosedError: ServerError.ServiceNotReady,
    StoreError: ServerError.PersistenceError,
    SubscriptionTypeError: ServerError.NotAllowedError,
}


def refuse_if(is_requested: bool, feature: str, number: int = ServerError.NotAllowedError) -> None:
    """Refuse a feature that the broker does not have.

    Raises:
        RefusedRequestError: It is requested.
    """
    if is_requested:
        raise RefusedRequestError(f"this broker has no {feature}", number)


def fields_of(error: Exception) -> dict[str, object]:
    """Return the fields with which an error is reported to a client."""
    number = ServerError.MetadataError
    if isinstance(error, RefusedRequestError):
        number = error.number
    for kind, known in _NUMBERS.items():
        if isinstance(error, kind):
            number = known
    return {"error": number, "message": str(error)}
