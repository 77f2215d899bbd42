"""Hosts RocksDB's Java library: the child process of `ackstate.stores.pulsar_rocksdb`.

python -P -m ackstate.stores.pulsar_rocksdb_worker SOCKET, the number of an open socket. It is the release of
RocksDB that Pulsar uses, so that Pulsar can read the files. The process ends when the requests end.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any, final

import jpype

from ackstate.stores.bookkeeper_frames import FrameReader, frame
from ackstate.stores.bookkeeper_java import start_java

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class Database:
    """The operations that the parent may request."""

    def start(self, class_path: Sequence[str], directory: str, only_reads: bool) -> None:
        """Start Java and open a database that exists."""
        start_java(class_path, ["-Xmx128m"])
        rocksdb = jpype.JClass("org.rocksdb.RocksDB")
        rocksdb.loadLibrary()
        options = jpype.JClass("org.rocksdb.Options")().setCreateIfMissing(False)
        self._bytes = jpype.JArray(jpype.JByte)
        self._synced = jpype.JClass("org.rocksdb.WriteOptions")().setSync(True)
        self._database = rocksdb.openReadOnly(options, directory) if only_reads else rocksdb.open(options, directory)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None if there is none."""
        return _bytes_of(self._database.get(self._bytes(key)))

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys with a prefix, sorted."""
        found = []
        position = self._database.newIterator()
        position.seek(self._bytes(prefix))
        while position.isValid() and (key := bytes(memoryview(position.key()))).startswith(prefix):
            found.append(key)
            position.next()
        position.status()
        position.close()
        return found

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value, synced."""
        self._database.put(self._synced, self._bytes(key), self._bytes(value))

    def delete(self, key: bytes) -> None:
        """Delete a value, synced."""
        self._database.delete(self._synced, self._bytes(key))

    def close(self) -> None:
        """Close the database, so that a broker can open it."""
        self._database.close()


def _bytes_of(value: Any) -> bytes | None:
    return None if value is None else bytes(memoryview(value))


def main(requests: socket.socket) -> None:
    """Serve until the requests end."""
    reader, database = FrameReader(requests), Database()
    while (request := reader.read()) is not None:
        operation, arguments = request
        try:
            reply = (True, getattr(database, operation)(*arguments))
        except Exception as error:
            reply = (False, " ".join(str(error).split()) or type(error).__name__)
        requests.sendall(frame(reply))


if __name__ == "__main__":
    try:
        main(socket.socket(fileno=int(sys.argv[1])))
    finally:
        os._exit(0)
