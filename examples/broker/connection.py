"""Reads the commands of one client, and reports those that are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from ackstate import AckStateError, StoreError
from examples.broker.commands import Commands
from examples.broker.errors import ProtocolError, RefusedRequestError, fields_of
from examples.broker.framing import MESSAGE_BYTES_MAX, CommandFrame, encode_frame, read_frame
from examples.broker.pulsar_api_pb2 import ServerError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ackstate import Position
    from examples.broker.broker import Broker

    Publishing = asyncio.Task[list[Position]]

_PROTOCOL_VERSION = 19
_OF_NO_REQUEST = 2**64 - 1
_PROBE_S = 30.0
_RECEIPTS_MAX = 1_000
# The error of these requests has a command of its own.
_ERROR_COMMANDS = {"consumer_stats": "consumer_stats_response", "get_schema": "get_schema_response"}


@final
class Connection:
    """One client.

    Args:
        broker: The broker.
        reader: The bytes from the client.
        writer: The bytes to the client.

    Attributes:
        client: The address of the client.
        address: The address of the broker, as this client reached it.
    """

    def __init__(self, broker: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.client, self.address = ("{}:{}".format(*writer.get_extra_info(name)) for name in ("peername", "sockname"))
        self._reader = reader
        self._writer = writer
        self._commands = Commands(broker, self)
        self._fail = broker.fail
        self._receipts: asyncio.Queue[tuple[Publishing, dict[str, int]] | None] = asyncio.Queue(_RECEIPTS_MAX)
        self._is_silent = False

    async def serve(self) -> None:
        """Execute the client's commands until the connection ends."""
        tasks = [asyncio.create_task(each) for each in (self._send_receipts(), self._probe())]
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, ProtocolError):
                self._connect(await read_frame(self._reader))
                while True:
                    await self._execute(await read_frame(self._reader))
                    # A client that does not read gives no further permits.
                    await self._writer.drain()
        finally:
            self.close()
            await self._commands.close_all()
            await self._receipts.put(None)
            tasks[1].cancel()
            await asyncio.wait(tasks)

    def send(self, name: str, entry: bytes = b"", **fields: object) -> None:
        """Send a command, with the entry of a message if it is one; no-op if the connection has ended."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(name, entry, **fields))

    async def send_receipt(self, publishing: Coroutine[Any, Any, list[Position]], receipt: dict[str, int]) -> None:
        """Have a message published, and its receipt sent when it is; wait while too many are not."""
        await self._receipts.put((asyncio.create_task(publishing), receipt))

    def close(self) -> None:
        """End the connection; the client opens another one."""
        self._writer.close()

    def _connect(self, frame: CommandFrame) -> None:
        if frame.name != "connect":
            raise ProtocolError(f"the first command must be connect, got {frame.name or 'an unknown one'}")
        if frame.command.auth_method_name not in {"", "none"}:
            refusal = RefusedRequestError("this broker has no authentication", ServerError.AuthenticationError)
            self.send("error", request_id=_OF_NO_REQUEST, **fields_of(refusal))
            raise ProtocolError(str(refusal))
        version = min(frame.command.protocol_version, _PROTOCOL_VERSION)
        self.send("connected", server_version="ackstate", protocol_version=version, max_message_size=MESSAGE_BYTES_MAX)

    async def _execute(self, frame: CommandFrame) -> None:
        name, command, entry = frame
        self._is_silent = False
        try:
            if name == "send":
                await self._commands.send(command, entry)
            elif (execute := getattr(self._commands, name, None)) is not None:
                await execute(command)
            else:
                raise RefusedRequestError(f"this broker does not support {name or 'this command'}")
        except ProtocolError:
            raise
        except (AckStateError, ValueError) as error:
            self._refuse(name, command, error)

    def _refuse(self, name: str, command: Any, error: Exception) -> None:
        """Report an error in the command that the client expects; some commands have no answer."""
        if isinstance(error, StoreError):
            self._fail(error)
        if name == "send":
            self.send("send_error", producer_id=command.producer_id, sequence_id=command.sequence_id,
                      **fields_of(error))  # fmt: skip
        elif name == "ack":
            if command.HasField("request_id"):
                self.send("ack_response", consumer_id=command.consumer_id, request_id=command.request_id,
                          **fields_of(error))  # fmt: skip
        elif "request_id" in command.DESCRIPTOR.fields_by_name:
            self.send(_ERROR_COMMANDS.get(name, "error"), request_id=command.request_id, **fields_of(error))

    async def _send_receipts(self) -> None:
        """Send the receipts in the order of the messages, as clients expect."""
        while (waiting := await self._receipts.get()) is not None:
            publishing, receipt = waiting
            try:
                (position,) = await publishing
                self.send("send_receipt", message_id=position._asdict(), **receipt)
            except AckStateError as error:
                del receipt["highest_sequence_id"]
                self.send("send_error", **receipt, **fields_of(error))
                if isinstance(error, StoreError):
                    self._fail(error)

    async def _probe(self) -> None:
        """Require a sign of life from time to time, and end the connection if there is none."""
        await asyncio.sleep(_PROBE_S)
        while not self._is_silent:
            self._is_silent = True
            self.send("ping")
            await asyncio.sleep(_PROBE_S)
        self.close()
