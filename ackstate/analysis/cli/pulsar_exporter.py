"""`ackstate pulsar exporter` serves bounds on the redelivery of live subscriptions to Prometheus."""

from __future__ import annotations

from typing import Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import duration_option
from ackstate.analysis.cli.pulsar_access import (
    ANSWER_MIB,
    AnswerMibOption,
    NamespaceOption,
    RequestRateOption,
    RequestTimeoutOption,
    TenantOption,
    TokenFileOption,
    TokenHostOption,
    TopicOption,
    TrustOption,
    admin_server,
    open_admin,
)
from ackstate.analysis.durations import Duration
from ackstate.errors import AckStateError


def exporter(
    url: Annotated[str, typer.Argument(metavar="URL", help="A broker, as http://HOST:8080.")],
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65_535, help="The port to listen on; 0 is any free port.")
    ] = 9_478,
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on, for all clients that reach it.")] = (
        "127.0.0.1"
    ),
    every: Annotated[
        Duration,
        duration_option(plain_unit="s", least="1s", most="1h", help="Look at the cluster this often."),
    ] = Duration(30_000),
    requests_per_second: RequestRateOption = 50,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    topic: TopicOption = None,
    token_file: TokenFileOption = None,
    token_host: TokenHostOption = None,
    tls_trust_cert_path: TrustOption = "",
    request_timeout: RequestTimeoutOption = Duration(60_000),
    answer_mib_max: AnswerMibOption = ANSWER_MIB,
) -> None:
    """Serve to Prometheus how many messages of each subscription a crash would redeliver, at least and at most.

    Looks at all topics every 30s in the background, and a scrape gets the
    latest result: it costs the brokers nothing, however many Prometheus servers
    there are, and each look narrows the bounds of the next. Two requests for
    each topic and look; at 50 a second, 750 topics take 30s. A look that takes
    longer than --every is followed by the next at once.

    A broker that does not answer is a metric, ackstate_pulsar_topics_unread.
    Prints one line when it is ready; exits cleanly on SIGTERM and SIGINT.
    """
    server = admin_server(
        url, token_file, timeout=request_timeout, trust_cert_path=tls_trust_cert_path, answer_mib_max=answer_mib_max
    )
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[admin]") from error
    from ackstate.analysis.pulsar.snapshot.request_rate import RequestRate

    rate = RequestRate(requests_per_second)
    with open_admin(server, token_host, rate) as admin:
        from ackstate.analysis.pulsar.exporter.collection import Collector
        from ackstate.analysis.pulsar.exporter.metrics import ExporterCollector
        from ackstate.analysis.pulsar.exporter.server import ExporterSettings, run_exporter
        from ackstate.analysis.pulsar.snapshot.sources import LiveBroker

        def make_source() -> LiveBroker:
            return LiveBroker(admin, topics=topic or [], namespaces=namespace or [], tenants=tenant or [])

        run_exporter(
            Collector(make_source),
            ExporterCollector(rate),
            ExporterSettings(host, port, every.seconds),
            announce=console.show,
            complain=console.complain,
        )
