"""A broker: an asyncio server for one topic that any shell can talk to, and that survives kill -9.

    $ python examples/shell_broker.py /tmp/orders      in one terminal, and in another:
    $ nc 127.0.0.1 6650
    sub billing             receive, and share the messages with the other subscribers; the answer is your name
    pub two apples          publish; the answer is the position
    msg 1:0 0 two apples    a delivery: position, number of earlier deliveries, text
    ack 1:0                 ack; the answer is the number of newly acked messages
    nack 1:0 500            have it sent again in 500 ms; the answer is whether it was in flight

A message is durable when `pub` is answered, an ack one second later; a crash before that redelivers the message. A
connection that ends gives back its unacked messages. A store that fails ends the broker: start it again.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing, suppress

from ackstate import AckStateError, Message, Position, SqliteStore, Subscription, Topics


class ShellBroker:
    """Every event wakes every connection, and each then dispatches from its subscription."""

    def __init__(self, path: str) -> None:
        self.topics = Topics(SqliteStore(path))
        self.topic = self.topics.open("orders")
        self.connections: dict[str, Subscription | None] = {}  # None until it says `sub`.
        self.blocked: set[str] = set()  # Connections that a limit will wake when it opens.

    async def run(self, port: int = 6650, idle_s: int = 600) -> None:
        """Serve and persist until no connection was open for `idle_s` seconds, which is enough to persist all acks.

        Persists run in the loop's own thread: another thread could open a gate between a dispatch and its `when_open`.
        """
        self.changed = asyncio.Future[bytes]()
        async with await asyncio.start_server(self.serve, "127.0.0.1", port) as server:
            print("listening on", *server.sockets[0].getsockname(), flush=True)  # noqa: T201
            idle_ticks = 0
            while idle_ticks < idle_s * 10:
                await asyncio.sleep(0.1)
                idle_ticks = 0 if self.connections else idle_ticks + 1
                self.topics.tick()
        self.topics.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends: execute its lines, and send it as many messages as the limits allow."""
        loop, name = asyncio.get_running_loop(), str(writer.get_extra_info("peername")[1])
        self.connections[name] = None
        reading = asyncio.create_task(reader.readline())
        with closing(writer), suppress(ConnectionError, AckStateError, ValueError):  # ValueError: an endless line.
            while not reading.done() or reading.result():
                await writer.drain()
                if reading.done():
                    writer.write(f"{self.obey(name, reading.result().decode(errors='replace').split())}\n".encode())
                    reading = asyncio.create_task(reader.readline())
                    self.wake_all()
                if mine := self.connections[name]:
                    for position, message, count, *_ in mine.dispatch(name, 1_000_000):
                        writer.write(f"msg {position} {count} {message.payload.decode()}\n".encode())
                    if name not in self.blocked and any(each.consumer in {"", name} for each in mine.why_blocked()):
                        self.blocked.add(name)
                        mine.when_open(lambda: loop.call_soon_threadsafe(self.wake_all, name), name)
                wait_s = mine and mine.next_wake_ms and max(mine.next_wake_ms - self.topics.clock(), 10) / 1_000
                await asyncio.wait({reading, self.changed}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        if mine := self.connections.pop(name):
            mine.consumer_closed(name)
            self.wake_all()

    def obey(self, name: str, words: list[str]) -> str:
        """Execute a line and return the answer."""
        try:
            match words, self.connections[name]:
                case ["pub", *text], _:
                    return f"ok {self.topic.publish([Message(' '.join(text).encode())])[0]}"
                case ["sub", subscription], None:
                    self.connections[name] = self.topic.subscribe(subscription, start="earliest")
                    return f"ok {name}"
                case ["ack", position], Subscription() as mine:
                    return f"ok {mine.ack(Position.parse(position)).newly_acked}"
                case ["nack", position, ms], Subscription() as mine:
                    return f"ok {mine.nack(Position.parse(position), delay_ms=int(ms))}"
        except (AckStateError, ValueError) as error:
            return f"error {error}"
        return "error expected pub TEXT, or sub NAME and then ack POSITION, nack POSITION DELAY_MS"

    def wake_all(self, opened: str = "") -> None:
        """Wake every connection; `opened` is one for which a limit has opened."""
        self.blocked.discard(opened)
        self.changed.set_result(b"")
        self.changed = asyncio.Future()


if __name__ == "__main__":
    asyncio.run(ShellBroker(sys.argv[1]).run(*map(int, sys.argv[2:])))
