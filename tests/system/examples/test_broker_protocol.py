"""The answers of the example broker to commands that the Python client does not send, and to other bytes."""

import asyncio
from contextlib import asynccontextmanager

import google_crc32c
import pytest

from example_broker import BrokerProcess
from examples.broker.framing import encode_frame, read_frame
from examples.broker.pulsar_api_pb2 import BaseCommand, MessageMetadata, ServerError

pytestmark = pytest.mark.slow

REQUEST_ID = 77


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    broker = BrokerProcess(tmp_path_factory.mktemp("broker") / "store")
    yield broker
    broker.stop()


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


def topic(name):
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

        here, nowhere = {"ledger_id": 1, "entry_id": 0}, {"ledger_id": 9, "entry_id": 9}
        assert await ack(type=0, message_id=[here]) == "ConsumerNotFound"
        await client.succeed("producer", topic=topic("acks"), producer_id=1)
        assert (await client.ask("send", entry_of(), producer_id=1, sequence_id=0))[0] == "send_receipt"
        await client.succeed(
            "subscribe", topic=topic("acks"), subscription="s", type=1, consumer_id=1, initial_position=1
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
        await client.succeed("producer", topic=topic("sends"), producer_id=5)
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
            await client.succeed("producer", topic=topic(f"order-{number}"), producer_id=number)
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
                "subscribe", topic=topic("failover"), subscription="s", type=2, consumer_id=consumer_id,
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
        await client.succeed("producer", topic=topic("bad"), producer_id=1)
        client.send("send", b"\x00\x00", producer_id=1, sequence_id=0)
        assert await client.is_hung_up_on()

    async def no_such_type(client):
        client.send("subscribe", topic=topic("bad"), subscription="s", type=9, consumer_id=1, request_id=1)
        assert await client.is_hung_up_on()

    async def acks_nothing(client):
        await client.succeed("subscribe", topic=topic("bad"), subscription="s", type=0, consumer_id=1)
        client.send("ack", consumer_id=1, type=0)
        assert await client.is_hung_up_on()

    for story in (other_bytes, no_connect):
        run(running, story, as_client=False)
    for story in (no_producer, no_metadata, no_such_type, acks_nothing):
        run(running, story)
