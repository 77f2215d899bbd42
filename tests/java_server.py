"""Java programs that tests start: each with a directory, a log and a port, and ended by its process id."""

import os
import shutil
import signal
import socket
import subprocess
import time

from ackstate.analysis.crash import dying
from ackstate.analysis.crash.runs import LayerSkippedError

ONE_COMPILER = "-XX:TieredStopAtLevel=1"  # Java starts in three quarters of the time.


def free_port():
    """Return a port of the loopback address that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listens(port):
    """Return whether a process accepts connections on a port of the loopback address."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def java_program():
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java or not os.path.exists(java):  # noqa: PTH110 - a text
        raise LayerSkippedError("the server needs Java: JAVA_HOME or java in PATH")
    return java


class JavaServer:
    """A Java process with a port on 127.0.0.1, and a directory with its configuration, its data and its log.

    Start it from the main thread: it ends with the thread that started it. A subclass says its `arguments`.
    """

    def __init__(self, directory, *, name="server"):
        self.directory, self.name, self.process = directory, name, None
        self.log = directory / f"{name}.log"
        self.port = free_port()
        self.hosts = f"127.0.0.1:{self.port}"

    def configure(self, name, settings):
        """Write a file of settings, and return its path."""
        path = self.directory / name
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return path

    def launch(self):
        """Start it without waiting; errors as of `wait_until`, except those of the server."""
        assert self.process is None
        command = [java_program(), "-XX:+UseSerialGC", *self.arguments()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                dying.command_of(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            )

    def wait_until(self, serves, *, within_s=60.0):
        """Wait until it serves; raise `RuntimeError` with its log if it ends, or takes too long."""
        deadline_s = time.monotonic() + within_s
        while self.process.poll() is not None or not serves():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(self.log.read_text(errors="replace"))
            time.sleep(0.02)

    def kill(self):
        """Kill it with SIGKILL, if it is running; the kernel keeps its unsynced writes."""
        self.end(signal.SIGKILL)

    def stop(self):
        """Stop it with SIGTERM, if it is running."""
        self.resume()
        self.end(signal.SIGTERM)

    def pause(self):
        """Stop the process, with all of its threads: it keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self):
        """Continue after `pause`, if it is running."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def end(self, number):
        """End it by a signal, if it is running; kill it if that takes too long."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.send_signal(number)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
