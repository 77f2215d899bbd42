"""Run the broker: python -m examples.broker DIRECTORY [--port 6650] [--flush-ms 1000] [--recording DIRECTORY].

With --admin-port it also serves Pulsar's admin paths that read, for `ackstate pulsar snapshot` and its siblings.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate import AckStateError, CursorConfig, SqliteStore, Subscription, TopicSettings
from ackstate.aio import AsyncTopics
from ackstate.analysis.trace.recording import Recording
from ackstate.delay import DelayConfig
from examples.broker.broker import Broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_TICK_MS = 20


async def serve(directory: Path, *, port: int, flush_ms: int, recording: Path | None, admin_port: int | None) -> None:
    """Serve clients until SIGINT or SIGTERM."""
    settings = TopicSettings(
        delay_index=DelayConfig(tick_time_ms=_TICK_MS), cursor=CursorConfig(flush_interval_ms=flush_ms)
    )
    with ExitStack() as held:
        store = held.enter_context(closing(SqliteStore(directory)))
        topics = AsyncTopics(store, settings=settings, tick_ms=_TICK_MS)
        recorded = None if recording is None else held.enter_context(Recording(recording))

        def follow(subscription: Subscription, topic: str, name: str) -> None:
            if recorded is not None:
                recorded.follow(subscription.cursor, topic=topic, subscription=name, now_ms=topics.clock())

        broker = Broker(topics, follow=follow)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, broker.stop)
        async with admin(store, topics, admin_port):
            await broker.run(port)


@asynccontextmanager
async def admin(store: SqliteStore, topics: AsyncTopics, port: int | None) -> AsyncIterator[None]:
    """Serve the admin paths on 127.0.0.1 while the block runs; None serves nothing. Needs the extra ``admin``."""
    if port is None:
        yield
        return
    import uvicorn  # noqa: PLC0415

    from ackstate.analysis.admin.app import create_app  # noqa: PLC0415

    class Server(uvicorn.Server):
        """Leaves signals to the broker."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Capture none."""
            yield

    app = create_app(store, topics=topics)
    server = Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("admin on", f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)  # noqa: T201
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await serving


def main() -> int:
    """Run the broker; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.broker", description="A broker for clients of Pulsar.")
    parser.add_argument("directory", type=Path, help="where messages and acks are stored; created if missing")
    parser.add_argument("--port", type=int, default=6650, help="on 127.0.0.1; 0 chooses a free one (%(default)s)")
    parser.add_argument("--flush-ms", type=int, default=1_000, help="an ack is durable after this time (%(default)s)")
    parser.add_argument(
        "--recording", type=Path, help="record all acks and persists in this directory, for `ackstate trace`"
    )
    parser.add_argument("--admin-port", type=int, help="serve Pulsar's admin paths there, too; 0 chooses a free port")
    arguments = parser.parse_args()
    try:
        asyncio.run(serve(**vars(arguments)))
    except AckStateError as error:
        print(f"broker: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
