"""Java processes of a Pulsar cluster: started from the jars that `.ci/setup live` fetches, ended by their ids.

`ACKSTATE_PULSAR_JARS` may name the jars of another release, and `JAVA_HOME` the Java that it needs.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ackstate.analysis.crash import dying

JARS = Path(os.environ.get("ACKSTATE_PULSAR_JARS") or Path(sys.prefix, "share", "ackstate", "pulsar"))
_STARTS_WITHIN_S = 240
_OPENED = (
    "java.base/java.lang", "java.base/java.util", "java.base/sun.net", "java.base/java.util.zip", "java.base/java.nio",
    "java.management/sun.management", "jdk.management/com.sun.management.internal",
    "java.base/jdk.internal.platform", "java.base/jdk.internal.misc",
)  # fmt: skip
_LOGGING = """<Configuration status="ERROR"><Appenders><Console name="C"><PatternLayout
pattern="%d{HH:mm:ss.SSS} %-5p %c{1} %m%n%ex{full}"/></Console></Appenders><Loggers>
<Logger name="org.eclipse.jetty.server.RequestLog" level="warn"/><Root level="info"><AppenderRef ref="C"/></Root>
</Loggers></Configuration>
"""


def release():
    """Return the release of Pulsar whose jars are used."""
    (broker,) = JARS.glob("pulsar-broker-[0-9]*.jar")
    return broker.stem.removeprefix("pulsar-broker-")


def free_port():
    """Return a port of the loopback address that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listens(port):
    """Return whether a process accepts connections on a port of the loopback address."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def write_settings(path, settings):
    """Write a file of `key=value` lines."""
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


class JavaProcess:
    """One Java program. It ends when this process does, even when this process is killed.

    Args:
        directory: Where it runs, and writes its log.
        name: Names the log.
        main: The class to run.
        words: Its arguments.
        heap_mib: The most memory of its heap.
        is_compiled: Whether all compilers are used, as in production; without them it starts sooner.
    """

    def __init__(self, directory, name, main, *words, heap_mib=256, is_compiled=False):
        self.directory, self.name = directory, name
        self.log = directory / f"{name}.log"
        logging = directory / "log4j2.xml"
        logging.write_text(_LOGGING)
        home = os.environ.get("JAVA_HOME")
        self._command = [
            str(Path(home, "bin", "java")) if home else "java",
            *(f"-Xmx{heap_mib}m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC"),
            "-XX:-UseDynamicNumberOfCompilerThreads" if is_compiled else "-XX:TieredStopAtLevel=1",
            *(word for module in _OPENED for word in ("--add-opens", f"{module}=ALL-UNNAMED")),
            *("-Dio.netty.tryReflectionSetAccessible=true", "-Djava.net.preferIPv4Stack=true"),
            f"-Dlog4j2.configurationFile={logging}",
            *("-cp", f"{JARS}/*", main, *map(str, words)),
        ]
        self.process = None

    def start(self, is_ready=None):
        """Start it, and wait until it is ready."""
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                dying.command_of(self._command),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
            )  # fmt: skip
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while is_ready is not None and not is_ready():
            assert self.process.poll() is None, f"{self.name} ended, see {self.log}"
            assert time.monotonic() < deadline_s, f"{self.name} is not ready, see {self.log}"
            time.sleep(0.1)
        return self

    def run(self):
        """Start it, and wait until it has ended with success."""
        self.start()
        status = self.process.wait(timeout=_STARTS_WITHIN_S)
        self.process = None
        assert status == 0, f"{self.name} ended with status {status}, see {self.log}"

    def end(self, how=signal.SIGTERM):
        """End it; no-op if it was ended."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.send_signal(how)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
