"""Renders the OpenAPI document as one page that needs neither scripts nor the internet."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24;
       background: #fff; }
h2 { font-size: 1rem; margin: 2rem 0 .25rem; padding: .4rem .6rem; background: #eef1f5; border-left: 4px solid #3567b0;
     overflow-wrap: anywhere; }
h2.post { border-color: #2c7a3f; } h2.delete { border-color: #a3342c; }
h2 b { display: inline-block; min-width: 4.5rem; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .15rem .75rem .15rem 0; border-bottom: 1px solid #dfe3e8; }
td:first-child { white-space: nowrap; width: 16rem; }
"""
# Only the style above is allowed; an injected script would not run.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document of this server: each operation with parameters, body and answers."""
    info = document["info"]
    title = escape(info["title"])
    operations = "".join(
        _operation(method, path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="/openapi.json">/openapi.json</a></p>{operations}</body></html>'
    )


def _operation(method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    title = f'<h2 class="{escape(method)}"><b>{escape(method.upper())}</b> <code>{escape(path)}</code></h2>'
    answers = [(status, answer["description"]) for status, answer in sorted(operation["responses"].items())]
    return "".join(
        (
            title,
            f"<p>{escape(operation.get('description', ''))}</p>",
            _table("Parameter", list(_parameters(operation))),
            _table("Body (application/json)", list(_body(operation, document))),
            _table("Answer", answers),
        )
    )


def _parameters(operation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in operation.get("parameters", ()):
        yield each["name"], f"{each['in']}, {_type(each['schema'])}. {each.get('description', '')}"


def _body(operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "requestBody" not in operation:
        return
    schema = _resolved(operation["requestBody"]["content"]["application/json"]["schema"], document)
    if "properties" not in schema:
        yield _type(schema), ""
    for name, each in schema.get("properties", {}).items():
        yield name, f"{_type(each)}. {each.get('description', '')}"


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return document["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    least = f" from {schema['minimum']:g}" if "minimum" in schema else ""
    length = f" of {schema.get('minLength', 0)} to {schema['maxLength']}" if "maxLength" in schema else ""
    pattern = f", {schema['pattern']}" if "pattern" in schema else ""
    return f"{schema.get('type', '')}{least}{length}{pattern}"


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table><tr><th>{escape(heading)}</th><th></th></tr>{cells}</table>"
