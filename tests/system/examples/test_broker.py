"""The example broker with the real Pulsar client, each test with a topic of its own, and with commands of any kind."""

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise

import google_crc32c
import pulsar
import pytest
from pulsar import ConsumerType

from example_broker import BrokerProcess, client_of, publish, publish_batch, receive, rest, subscribe, texts
from examples.broker.framing import encode_frame, read_frame
from examples.broker.pulsar_api_pb2 import BaseCommand, MessageMetadata, ServerError

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


# --- Commands that the Python client does not send, and other bytes

REQUEST_ID = 77


class CommandClient:
    """A client that sends any command."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, name, entry=b"", **fields):
        self.writer.write(encode_frame(name, entry, **fields))

    async def answer(self):
        frame = await asyncio.wait_for(read_frame(self.reader), 20)
        return frame.name, frame.command

    async def ask(self, name, entry=b"", **fields):
        self.send(name, entry, **fields)
        return await self.answer()

    async def succeed(self, name, **fields):
        assert (await self.ask(name, request_id=REQUEST_ID, **fields))[1].request_id == REQUEST_ID

    async def error(self, name, **fields):
        """Return the number of the error that a request is answered with."""
        answer, command = await self.ask(name, request_id=REQUEST_ID, **fields)
        assert (command.request_id, bool(command.message)) == (REQUEST_ID, True), answer
        return answer, ServerError.Name(command.error)

    async def is_hung_up_on(self):
        return await asyncio.wait_for(self.reader.read(), 20) == b""


@asynccontextmanager
async def connected(broker, *, as_client=True):
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    client = CommandClient(reader, writer)
    if as_client:
        name, command = await client.ask("connect", protocol_version=21)
        assert (name, command.protocol_version) == ("connected", 19)
    try:
        yield client
    finally:
        writer.close()


def run(broker, story, **options):
    async def told():
        async with connected(broker, **options) as client:
            return await story(client)

    return asyncio.run(told())


def topic_name(name):
    return f"persistent://public/default/{name}"


def entry_of(*, damaged=False, **fields):
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **fields).SerializeToString()
    content = len(metadata).to_bytes(4) + metadata + b"payload"
    return b"\x0e\x01" + (google_crc32c.value(content) ^ damaged).to_bytes(4) + content


def test_every_request_that_is_not_supported_is_answered_with_an_error(running):
    supported = {"get_last_message_id", "unsubscribe", "seek"}
    requests = {
        field.name
        for field in BaseCommand.DESCRIPTOR.oneofs[0].fields
        if field.message_type.name in {"UnsupportedRequest", "ConsumerRequest"}
    } - {"close_consumer"}

    async def story(client):
        for name in sorted(requests | {"seek"}):
            answer, error = await client.error(name, **({"consumer_id": 1} if name in supported else {}))
            assert error == ("ConsumerNotFound" if name in supported else "NotAllowedError"), name
            own = {"consumer_stats": "consumer_stats_response", "get_schema": "get_schema_response"}
            assert answer == own.get(name, "error")
        assert (await client.ask("ping"))[0] == "pong"

    run(running, story)


def test_an_ack_is_answered_on_request(running):
    async def story(client):
        async def ack(**fields):
            name, command = await client.ask("ack", consumer_id=1, request_id=REQUEST_ID, **fields)
            assert (name, command.request_id, command.consumer_id) == ("ack_response", REQUEST_ID, 1)
            return ServerError.Name(command.error) if command.HasField("error") else None

        nowhere = {"ledger_id": 10**6, "entry_id": 9}
        assert await ack(type=0, message_id=[nowhere]) == "ConsumerNotFound"
        await client.succeed("producer", topic=topic_name("acks"), producer_id=1)
        name, command = await client.ask("send", entry_of(), producer_id=1, sequence_id=0)
        assert name == "send_receipt"
        here = {"ledger_id": command.message_id.ledger_id, "entry_id": command.message_id.entry_id}
        await client.succeed(
            "subscribe", topic=topic_name("acks"), subscription="s", type=1, consumer_id=1, initial_position=1
        )
        assert await ack(type=0, message_id=[nowhere, here]) == "MetadataError"
        client.send("flow", consumer_id=1, permits=1)
        assert (await client.ask("ping"))[0] == "pong", "the valid one of the two acks counts"
        assert await ack(type=0, message_id=[here], txnid_most_bits=3) == "NotAllowedError"
        assert await ack(type=1, message_id=[here]) == "NotAllowedError"
        assert await ack(type=0, message_id=[here]) is None

    run(running, story)


def test_a_message_that_is_damaged_or_in_a_transaction_is_refused_and_the_next_one_is_not(running):
    async def story(client):
        await client.succeed("producer", topic=topic_name("sends"), producer_id=5)
        for number, (entry, expected) in enumerate(
            ((entry_of(damaged=True), "ChecksumError"), (entry_of(txnid_most_bits=1), "NotAllowedError"))
        ):
            name, command = await client.ask("send", entry, producer_id=5, sequence_id=number)
            assert (name, command.producer_id, command.sequence_id) == ("send_error", 5, number)
            assert ServerError.Name(command.error) == expected
        name, command = await client.ask("send", entry_of(highest_sequence_id=9), producer_id=5, sequence_id=8)
        assert (name, command.sequence_id, command.highest_sequence_id) == ("send_receipt", 8, 9)

    run(running, story)


def test_receipts_come_in_the_order_of_the_messages_whatever_their_topics(running):
    async def story(client):
        for number in range(3):
            await client.succeed("producer", topic=topic_name(f"order-{number}"), producer_id=number)
        sent = [(number % 3, number) for number in range(300)]
        for producer_id, sequence_id in sent:
            client.send("send", entry_of(), producer_id=producer_id, sequence_id=sequence_id)
        receipts = [(await client.answer())[1] for _ in sent]
        assert [(each.producer_id, each.sequence_id) for each in receipts] == sent

    run(running, story)


def test_failover_consumers_learn_which_of_them_is_active(running):
    async def story(client):
        async def subscribe(consumer_id, priority):
            await client.succeed(
                "subscribe", topic=topic_name("failover"), subscription="s", type=2, consumer_id=consumer_id,
                priority_level=priority, consumer_name="c",
            )  # fmt: skip

        async def changes(count):
            told = [await client.answer() for _ in range(count)]
            assert {name for name, _ in told} == {"active_consumer_change"}
            return {command.consumer_id: command.is_active for _, command in told}

        await subscribe(1, 1)
        assert await changes(1) == {1: True}
        await subscribe(2, 0)
        assert await changes(2) == {1: False, 2: True}
        client.send("close_consumer", consumer_id=2, request_id=REQUEST_ID)
        assert await changes(1) == {1: True}
        assert (await client.answer())[0] == "success"

    run(running, story)


def test_a_client_with_a_token_is_refused_and_hung_up_on(running):
    async def told(client):
        _, command = await client.ask("connect", protocol_version=21, auth_method_name="token")
        assert (ServerError.Name(command.error), await client.is_hung_up_on()) == ("AuthenticationError", True)

    run(running, told, as_client=False)


def test_a_client_that_does_not_keep_to_the_protocol_is_hung_up_on(running):
    async def other_bytes(client):
        client.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert await client.is_hung_up_on()

    async def no_connect(client):
        client.send("ping")
        assert await client.is_hung_up_on()

    async def no_producer(client):
        client.send("send", entry_of(), producer_id=1, sequence_id=0)
        assert await client.is_hung_up_on()

    async def no_metadata(client):
        await client.succeed("producer", topic=topic_name("bad"), producer_id=1)
        client.send("send", b"\x00\x00", producer_id=1, sequence_id=0)
        assert await client.is_hung_up_on()

    async def no_such_type(client):
        client.send("subscribe", topic=topic_name("bad"), subscription="s", type=9, consumer_id=1, request_id=1)
        assert await client.is_hung_up_on()

    async def acks_nothing(client):
        await client.succeed("subscribe", topic=topic_name("bad"), subscription="s", type=0, consumer_id=1)
        client.send("ack", consumer_id=1, type=0)
        assert await client.is_hung_up_on()

    for story in (other_bytes, no_connect):
        run(running, story, as_client=False)
    for story in (no_producer, no_metadata, no_such_type, acks_nothing):
        run(running, story)
