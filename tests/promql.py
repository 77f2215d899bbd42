"""Checks queries: each is PromQL, and selects samples of a real scrape by labels that they have."""

import re

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scraper adds."""


def samples_of(text):
    """Return (name, labels, value) of each sample of a scrape."""
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def texts_of(dashboard):
    """Yield each text of a dashboard that selects samples, with the labels that its legend names."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            expression, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            yield expression, [label]


def matches(matcher, value):
    is_pattern = matcher.op in (promql_parser.MatchOp.Re, promql_parser.MatchOp.NotRe)
    is_equal = bool(re.fullmatch(matcher.value, value)) if is_pattern else value == matcher.value
    return is_equal == (matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re))


def selected_by(selector, samples):
    """Return the labels of the samples of a selector, which has no `or`."""
    assert not selector.matchers.or_matchers
    matchers = selector.matchers.matchers
    found = []
    for name, labels, _ in samples:
        if name == selector.name:
            assert {each.name for each in matchers} <= set(labels), f"{selector.prettify()}: no such label of {name}"
            if all(matches(each, labels[each.name]) for each in matchers):
                found.append(set(labels))
    assert found, f"nothing is selected by {selector.prettify()}"
    return set.intersection(*found)


def labels_of(expression, samples):
    """Return the labels of the results of an expression, and check all labels that it names."""
    match expression:
        case promql_parser.VectorSelector():
            return selected_by(expression, samples)
        case promql_parser.AggregateExpr():
            inner, modifier = labels_of(expression.expr, samples), expression.modifier
            if str(expression.op) == "topk":
                return inner
            kept = set() if modifier is None else set(modifier.labels)
            assert modifier is None or modifier.type == promql_parser.AggModifierType.By
            assert kept <= inner, f"{expression.prettify()}: there are the labels {inner}"
            return kept
        case promql_parser.MatrixSelector():
            parts = [expression.vector_selector]
        case promql_parser.Call():
            parts = expression.args
        case promql_parser.BinaryExpr():
            assert expression.modifier is None
            parts = [expression.lhs, expression.rhs]
        case promql_parser.NumberLiteral():
            parts = []
        case _:
            raise AssertionError(f"{expression.prettify()} cannot be checked")
    # Two vectors are joined by all their labels; a number has none.
    found = [labels for labels in (labels_of(part, samples) for part in parts) if labels]
    assert all(labels == found[0] for labels in found), expression.prettify()
    return found[0] if found else set()


def check_query(text, legend, samples):
    """Fail unless a query is PromQL that selects samples, by labels that they have, and so does its legend."""
    text = re.sub(r"\$(cluster|namespace|ledger|cursor|topic|subscription|broker)\b", ".*", text)
    labels = labels_of(promql_parser.parse(text.replace("$__rate_interval", "5m")), samples)
    assert set(legend) <= labels | OF_PROMETHEUS, f"{text}: no such label as in {legend}"
