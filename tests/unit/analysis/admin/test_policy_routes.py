"""The policies over REST: Pulsar's paths, names and answers, and partial updates that keep unnamed fields."""

import json

import pytest

from ackstate import StoreError
from ackstate.analysis.admin.app import create_app
from ackstate.analysis.admin.policy_routes import BrokerPolicies, LevelledPolicies
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.limits import BrokerDelayedDelivery
from ackstate.limits.policies import PolicyOwner, PolicyStore
from ackstate.stores.base import ABSENT
from topics import Storyteller

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "/admin/v2/persistent/public/default/orders"
LEVELS = [NAMESPACE, TOPIC]


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


FIELDS = {
    "active": "active",
    "tick": "tickTime",
    "max": "maxDeliveryDelayInMillis",
    "fixed": "fixedDeliveryDelayInMillis",
}


class RefusedError(Exception):
    """An answer with status 412."""


class PolicyStory(Storyteller):
    """Steps on a namespace N, its topic T and another topic O: `set N tick=20; applied T -> tick=20`."""

    paths = {"N": NAMESPACE, "T": TOPIC, "O": "/admin/v2/persistent/public/other/orders"}  # noqa: RUF012 - not changed

    def __init__(self, ask_of):
        self.ask_of = ask_of
        self.do("broker", ())

    def check(self):
        pass

    def do(self, verb, words):
        given = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words if "=" in word)}
        if verb == "broker":  # another one on the same store
            self.ask = self.ask_of(" ".join(words), given)
            return ""
        path = f"{self.paths[words[0]]}/delayedDelivery"
        if verb in {"get", "applied"}:
            found = self.ask("GET", path, params={"applied": "true"} if verb == "applied" else {}).json()
            if found is None:
                return "null"
            told = {name: found[field] for name, field in FIELDS.items() if field in found}
            usual = {"active": True, "tick": 1_000, "max": 0, "fixed": 0} if verb == "applied" else {}
            return " ".join(
                f"{name}={json.dumps(value)}" for name, value in told.items() if value != usual.get(name, "")
            )
        body = {FIELDS[name]: value for name, value in given.items()}
        answer = self.ask("DELETE", path) if verb == "remove" else self.ask("POST", path, json=body)
        if answer.status_code == 412:
            raise RefusedError(reason(answer))
        wrote(answer)
        return ""


BROKERS_OWN = {"active": "active", "tick": "tick_time_ms", "max": "max_delivery_delay_ms"}
AT_EACH_LEVEL = {
    "an update keeps what it does not name": "set L active=true tick=500 max=60000; set L fixed=5000; "
    "set L tick=100 max=null; get L -> active=true tick=100 max=60000 fixed=5000",
    "an explicit 0 disables": "broker max=9000; applied L -> max=9000; set L max=0; get L -> max=0; applied L -> -",
    "what was removed is null again, and may be removed twice":
        "set L tick=100; remove L; remove L; set L; get L -> null",
    "a fixed delay while inactive is refused": "set L active=false fixed=5 ! RefusedError fixedDeliveryDelayInMillis 5 "
    "/ not active; set L fixed=5; set L active=false ! RefusedError not active; get L -> fixed=5",
}  # fmt: skip
STORIES = {
    **{f"{name}, {level}": text.replace(" L", f" {level}") for name, text in AT_EACH_LEVEL.items() for level in "NT"},
    "the topic's applies, then the namespace's, then the broker's": "broker tick=7 max=8; applied T -> tick=7 max=8; "
    "set N tick=20 max=30; set T tick=10; applied T -> tick=10 max=30; applied N -> tick=20 max=30; "
    "applied O -> tick=7 max=8",
    "a topic may not disable what its namespace enforces": "set N fixed=5000; set T fixed=0 ! RefusedError would "
    "switch off a policy of its namespace; set T active=false ! RefusedError would switch off a policy; set T fixed=1",
    "unless that is allowed": "broker may_disable; set N fixed=5000; set T fixed=0; applied T -> -",
    "a namespace may not take away what a topic's fixed delay needs": "broker active=false; set N active=true; "
    "set T fixed=5; set N active=false ! RefusedError persistent://public/default/orders; "
    "remove N ! RefusedError persistent://public/default/orders; remove T; remove N",
    "a topic may replace what its namespace enforces": "set N fixed=5000 max=1000; "
    "set T fixed=1 max=9223372036854775807; applied T -> max=9223372036854775807 fixed=1",
    # Policies that were set under one broker.conf stand under another; what breaks nothing more is done.
    **{
        f"under another broker: {change}": f"set N fixed=5000; set T fixed=1; broker active=false; {change}"
        for change in ("set N tick=5", "set N max=10", "set N active=true", "set N fixed=0", "remove N", "set T tick=5",
                       "set T active=true", "remove T")
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def brokers(standing_store, in_process):
    """The store of the test that runs, and requests to a broker on it by its settings, which is made once."""
    current, made = {}, {}

    def ask_of(words, given):
        if words not in made:
            delays = BrokerDelayedDelivery(**{BROKERS_OWN[name]: value for name, value in given.items()})
            broker = BrokerPolicies(delays, topic_may_disable="may_disable" in words)
            made[words] = in_process(create_app(standing_store(current), broker=broker))
        return made[words]

    return current, ask_of


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_each_story_has_its_policies(brokers, store, story):
    brokers[0]["store"] = store
    PolicyStory(brokers[1]).tell(story)


def test_each_owner_is_logged_at_the_start(ask, ask_with, store, caplog):
    other = "/admin/v2/namespaces/public/other"
    for path, fixed_ms in ((NAMESPACE, 5_000), (TOPIC, 1)):
        wrote(ask("POST", f"{path}/delayedDelivery", json={"fixedDeliveryDelayInMillis": fixed_ms}))
    store.metadata.put(PolicyOwner("public", "default", "bad").path, b"{", expected_version=ABSENT)
    broker = BrokerPolicies(BrokerDelayedDelivery(active=False))
    enforced = {"active": True, "fixedDeliveryDelayInMillis": 9}
    wrote(ask_with(broker=broker)("POST", f"{other}/delayedDelivery", json=enforced))
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
