"""Requests made up from the OpenAPI document, sound and unsound: only declared answers come, and never a 5xx."""

import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ackstate import MemoryStore, Message, Topics
from ackstate.analysis.admin.app import create_app

ODD = ["..", ".", "%", "\0", "a/b", "é", "\ud800", "\U0001f40d", "x" * 300, "-1", "null", "\r\n"]
SOUND_NAMES = st.text("abzAZ09-=:._", min_size=1, max_size=8)
OPEN_TOPIC = {"tenant": "public", "namespace": "default", "topic": "orders"}
NAMES = SOUND_NAMES | st.sampled_from(ODD) | st.text(min_size=1, max_size=20)
INTEGERS = st.integers(-3, 3) | st.sampled_from([1023, 1024, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def resolved(schema, document):
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def values(schema, document):
    """Values that a schema allows, and now and then others."""
    schema = resolved(schema, document)
    if "anyOf" in schema:
        return st.one_of([values(each, document) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("type") == "object":
        fields = {name: values(each, document) for name, each in schema["properties"].items()}
        return st.fixed_dictionaries({}, optional=fields)
    kinds = {
        "integer": st.integers(schema.get("minimum", -5), schema.get("maximum", 2**40)),
        "boolean": st.booleans(),
        "null": st.none(),
        "string": SOUND_NAMES,
    }
    return kinds[schema["type"]]


def bodies(operation, document):
    if "requestBody" not in operation:
        return st.none() | st.binary(max_size=20)
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    sound = values(schema, document)
    extra = st.tuples(sound, st.dictionaries(st.text(max_size=12), ANY_JSON, max_size=2)).map(
        lambda pair: {**pair[0], **pair[1]} if isinstance(pair[0], dict) else pair[1]
    )
    encoded = st.one_of(sound, sound, extra, ANY_JSON, INTEGERS).map(lambda value: json.dumps(value).encode())
    return encoded | st.binary(max_size=40)


@st.composite
def requests(draw, document):
    path, methods = draw(st.sampled_from(sorted(document["paths"].items())))
    method, operation = draw(st.sampled_from(sorted(methods.items())))
    filled, query, headers = path, {}, {}
    names = OPEN_TOPIC if draw(st.integers(0, 3)) == 0 else {}
    for parameter in operation.get("parameters", ()):
        name, place, schema = parameter["name"], parameter["in"], resolved(parameter["schema"], document)
        if place == "path":
            value = (
                draw(st.sampled_from(schema["enum"]) | NAMES) if "enum" in schema else names.get(name) or draw(NAMES)
            )
            filled = filled.replace(f"{{{name}}}", quote(value.encode("utf-8", "surrogatepass"), safe=""))
        elif place == "query" and draw(st.booleans()):
            query[name] = draw(st.sampled_from(["true", "false", "1", "", "banana", "\0"]))
        elif place == "header" and draw(st.booleans()):
            headers[name] = draw(
                st.sampled_from(['"none"', '"0"', '"1"', "*", '"', ",,", 'W/"0"', '"9999999999999999"'])
            )
    headers["Content-Type"] = draw(st.sampled_from(["application/json"] * 3 + ["text/plain"]))
    return (
        method,
        filled,
        operation,
        {"params": query, "headers": headers, "content": draw(bodies(operation, document))},
    )


@pytest.mark.slow
def test_whatever_is_sent_only_declared_answers_come(in_process):
    store = MemoryStore()
    topics = Topics(store)
    topic = topics.open("persistent://public/default/orders", now_ms=0)
    topic.subscribe("billing", now_ms=0).dispatch("ann", 1, now_ms=0)
    topic.publish([Message(b"apples")], now_ms=0)
    ask = in_process(create_app(store, topics=topics))
    document = ask("GET", "/openapi.json").json()
    seen = set()

    # Enough, and always the same, to come by each kind of answer.
    @settings(max_examples=max(200, settings().max_examples), derandomize=True, deadline=None, database=None)
    @given(requests(document))
    def check(request):
        method, path, operation, options = request
        answer = ask(method.upper(), path, **options)
        status = answer.status_code
        seen.add(status)
        assert status < 500, answer.text
        # A client removes dots from a path, which may then be one that is only read.
        is_other_path = status == 405 and {".", ".."} & {*path.split("/")}
        assert is_other_path or str(status) in operation["responses"], (status, answer.text)
        if status >= 400:
            assert set(answer.json()) == {"reason"}
        elif status == 204:
            assert answer.content == b""

    check()
    assert {200, 204, 400, 404, 412, 415} <= seen
    for kind in ("stats", "internalStats", "explain"):
        assert ask("GET", f"/admin/v2/persistent/public/default/orders/{kind}").status_code == 200
