"""The policies over REST: Pulsar's paths, names and answers, and partial updates that keep unnamed fields."""

import pytest

from ackstate import StoreError
from ackstate.analysis.admin.policy_routes import BrokerPolicies, LevelledPolicies
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.limits import BrokerDelayedDelivery
from ackstate.limits.policies import PolicyOwner, PolicyStore
from ackstate.stores.base import ABSENT

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "/admin/v2/persistent/public/default/orders"
LEVELS = [NAMESPACE, TOPIC]
PULSARS_DEFAULTS = {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 0, "fixedDeliveryDelayInMillis": 0}


def reason(answer):
    """The reason of a refusal, which has nothing else."""
    assert answer.headers["content-type"] == "application/json"
    (only,) = answer.json().items()
    assert only[0] == "reason"
    assert "\n" not in only[1]
    assert "Traceback" not in only[1]
    return only[1]


def wrote(answer):
    assert (answer.status_code, answer.content) == (204, b""), answer.text


@pytest.mark.parametrize("level", LEVELS)
class TestDelays:
    def test_an_update_keeps_what_it_does_not_name(self, ask, level):
        path = f"{level}/delayedDelivery"
        wrote(ask("POST", path, json={"active": True, "tickTime": 500, "maxDeliveryDelayInMillis": 60_000}))
        wrote(ask("POST", path, json={"fixedDeliveryDelayInMillis": 5_000}))
        wrote(ask("POST", path, json={"tickTime": 100, "maxDeliveryDelayInMillis": None}))
        assert ask("GET", path).json() == {
            "active": True,
            "tickTime": 100,
            "maxDeliveryDelayInMillis": 60_000,
            "fixedDeliveryDelayInMillis": 5_000,
        }

    def test_an_explicit_zero_disables(self, ask_with, level):
        ask = ask_with(broker=BrokerPolicies(BrokerDelayedDelivery(max_delivery_delay_ms=9_000)))
        path = f"{level}/delayedDelivery"
        assert ask("GET", f"{path}?applied=true").json()["maxDeliveryDelayInMillis"] == 9_000
        wrote(ask("POST", path, json={"maxDeliveryDelayInMillis": 0}))
        assert ask("GET", path).json() == {"maxDeliveryDelayInMillis": 0}
        assert ask("GET", f"{path}?applied=true").json()["maxDeliveryDelayInMillis"] == 0

    def test_removed_is_null_again_and_may_be_removed_twice(self, ask, level):
        path = f"{level}/delayedDelivery"
        wrote(ask("POST", path, json={"tickTime": 100}))
        wrote(ask("DELETE", path))
        wrote(ask("DELETE", path))
        wrote(ask("POST", path, json={}))
        assert ask("GET", path).json() is None

    def test_a_fixed_delay_while_inactive_is_refused_with_the_reason(self, ask, level):
        path = f"{level}/delayedDelivery"
        answer = ask("POST", path, json={"active": False, "fixedDeliveryDelayInMillis": 5})
        assert answer.status_code == 412
        assert "fixedDeliveryDelayInMillis 5" in reason(answer)
        assert "not active" in reason(answer)
        wrote(ask("POST", path, json={"fixedDeliveryDelayInMillis": 5}))
        assert ask("POST", path, json={"active": False}).status_code == 412
        assert ask("GET", path).json() == {"fixedDeliveryDelayInMillis": 5}


class TestLevels:
    def test_applied_is_the_topics_then_the_namespaces_then_the_brokers(self, ask_with):
        ask = ask_with(broker=BrokerPolicies(BrokerDelayedDelivery(tick_time_ms=7, max_delivery_delay_ms=8)))
        applied = f"{TOPIC}/delayedDelivery?applied=true"
        assert ask("GET", applied).json() == PULSARS_DEFAULTS | {"tickTime": 7, "maxDeliveryDelayInMillis": 8}
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"tickTime": 20, "maxDeliveryDelayInMillis": 30}))
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"tickTime": 10}))
        assert ask("GET", applied).json() == PULSARS_DEFAULTS | {"tickTime": 10, "maxDeliveryDelayInMillis": 30}
        of_namespace = ask("GET", f"{NAMESPACE}/delayedDelivery?applied=true").json()
        assert of_namespace == PULSARS_DEFAULTS | {"tickTime": 20, "maxDeliveryDelayInMillis": 30}
        of_another = ask("GET", "/admin/v2/persistent/public/other/orders/delayedDelivery?applied=true").json()
        assert of_another == PULSARS_DEFAULTS | {"tickTime": 7, "maxDeliveryDelayInMillis": 8}

    def test_a_topic_may_not_disable_what_its_namespace_enforces(self, ask):
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 5_000}))
        for body in ({"fixedDeliveryDelayInMillis": 0}, {"active": False}):
            answer = ask("POST", f"{TOPIC}/delayedDelivery", json=body)
            assert answer.status_code == 412
            assert "would switch off a policy of its namespace" in reason(answer)
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 1}))

    def test_unless_that_is_allowed(self, ask_with):
        ask = ask_with(broker=BrokerPolicies(topic_may_disable=True))
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 5_000}))
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 0}))
        assert ask("GET", f"{TOPIC}/delayedDelivery?applied=true").json()["fixedDeliveryDelayInMillis"] == 0

    def test_a_namespace_may_not_take_away_what_a_topics_fixed_delay_needs(self, ask_with):
        ask = ask_with(broker=BrokerPolicies(BrokerDelayedDelivery(active=False)))
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"active": True}))
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 5}))
        for answer in (
            ask("POST", f"{NAMESPACE}/delayedDelivery", json={"active": False}),
            ask("DELETE", f"{NAMESPACE}/delayedDelivery"),
        ):
            assert answer.status_code == 412
            assert "persistent://public/default/orders" in reason(answer)
        wrote(ask("DELETE", f"{TOPIC}/delayedDelivery"))
        wrote(ask("DELETE", f"{NAMESPACE}/delayedDelivery"))

    def test_a_topic_may_replace_what_its_namespace_enforces(self, ask):
        enforced = {"fixedDeliveryDelayInMillis": 5_000, "maxDeliveryDelayInMillis": 1_000}
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json=enforced))
        own = {"fixedDeliveryDelayInMillis": 1, "maxDeliveryDelayInMillis": 2**63 - 1}
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json=own))
        assert ask("GET", f"{TOPIC}/delayedDelivery?applied=true").json() == PULSARS_DEFAULTS | own


class TestAnotherBroker:
    """Policies that were set under one broker.conf stand under another, which switches delayed delivery off."""

    @pytest.fixture
    def inactive(self, ask, ask_with):
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 5_000}))
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 1}))
        return ask_with(broker=BrokerPolicies(BrokerDelayedDelivery(active=False)))

    @pytest.mark.parametrize(
        ("method", "level", "body"),
        [
            ("POST", NAMESPACE, {"tickTime": 5}),
            ("POST", NAMESPACE, {"maxDeliveryDelayInMillis": 10}),
            ("POST", NAMESPACE, {"active": True}),
            ("POST", NAMESPACE, {"fixedDeliveryDelayInMillis": 0}),
            ("DELETE", NAMESPACE, None),
            ("POST", TOPIC, {"tickTime": 5}),
            ("POST", TOPIC, {"active": True}),
            ("DELETE", TOPIC, None),
        ],
    )
    def test_what_breaks_nothing_more_is_done(self, inactive, method, level, body):
        wrote(inactive(method, f"{level}/delayedDelivery", json=body))

    def test_each_owner_is_logged_at_the_start(self, inactive, store, caplog):
        other = "/admin/v2/namespaces/public/other/delayedDelivery"
        wrote(inactive("POST", other, json={"active": True, "fixedDeliveryDelayInMillis": 9}))
        store.metadata.put(PolicyOwner("public", "default", "bad").path, b"{", expected_version=ABSENT)
        broker = BrokerPolicies(BrokerDelayedDelivery(active=False))
        caplog.clear()  # Another test in this process may have let it log each change, too.
        LevelledPolicies(PolicyStore(store.metadata), broker).log_not_kept()
        assert [(each.levelname, each.getMessage().partition(", has")[0]) for each in caplog.records[:2]] == [
            ("WARNING", "the fixed delay of public/default, 5000 ms"),
            ("ERROR", caplog.records[1].getMessage()),
        ]
        assert "policies of persistent://public/default/bad" in caplog.records[1].getMessage()
        assert [each.getMessage() for each in caplog.records[2:]] == [
            "the fixed delay of persistent://public/default/orders, 1 ms, has no effect: "
            "delayed delivery is not active (set by the broker)"
        ]


@pytest.mark.parametrize("policy", ["becomeOldAckRecordSeconds", "maxUnPersistAckRecordsBytes"])
class TestNumbersInRoutes:
    def test_global_policies_are_read_as_local_and_not_written(self, ask, policy):
        path = f"{TOPIC}/{policy}"
        wrote(ask("POST", path, json=4_096))
        for method, body in (("POST", 5_000), ("DELETE", None)):
            answer = ask(method, f"{path}?isGlobal=true", json=body)
            assert (answer.status_code, "global policies are not supported" in reason(answer)) == (412, True)
        assert ask("GET", f"{path}?isGlobal=true").json() == 4_096

    def test_set_read_and_removed_at_each_level(self, ask, policy):
        default = {"becomeOldAckRecordSeconds": 0, "maxUnPersistAckRecordsBytes": 5_242_880}[policy]
        for level in LEVELS:
            assert ask("GET", f"{level}/{policy}").text == "null"
            assert ask("GET", f"{level}/{policy}?applied=true").json() == default
        wrote(ask("POST", f"{NAMESPACE}/{policy}", json=4_096))
        assert ask("GET", f"{NAMESPACE}/{policy}").json() == 4_096
        assert ask("GET", f"{TOPIC}/{policy}").text == "null"
        assert ask("GET", f"{TOPIC}/{policy}?applied=true").json() == 4_096
        wrote(ask("POST", f"{TOPIC}/{policy}?isGlobal=false", json=0))
        assert ask("GET", f"{TOPIC}/{policy}?applied=true").json() == 0
        wrote(ask("DELETE", f"{TOPIC}/{policy}"))
        assert ask("GET", f"{TOPIC}/{policy}?applied=true").json() == 4_096


class TestNamesInRoutes:
    @pytest.mark.parametrize("name", ["a%2Fb", "a%2fb", "..%2F..%2Fetc"])
    def test_an_encoded_slash_is_refused(self, ask, name):
        assert ask("GET", f"/admin/v2/persistent/public/default/{name}/delayedDelivery").status_code == 400


class TestConcurrentWriters:
    @pytest.mark.parametrize("stale", ['"none"', '"1"', '"', "0", 'W/"0"', "", '"0x"'])
    def test_a_write_on_a_stale_state_is_refused(self, ask, stale):
        path = f"{TOPIC}/delayedDelivery"
        wrote(ask("POST", path, json={"tickTime": 1}))
        for method, body in (("POST", {"tickTime": 2}), ("DELETE", None)):
            answer = ask(method, path, json=body, headers={"If-Match": stale})
            assert answer.status_code == 412
            assert "If-Match" in reason(answer)
        assert ask("POST", f"{TOPIC}/becomeOldAckRecordSeconds", json=5, headers={"If-Match": '"9"'}).status_code == 412
        assert ask("GET", path).json() == {"tickTime": 1}

    @pytest.mark.parametrize("current", ['"0"', "*", '"7", "0"', ' "0" '])
    def test_a_write_on_the_current_state_is_done(self, ask, current):
        path = f"{TOPIC}/delayedDelivery"
        wrote(ask("POST", path, json={"tickTime": 1}))
        wrote(ask("POST", path, json={"tickTime": 2}, headers={"If-Match": current}))

    def test_a_write_in_between_is_a_conflict(self, ask, store, monkeypatch):
        path = PolicyOwner("public", "default", "orders").path
        get, is_first = store.metadata.get, [True]

        def and_somebody_writes(asked):
            value = get(asked)
            if asked == path and is_first and is_first.pop():
                store.metadata.put(path, b'{"version":1,"becomeOldAckRecordSeconds":3}', expected_version=ABSENT)
            return value

        monkeypatch.setattr(type(store.metadata), "get", lambda _, asked: and_somebody_writes(asked))
        answer = ask("POST", f"{TOPIC}/delayedDelivery", json={"tickTime": 1})
        assert answer.status_code == 409
        assert "another client" in reason(answer)
        assert ask("GET", f"{TOPIC}/becomeOldAckRecordSeconds").json() == 3
        assert ask("GET", f"{TOPIC}/delayedDelivery").json() is None


class TestUnreadable:
    """A document that no release writes so, or that a newer one wrote."""

    BAD = pytest.mark.parametrize("document", [b'{"version":1,"x":2}', b'{"version":2}'])

    @BAD
    @pytest.mark.parametrize(
        "path", [f"{level}/{policy}" for level in LEVELS for policy in ("delayedDelivery", "becomeOldAckRecordSeconds")]
    )
    def test_who_asks_for_it_removes_it(self, ask, store, caplog, document, path):
        owner = PolicyOwner("public", "default", "orders" if path.startswith(TOPIC) else None)
        store.metadata.put(owner.path, document, expected_version=ABSENT)
        for method, headers in (("GET", {}), ("DELETE", {}), ("DELETE", {"If-Match": '"0"'})):
            answer = ask(method, path, headers=headers)
            assert answer.status_code == 500
            assert f"policies of {owner}: " in reason(answer)
            assert reason(answer).endswith("DELETE one of its policies with If-Match: * to remove them all unread")
        answer = ask("DELETE", path, headers={"If-Match": "*"})
        wrote(answer)
        assert answer.headers["etag"] == '"none"'
        assert f"removed the policies of {owner}, which could not be read" in caplog.text
        assert ask("GET", path).text == "null"

    @BAD
    def test_a_topic_is_in_nobody_elses_way(self, ask, store, caplog, document):
        store.metadata.put(PolicyOwner("public", "default", "bad").path, document, expected_version=ABSENT)
        wrote(ask("POST", f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 7}))
        wrote(ask("POST", f"{NAMESPACE}/delayedDelivery", json={"tickTime": 1}))
        assert "excluded from the check: policies of persistent://public/default/bad" in caplog.text
        assert ask("GET", f"{NAMESPACE}/delayedDelivery").json() == {"tickTime": 1}
        answer = ask("POST", f"{NAMESPACE}/delayedDelivery", json={"active": False})
        assert (answer.status_code, "default/orders" in reason(answer)) == (412, True)
        wrote(ask("DELETE", f"{NAMESPACE}/delayedDelivery"))


class TestTrouble:
    def test_a_store_that_does_not_answer_is_503(self, ask, store):
        store.close()
        for method, path, body in (
            ("GET", f"{TOPIC}/delayedDelivery", None),
            ("POST", f"{TOPIC}/delayedDelivery", {"tickTime": 1}),
            ("DELETE", f"{NAMESPACE}/becomeOldAckRecordSeconds", None),
            ("GET", f"{TOPIC}/internalStats", None),
            ("GET", "/healthz", None),
            ("GET", "/metrics", None),
        ):
            answer = ask(method, path, json=body)
            assert answer.status_code == 503, path
            assert "the store does not answer" in reason(answer)

    def test_damaged_policies_are_told_and_not_overwritten(self, ask, store):
        store.metadata.put(PolicyOwner("public", "default", "orders").path, b"{", expected_version=ABSENT)
        for method, body in (("GET", None), ("POST", {"tickTime": 1}), ("DELETE", None)):
            answer = ask(method, f"{TOPIC}/delayedDelivery", json=body)
            assert answer.status_code == 500
            assert "policies of persistent://public/default/orders" in reason(answer)

    @pytest.mark.parametrize("error", [StoreError, CorruptStateError, UnsupportedVersionError, OSError])
    def test_the_health_names_no_path_and_the_log_does(self, ask, store, monkeypatch, caplog, error):
        """Whoever reaches the port may ask for it."""

        def fail(*_):
            raise error("/srv/secret-place/store.db cannot be read")

        monkeypatch.setattr(type(store.metadata), "get", fail)
        answer = ask("GET", "/healthz")
        assert answer.status_code == (503 if error is StoreError else 500)
        assert "secret" not in answer.text + str(answer.headers)
        assert f"{error.__name__}: /srv/secret-place" in caplog.text or error in {OSError, CorruptStateError}

    def test_other_methods_and_paths_have_a_reason_too(self, ask):
        answer = ask("PUT", f"{TOPIC}/delayedDelivery")
        assert reason(answer) == "Method Not Allowed"
        assert answer.headers["allow"] == "DELETE, GET, POST"
        assert ask("PUT", f"{TOPIC}/internalStats").headers["allow"] == "GET"
        answer = ask("GET", "/admin/v2/nothing")
        assert answer.status_code == 404
        assert reason(answer) == "Not Found"
