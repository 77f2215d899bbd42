"""The page of metrics names every metric that a module of ours exports."""

from __future__ import annotations

import re
from pathlib import Path

from website import metrics

ROOT = Path(__file__).parents[3]
EXPORTED = re.compile(r"\"((?:pulsar|ackstate)_\w+)\"")
LISTED = [row.name for exporter in metrics.exporters() for row in exporter.metrics()]


def exported_names():
    """Return the names of metrics in modules that create metrics."""
    found = set()
    for folder in ("cursor", "dispatch", "topic", "analysis/admin"):
        for module in (ROOT / "ackstate" / folder).rglob("*.py"):
            text = module.read_text(encoding="utf-8")
            if "prometheus_client" in text:
                found.update(EXPORTED.findall(text))
    return found - {"pulsar_cluster", "pulsar_namespace", "pulsar_topic"}  # labels


def test_every_metric_is_on_the_page_with_a_description():
    assert len(exported_names()) > 30
    assert exported_names() <= set(LISTED)
    assert len(LISTED) == len(set(LISTED))
    page = metrics.page()
    for exporter in metrics.exporters():
        for row in exporter.metrics():
            assert f"| `{row.name}` | {row.kind} | {row.description} |" in page
            assert row.description.endswith(".")


def test_the_metrics_of_publishing_have_their_names_of_prometheus():
    assert "pulsar_broker_topic_messages_delayed_rejected_total" in LISTED


def test_the_metrics_that_the_guide_to_operations_names_are_on_the_page():
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = guide.partition("## Metrics of a broker")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `((?:pulsar|ackstate)_\w+)` \|", table, re.MULTILINE)
    assert len(named) > 15
    assert set(named) <= set(LISTED)
