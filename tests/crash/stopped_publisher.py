"""A process that publishes to a message log in a cluster, and is stopped by a signal: a broker that was paused.

As a program, it publishes one message after the other and prints a line for each received position, until it is fenced.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ackstate.analysis.crash import dying
from ackstate.errors import LogFencedError
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.topic.log import MessageLog
from crash import PATHS

_FENCED = "fenced"
_ENDS_WITHIN_S = 60.0
_MESSAGES_AFTER_STOP = 20


class StoppedPublisher:
    """The process, as seen from outside."""

    def __init__(self, hosts, *, root, topic, entries_per_ledger_max):
        self.published = {}
        """Every message that was reported as stored, by position."""
        self.is_fenced = False
        self._is_enough = threading.Event()  # set after the requested number of messages, or at the end
        self._message_count = 1
        self._process = subprocess.Popen(
            dying.command_of(
                [
                    *(sys.executable, "-P", "-m", "crash.stopped_publisher"),
                    *(hosts, root, topic, str(entries_per_ledger_max)),
                ]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **PATHS},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_it_publishes(self):
        """Return whether it published in time."""
        return self._is_enough.wait(_ENDS_WITHIN_S) and bool(self.published)

    def stop(self):
        self._signal_all(signal.SIGSTOP)

    def resume(self):
        """Continue it until it is fenced, or has published too many messages without it, and kill it."""
        self._message_count = len(self.published) + _MESSAGES_AFTER_STOP
        self._is_enough.clear()
        self._signal_all(signal.SIGCONT)
        self._is_enough.wait(_ENDS_WITHIN_S)
        self.close()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _signal_all(self, number):
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        for process_id in (self._process.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(process_id, number)

    def _read(self):
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.strip() == _FENCED:
                    self.is_fenced = True
                elif line.endswith("\n"):
                    position, payload = line.split()
                    self.published[Position.parse(position)] = payload.encode()
                    if len(self.published) >= self._message_count:
                        self._is_enough.set()
        self._is_enough.set()


def difference(log, published):
    """Describe the published messages that a log lacks; empty if it has all."""
    positions = sorted(published)
    missing = [str(position) for position in positions if position not in log.ledgers]
    if missing:
        return f"missing are {', '.join(missing[:5])}"
    stored = [message.payload for message in log.read(positions)]
    return "" if stored == [published[each] for each in positions] else "another message is where one was published"


def publish_until_fenced(store, topic, *, entries_per_ledger_max):
    """Publish, and report each position with its payload; a failure is retried with another message."""
    log = MessageLog.open(store, topic=topic, entries_per_ledger_max=entries_per_ledger_max)
    number = 0
    while True:
        number += 1
        payload = f"{os.getpid()}-{number}"
        try:
            (position,) = log.publish([Message(payload.encode(), publish_time_ms=number)])
        except LogFencedError:
            _report(_FENCED)
            return
        except StoreError:
            continue
        _report(f"{position} {payload}")


def _report(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    from ackstate.stores.bookkeeper import BookKeeperStore
    from crash.bookkeeper_cluster import bookkeeper_options

    hosts, root, topic, entries_per_ledger_max = sys.argv[1:]
    store = BookKeeperStore(
        hosts, root=root, bookkeeper=bookkeeper_options(), session_timeout_s=2.0, call_timeout_s=20.0
    )
    publish_until_fenced(store, topic, entries_per_ledger_max=int(entries_per_ledger_max))
    store.close()


if __name__ == "__main__":
    main()
