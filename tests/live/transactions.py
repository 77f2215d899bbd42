"""Acks messages in transactions with Pulsar's Java client: that of Python has none."""

import threading

import jpype.config

from live.java_process import JARS

_TIMED_OUT_S = 5  # an open transaction is aborted then
_ANSWERS_WITHIN_S = 60


class Transactions:
    """A client of one life of a broker.

    Args:
        cluster: A started cluster whose broker has transactions.
        names: Topics and subscriptions.
    """

    def __init__(self, cluster, names):
        if not jpype.isJVMStarted():
            jpype.config.destroy_jvm = False  # that would wait for clients of dead brokers
            jpype.startJVM(
                "-Xrs", "-Xmx256m", "-Dorg.apache.logging.log4j.level=OFF", classpath=[f"{JARS}/*"], convertStrings=True
            )
        builder = jpype.JClass("org.apache.pulsar.client.api.PulsarClient").builder()
        self._client = builder.serviceUrl(cluster.service_url).enableTransaction(True).build()
        # It asks for no message, and acks those that other consumers hold.
        self._consumers = {
            (topic, name): self._client.newConsumer().topic(topic).subscriptionName(name)
            .subscriptionType(jpype.JClass("org.apache.pulsar.client.api.SubscriptionType").Shared)
            .receiverQueueSize(0).subscribe()
            for topic, name in names
        }  # fmt: skip

    def ack(self, name, places, how):
        """Ack in one transaction, and then `commit` it, `abort` it or, for an empty text, leave it open.

        Returns:
            Whether the broker has confirmed all of it. It refuses messages that another open transaction has acked.
        """
        seconds = jpype.JClass("java.util.concurrent.TimeUnit").SECONDS
        place_of = jpype.JClass("org.apache.pulsar.client.impl.MessageIdImpl")
        new = self._client.newTransaction().withTransactionTimeout(_TIMED_OUT_S, seconds).build()
        try:
            transaction = new.get(_ANSWERS_WITHIN_S, seconds)
            acks = [self._consumers[name].acknowledgeAsync(place_of(*place, -1), transaction) for place in places]
            for each in acks:
                each.get(_ANSWERS_WITHIN_S, seconds)
            if how:
                getattr(transaction, how)().get(_ANSWERS_WITHIN_S, seconds)
        except jpype.JException:
            return False
        return True

    def leave(self):
        """Close the client of a dead broker, without waiting."""
        threading.Thread(target=self._client.close, daemon=True).start()
