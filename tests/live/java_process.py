"""Java processes of a Pulsar cluster: started from the jars that `.ci/setup live` fetches, ended by their ids.

`ACKSTATE_PULSAR_JARS` may name the jars of another release, and `JAVA_HOME` the Java that it needs.
"""

import os
import sys
from pathlib import Path

from java_server import ONE_COMPILER, JavaServer

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


class JavaProcess(JavaServer):
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
        super().__init__(directory, name=name)
        self._heap_mib, self._is_compiled = heap_mib, is_compiled
        self.main = main, *map(str, words)

    def arguments(self):
        logging = self.directory / "log4j2.xml"
        logging.write_text(_LOGGING)
        return (
            *(f"-Xmx{self._heap_mib}m", "-XX:MaxDirectMemorySize=512m"),
            "-XX:-UseDynamicNumberOfCompilerThreads" if self._is_compiled else ONE_COMPILER,
            *(word for module in _OPENED for word in ("--add-opens", f"{module}=ALL-UNNAMED")),
            *("-Dio.netty.tryReflectionSetAccessible=true", "-Djava.net.preferIPv4Stack=true"),
            f"-Dlog4j2.configurationFile={logging}",
            *("-cp", f"{JARS}/*", *self.main),
        )

    def start(self, is_ready):
        """Start it, and wait until it is ready."""
        self.launch()
        self.wait_until(is_ready, within_s=_STARTS_WITHIN_S)

    def run(self):
        """Start it, and wait until it has ended with success."""
        self.launch()
        status = self.process.wait(timeout=_STARTS_WITHIN_S)
        self.process = None
        assert status == 0, f"{self.name} ended with status {status}, see {self.log}"
