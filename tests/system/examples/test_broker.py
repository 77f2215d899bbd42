"""The example broker with the real Pulsar client: each test has a topic of its own."""

import time
from datetime import timedelta
from itertools import pairwise

import pulsar
import pytest
from pulsar import ConsumerType

from example_broker import BrokerProcess, client_of, publish, publish_batch, receive, rest, subscribe, texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    broker = BrokerProcess(tmp_path_factory.mktemp("broker") / "store")
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def client(running):
    with client_of(running) as client:
        yield client


@pytest.fixture
def topic(request):
    return request.node.name


def numbers(count, prefix=""):
    return [f"{prefix}{number}" for number in range(count)]


def test_messages_alone_and_in_batches_come_in_order_as_they_were_published(client, topic):
    consumer = subscribe(client, topic)
    ids = publish(client, topic, *numbers(3), properties={"a": "b"}, partition_key="key", event_timestamp=7)
    publish_batch(client, topic, *numbers(4, "batch "), properties={"a": "c"}, partition_key="key")
    messages = receive(consumer, 7)
    assert texts(messages) == [*numbers(3), *numbers(4, "batch ")]
    assert [message.message_id() for message in messages[:3]] == ids
    assert [message.message_id().batch_index() for message in messages] == [-1, -1, -1, 0, 1, 2, 3]
    assert {message.properties()["a"] for message in messages} == {"b", "c"}
    assert {(message.partition_key(), message.redelivery_count()) for message in messages} == {("key", 0)}
    assert messages[0].event_timestamp() == 7
    assert consumer.get_last_message_id() == messages[-1].message_id()


def test_what_is_compressed_or_large_comes_back(client, topic):
    consumer = subscribe(client, topic)
    producer = client.create_producer(topic, compression_type=pulsar.CompressionType.ZLib)
    producer.send(b"x" * 1_000_000)
    publish(client, topic, "y" * 4_000_000)
    assert [len(message.data()) for message in receive(consumer, 2)] == [1_000_000, 4_000_000]


def test_consumers_that_share_take_turns(client, topic):
    consumers = [subscribe(client, topic, kind=ConsumerType.Shared) for _ in range(2)]
    publish(client, topic, *numbers(10))
    halves = [texts(receive(consumer, 5)) for consumer in consumers]
    assert sorted(halves[0] + halves[1]) == numbers(10)
    assert all(int(later) - int(earlier) <= 3 for half in halves for earlier, later in pairwise(half))


def test_a_key_has_one_consumer_and_keeps_its_order(client, topic):
    # Names of the client's own choice are random, and now and then give one consumer all the keys.
    consumers = [subscribe(client, topic, kind=ConsumerType.KeyShared, consumer_name=name) for name in "ab"]
    keys = [f"key {number}" for number in range(8)]
    for round_number in range(3):
        for key in keys:
            publish(client, topic, str(round_number), partition_key=key)
    producer = client.create_producer(
        topic, batching_enabled=True, batching_type=pulsar.BatchingType.KeyBased, batching_max_publish_delay_ms=5_000
    )
    for number in (3, 4):
        for key in keys:
            producer.send_async(str(number).encode(), lambda *_: None, partition_key=key)
    producer.flush()
    owners = {}
    for number, consumer in enumerate(consumers):
        for message in rest(consumer, silence_ms=300):
            owners.setdefault(message.partition_key(), []).append((number, int(message.data())))
            consumer.acknowledge(message)
    assert owners.keys() == set(keys)
    for key, received in owners.items():
        assert received == [(received[0][0], number) for number in range(5)], key
    assert {received[0][0] for received in owners.values()} == {0, 1}


def test_an_exclusive_subscription_has_one_consumer(client, topic):
    first = subscribe(client, topic)
    with pytest.raises(pulsar.ConsumerBusy):
        subscribe(client, topic)
    first.close()
    subscribe(client, topic)


def test_the_type_of_a_subscription_does_not_change(client, topic):
    subscribe(client, topic, kind=ConsumerType.Shared)
    with pytest.raises(pulsar.NotAllowedError):
        subscribe(client, topic, kind=ConsumerType.KeyShared)


def test_a_nack_redelivers_and_counts(client, topic):
    consumer = subscribe(client, topic, kind=ConsumerType.Shared, negative_ack_redelivery_delay_ms=100)
    publish(client, topic, "a", "b")
    first, second = receive(consumer, 2)
    consumer.acknowledge(first)
    for count in (1, 2):
        consumer.negative_acknowledge(second)
        (second,) = receive(consumer, 1)
        assert (texts([second]), second.redelivery_count()) == (["b"], count)
    consumer.redeliver_unacknowledged_messages()
    assert receive(consumer, 1)[0].redelivery_count() == 3


def test_a_message_that_is_nacked_too_often_goes_to_the_dead_letter_topic(client, topic):
    policy = pulsar.ConsumerDeadLetterPolicy(1, f"{topic}-dead", "graveyard")
    consumer = subscribe(
        client, topic, kind=ConsumerType.Shared, negative_ack_redelivery_delay_ms=100, dead_letter_policy=policy
    )
    publish(client, topic, "poison")
    for _ in range(2):
        consumer.negative_acknowledge(receive(consumer, 1)[0])
    dead = client.subscribe(f"{topic}-dead", "graveyard", consumer_type=ConsumerType.Shared)
    assert texts(receive(dead, 1)) == ["poison"]


def test_an_unacked_message_of_a_batch_comes_again_alone(client, topic):
    options = {"kind": ConsumerType.Shared, "batch_index_ack_enabled": True}
    consumer = subscribe(client, topic, **options)
    publish_batch(client, topic, *numbers(70))
    for message in receive(consumer, 70):
        if message.data() not in {b"3", b"66"}:
            consumer.acknowledge(message)
    consumer.close()
    consumer = subscribe(client, topic, **options)
    again = receive(consumer, 2)
    assert texts(again) == ["3", "66"]
    for message in again:
        consumer.acknowledge(message)
    consumer.close()
    assert not rest(subscribe(client, topic, **options), silence_ms=200)


def test_a_delayed_message_is_not_early_and_passes_no_limit(client, topic):
    consumer = subscribe(client, topic, kind=ConsumerType.Shared)
    due_s = time.time() + 0.5
    publish(client, topic, "later", deliver_at=int(due_s * 1_000))
    publish(client, topic, "soon", deliver_after=timedelta(milliseconds=200))
    publish(client, topic, "now")
    assert texts(receive(consumer, 2)) == ["now", "soon"]
    assert texts(receive(consumer, 1)) == ["later"]
    assert time.time() >= due_s


def test_seek_goes_to_a_message_or_a_time(client, topic):
    consumer = subscribe(client, topic, start_message_id_inclusive=True)
    ids = publish(client, topic, *numbers(3))
    time.sleep(0.02)
    between_ms = int(time.time() * 1_000)
    publish(client, topic, "3", "4")
    consumer.acknowledge_cumulative(receive(consumer, 5)[-1])
    for target, expected in (
        (ids[1], numbers(5)[1:]),
        (pulsar.MessageId.earliest, numbers(5)),
        (between_ms, ["3", "4"]),
        (0, numbers(5)),
    ):
        consumer.seek(target)
        messages = receive(consumer, len(expected))
        assert texts(messages) == expected, target
        consumer.acknowledge_cumulative(messages[-1])
    consumer.seek(pulsar.MessageId.latest)
    publish(client, topic, "5")
    assert texts(receive(consumer, 1)) == ["5"]


def test_unsubscribe_forgets_the_acks(client, topic):
    consumer = subscribe(client, topic)
    publish(client, topic, "a", "b")
    first, _ = receive(consumer, 2)
    consumer.acknowledge(first)
    consumer.close()  # which sends the ack
    consumer = subscribe(client, topic)
    assert texts(receive(consumer, 1)) == ["b"]
    consumer.unsubscribe()
    assert texts(receive(subscribe(client, topic), 2)) == ["a", "b"]


def test_many_producers_share_syncs_and_lose_nothing(client, topic):
    consumer = subscribe(client, topic)
    producers = [client.create_producer(topic) for _ in range(4)]
    for number in range(100):
        for name, producer in zip("abcd", producers, strict=True):
            producer.send_async(f"{name}{number}".encode(), lambda *_: None)
    for producer in producers:
        producer.flush()
    received = texts(receive(consumer, 400))
    for name in "abcd":
        assert [text for text in received if text[0] == name] == numbers(100, name)


def test_what_the_broker_does_not_have_is_an_error(client, topic):
    schema = pulsar.schema.StringSchema()
    for error, call in (
        (pulsar.NotAllowedError, lambda: client.create_reader(topic, pulsar.MessageId.earliest)),
        (pulsar.NotAllowedError, lambda: client.subscribe(topic, "s", is_read_compacted=True)),
        (pulsar.IncompatibleSchema, lambda: client.subscribe(topic, "s", schema=schema)),
        (pulsar.IncompatibleSchema, lambda: client.create_producer(topic, schema=schema)),
        (
            pulsar.NotAllowedError,
            lambda: client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive),
        ),
        (
            pulsar.NotAllowedError,
            lambda: subscribe(
                client,
                topic,
                kind=ConsumerType.KeyShared,
                key_shared_policy=pulsar.ConsumerKeySharedPolicy(pulsar.KeySharedMode.Sticky, False, [(0, 65_535)]),
            ),
        ),
        (pulsar.NotAllowedError, lambda: client.create_producer(f"non-persistent://public/default/{topic}")),
    ):
        with pytest.raises(error):
            call()
    publish(client, topic, "the connection works")


def test_a_message_in_chunks_comes_back_whole(client, topic):
    consumer = subscribe(client, topic)
    producer = client.create_producer(topic, chunking_enabled=True)
    producer.send(b"x" * 11_000_000)
    (message,) = receive(consumer, 1)
    assert message.data() == b"x" * 11_000_000
    consumer.acknowledge(message)
    consumer.close()
    assert not rest(subscribe(client, topic), silence_ms=200)
