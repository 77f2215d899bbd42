"""The OpenAPI document and the numbers for Prometheus."""

from prometheus_client import CollectorRegistry, Counter

from ackstate import MemoryStore
from ackstate.analysis.admin.app import create_app

NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
DELAYS = "/admin/v2/namespaces/public/default/delayedDelivery"


class TestOpenApi:
    def test_every_operation_is_described(self, ask):
        document = ask("GET", "/openapi.json").json()
        assert {path: sorted(methods) for path, methods in document["paths"].items()} == {
            "/healthz": ["get"],
            "/metrics": ["get"],
            f"{TOPIC}/internalStats": ["get"],
            **{
                f"{level}/{policy}": ["delete", "get", "post"]
                for level in (NAMESPACE, TOPIC)
                for policy in ("delayedDelivery", "{policy}")
            },
        }

    def test_answers_are_those_of_this_server(self, ask):
        document = ask("GET", "/openapi.json").json()
        for methods in document["paths"].values():
            for method, operation in methods.items():
                statuses = set(operation["responses"])
                assert "422" not in statuses
                assert {"400", "500", "503"} <= statuses
                assert "401" not in statuses
                if method == "post":
                    assert {"204", "409", "412", "413", "415"} <= statuses
        assert set(document["components"]["schemas"]["Refusal"]["properties"]) == {"reason"}

    def test_a_token_is_declared_where_one_is_needed(self, ask, in_process):
        assert "securitySchemes" not in ask("GET", "/openapi.json").json()["components"]
        document = in_process(create_app(MemoryStore(), token=b"token-of-the-test"))("GET", "/openapi.json").json()
        assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
        assert document["paths"]["/metrics"]["get"]["security"] == [{"bearer": []}]
        assert "security" not in document["paths"]["/healthz"]["get"]
        assert "401" in document["paths"]["/metrics"]["get"]["responses"]
        assert "401" not in document["paths"]["/healthz"]["get"]["responses"]


class TestNumbersOfDocuments:
    def numbers(self, ask):
        answer = ask("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines if "_created" not in name}

    def test_policies_are_counted_by_level(self, ask_with):
        ask = ask_with()
        assert self.numbers(ask)['ackstate_policies{level="topic"}'] == 0
        for topic in ("a", "b"):
            ask("POST", f"/admin/v2/persistent/public/default/{topic}/delayedDelivery", json={"tickTime": 1})
        ask("POST", DELAYS, json={"tickTime": 1})
        ask("DELETE", "/admin/v2/persistent/public/default/a/delayedDelivery")
        numbers = self.numbers(ask)
        assert numbers['ackstate_policies{level="topic"}'] == 1
        assert numbers['ackstate_policies{level="namespace"}'] == 1

    def test_requests_are_counted_by_route_and_status_and_not_by_what_clients_name(self, ask_with):
        ask = ask_with()
        for tenant in ("a", "b", "%00"):
            ask("GET", f"/admin/v2/namespaces/{tenant}/c/delayedDelivery")
        ask("POST", DELAYS, content=b"x" * 70_000, headers={"Content-Type": "application/json"})
        ask("BREW", "/coffee")
        found = {name: value for name, value in self.numbers(ask).items() if name.startswith("ackstate_admin_requests")}
        route = f"{NAMESPACE}/delayedDelivery"
        assert found == {
            f'ackstate_admin_requests_total{{method="GET",route="{route}",status="200"}}': 2,
            f'ackstate_admin_requests_total{{method="GET",route="{route}",status="412"}}': 1,
            'ackstate_admin_requests_total{method="POST",route="none",status="413"}': 1,
            'ackstate_admin_requests_total{method="none",route="none",status="404"}': 1,
        }

    def test_other_numbers_of_the_process_are_exported_beside_them(self, ask_with):
        registry = CollectorRegistry()
        Counter("pulsar_broker_topic_messages_delayed_rejected", "Rejected.", registry=registry).inc(3)
        assert self.numbers(ask_with(registry=registry))["pulsar_broker_topic_messages_delayed_rejected_total"] == 3
