package ackstate.interceptor;

import java.util.Collections;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import javax.servlet.ServletRequest;
import javax.servlet.ServletResponse;
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.impl.ManagedCursorImpl;
import org.apache.pulsar.broker.PulsarService;
import org.apache.pulsar.broker.intercept.BrokerInterceptor;
import org.apache.pulsar.broker.service.Consumer;
import org.apache.pulsar.broker.service.Producer;
import org.apache.pulsar.broker.service.ServerCnx;
import org.apache.pulsar.broker.service.Subscription;
import org.apache.pulsar.broker.service.Topic;
import org.apache.pulsar.broker.service.persistent.PersistentSubscription;
import org.apache.pulsar.common.api.proto.BaseCommand;
import org.apache.pulsar.common.api.proto.CommandAck;
import org.apache.pulsar.common.api.proto.CommandRedeliverUnacknowledgedMessages;
import org.apache.pulsar.common.api.proto.CommandSeek;
import org.apache.pulsar.common.api.proto.MessageMetadata;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Records what a broker receives, delivers and writes: no payloads, no keys, no properties of messages.
 *
 * <p>The broker's threads only make an event and offer it to a bounded queue: no file, no lock, no waiting. Whatever
 * goes wrong here is counted, and the broker continues.
 */
public final class RecordingInterceptor implements BrokerInterceptor {
    private static final Logger LOG = LoggerFactory.getLogger(RecordingInterceptor.class);
    private static final int TOPICS_MAX = 100_000;
    private static final long[] NO_NUMBERS = {};
    /** Numbers of an ACK event before its acks. */
    static final int ACK_HEAD = 5;

    /** The state of a thread: the last ACK command that it received and has not handled yet, and its last runs. */
    private static final class OfThread {
        private EntryRun published;
        private EntryRun delivered;
        private ServerCnx connection;
        private long consumerId;
        private long millis;
        private long ledger;
        private long pushed;
    }

    private final ThreadLocal<OfThread> ofThread = ThreadLocal.withInitial(OfThread::new);
    private final Map<String, Boolean> recorded = new ConcurrentHashMap<>();
    private final Set<ManagedCursor> opened = Collections.synchronizedSet(
            Collections.newSetFromMap(new WeakHashMap<>()));
    private volatile Settings settings;
    private volatile EventQueue queue;
    private volatile EventWriter writer;

    @Override
    public void initialize(PulsarService broker) {
        try {
            Settings found = Settings.of(broker.getConfiguration().getProperties(), System.getProperties());
            EventQueue waiting = new EventQueue(found.queueEventsMax());
            writer = EventWriter.start(found, waiting, FileHead.of(broker));
            settings = found;
            queue = waiting;
            LOG.info("Recording into {}", found.directory());
        } catch (Exception error) {
            LOG.error("Nothing is recorded: {}", error.toString());
        }
    }

    @Override
    public void close() {
        EventWriter last = writer;
        queue = null;
        if (last != null) {
            last.close();
        }
    }

    @Override
    public void messageProduced(ServerCnx connection, Producer producer, long startTimeNs, long ledgerId, long entryId,
                                Topic.PublishContext context) {
        EventQueue waiting = queue;
        if (waiting == null || ledgerId < 0) {
            return;
        }
        try {
            OfThread mine = ofThread.get();
            mine.published = run(waiting, Event.Kind.PUBLISH, mine.published, producer.getTopic().getName(), ledgerId,
                    entryId, (int) context.getNumberOfMessages());
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    @Override
    public void beforeSendMessage(Subscription subscription, Entry entry, long[] ackSet, MessageMetadata metadata,
                                  Consumer consumer) {
        EventQueue waiting = queue;
        if (waiting == null || consumer == null || !(subscription instanceof PersistentSubscription)) {
            return;
        }
        try {
            int messages = metadata == null ? 1 : metadata.getNumMessagesInBatch();
            if (ackSet == null) {
                OfThread mine = ofThread.get();
                mine.delivered = run(waiting, Event.Kind.DELIVER, mine.delivered, consumer, entry.getLedgerId(),
                        entry.getEntryId(), messages);
            } else if (isRecorded(subscription.getTopicName())) {
                long[] numbers = new long[3 + ackSet.length];
                numbers[0] = entry.getLedgerId();
                numbers[1] = entry.getEntryId();
                numbers[2] = messages;
                System.arraycopy(ackSet, 0, numbers, 3, ackSet.length);
                waiting.offer(new Event(Event.Kind.DELIVER_PARTLY, System.currentTimeMillis(), consumer, numbers, null));
            }
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    /** Adds an entry to the last run of a thread, or begins another one; returns the run, or null if there is none. */
    private EntryRun run(EventQueue waiting, Event.Kind kind, EntryRun last, Object subject, long ledger, long entry,
                         int messages) {
        if (last != null && last.extend(subject, ledger, entry, messages)) {
            return last;
        }
        String topic = subject instanceof Consumer consumer ? consumer.getSubscription().getTopicName() : (String) subject;
        if ((last == null || !last.isOf(subject)) && !isRecorded(topic)) {
            return null;
        }
        EntryRun fresh = new EntryRun(subject, ledger, entry, messages);
        return waiting.offer(new Event(kind, System.currentTimeMillis(), subject, NO_NUMBERS, fresh)) ? fresh : null;
    }

    @Override
    public void onPulsarCommand(BaseCommand command, ServerCnx connection) {
        EventQueue waiting = queue;
        if (waiting == null) {
            return;
        }
        try {
            switch (command.getType()) {
                case ACK -> received(command.getAck(), connection);
                case REDELIVER_UNACKNOWLEDGED_MESSAGES -> {
                    CommandRedeliverUnacknowledgedMessages redeliver = command.getRedeliverUnacknowledgedMessages();
                    offer(waiting, Event.Kind.REDELIVER, consumer(connection, redeliver.getConsumerId()),
                            entries(redeliver), null);
                }
                case SEEK -> {
                    CommandSeek seek = command.getSeek();
                    Consumer consumer = consumer(connection, seek.getConsumerId());
                    if (consumer != null) {
                        // The consumers connect again, and the first of them shows the new state.
                        opened.remove(cursor(consumer));
                    }
                    long[] target = seek.hasMessageId()
                            ? new long[] {seek.getMessageId().getLedgerId(), seek.getMessageId().getEntryId()}
                            : new long[] {seek.getMessagePublishTime()};
                    offer(waiting, Event.Kind.SEEK, consumer, target, null);
                }
                case UNSUBSCRIBE -> offer(waiting, Event.Kind.UNSUBSCRIBE,
                        consumer(connection, command.getUnsubscribe().getConsumerId()), NO_NUMBERS, null);
                default -> {
                }
            }
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    private void received(CommandAck ack, ServerCnx connection) {
        OfThread found = ofThread.get();
        found.connection = connection;
        found.consumerId = ack.getConsumerId();
        found.millis = System.currentTimeMillis();
        Consumer consumer = consumer(connection, ack.getConsumerId());
        LedgerHandle handle = consumer == null ? null : CursorLedger.of(cursor(consumer));
        found.ledger = handle == null ? CursorLedger.NONE : handle.getId();
        found.pushed = CursorLedger.pushed(handle);
    }

    @Override
    public void messageAcked(ServerCnx connection, Consumer consumer, CommandAck ack) {
        EventQueue waiting = queue;
        if (waiting == null) {
            return;
        }
        try {
            ManagedCursor cursor = cursor(consumer);
            if (cursor == null || !isRecorded(consumer.getSubscription().getTopicName())) {
                return;
            }
            LedgerHandle handle = CursorLedger.of(cursor);
            long[] numbers = AckRuns.of(ack, ACK_HEAD);
            OfThread found = ofThread.get();
            // An ack of a transaction may be handled by another thread, or much later.
            if (found.connection == connection && found.consumerId == consumer.consumerId()) {
                numbers[0] = found.millis;
                numbers[1] = found.ledger;
                numbers[2] = found.pushed;
                found.connection = null;
            } else {
                numbers[0] = numbers[1] = numbers[2] = -1;
            }
            numbers[3] = handle == null ? CursorLedger.NONE : handle.getId();
            numbers[4] = CursorLedger.pushed(handle);
            String type = ack.hasTxnidMostBits() ? "Transaction" : ack.getAckType().name();
            waiting.offer(new Event(Event.Kind.ACK, System.currentTimeMillis(), consumer, numbers, type));
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    @Override
    public void consumerCreated(ServerCnx connection, Consumer consumer, Map<String, String> metadata) {
        EventQueue waiting = queue;
        if (waiting == null) {
            return;
        }
        try {
            ManagedCursor cursor = cursor(consumer);
            boolean isFirst = cursor != null && isRecorded(consumer.getSubscription().getTopicName())
                    && opened.add(cursor);
            offer(waiting, Event.Kind.CONSUMER, consumer, NO_NUMBERS, isFirst ? opened(cursor) : null);
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    @Override
    public void consumerClosed(ServerCnx connection, Consumer consumer, Map<String, String> metadata) {
        EventQueue waiting = queue;
        if (waiting == null) {
            return;
        }
        try {
            offer(waiting, Event.Kind.CLOSED, consumer, NO_NUMBERS, null);
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    @Override
    public void onWebserviceRequest(ServletRequest request) {
        // Anybody can cause this call: the broker has not authenticated the request yet.
    }

    @Override
    public void onWebserviceResponse(ServletRequest request, ServletResponse response) {
        if (request instanceof HttpServletRequest web && response instanceof HttpServletResponse answer) {
            answered(web.getMethod(), web.getRequestURI(), answer.getStatus());
        }
    }

    /** The same for Pulsar 5.0, whose interface has these types. */
    public void onWebserviceRequest(jakarta.servlet.ServletRequest request) {
    }

    /** The same for Pulsar 5.0, whose interface has these types. */
    public void onWebserviceResponse(jakarta.servlet.ServletRequest request, jakarta.servlet.ServletResponse response) {
        if (request instanceof jakarta.servlet.http.HttpServletRequest web
                && response instanceof jakarta.servlet.http.HttpServletResponse answer) {
            answered(web.getMethod(), web.getRequestURI(), answer.getStatus());
        }
    }

    private void answered(String method, String path, int status) {
        EventQueue waiting = queue;
        if (waiting == null || "GET".equals(method) || status >= 300) {
            return;
        }
        try {
            // Without the query, which may hold more than names.
            if (path != null && path.startsWith("/admin/")
                    && (path.contains("/subscription/") || path.endsWith("/unload"))) {
                opened.clear();
                waiting.offer(new Event(Event.Kind.ADMIN, System.currentTimeMillis(), null, NO_NUMBERS,
                        method + " " + path));
            }
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    /** The broker tells of a closed consumer only if the client closed it, not if the connection broke. */
    @Override
    public void onConnectionClosed(ServerCnx connection) {
        EventQueue waiting = queue;
        if (waiting == null) {
            return;
        }
        try {
            connection.getConsumers().keys().forEach(
                    id -> offer(waiting, Event.Kind.CLOSED, consumer(connection, id), NO_NUMBERS, null));
        } catch (Throwable error) {
            waiting.drop();
        }
    }

    private void offer(EventQueue waiting, Event.Kind kind, Consumer consumer, long[] numbers, Object detail) {
        if (consumer != null && cursor(consumer) != null && isRecorded(consumer.getSubscription().getTopicName())) {
            waiting.offer(new Event(kind, System.currentTimeMillis(), consumer, numbers, detail));
        }
    }

    private boolean isRecorded(String topic) {
        Boolean known = recorded.get(topic);
        if (known == null) {
            if (recorded.size() > TOPICS_MAX) {
                recorded.clear();
            }
            known = settings.topics().test(TopicName.glob(topic));
            recorded.put(topic, known);
        }
        return known;
    }

    private static long[] entries(CommandRedeliverUnacknowledgedMessages redeliver) {
        long[] found = new long[2 * redeliver.getMessageIdsCount()];
        for (int index = 0; index < redeliver.getMessageIdsCount(); index++) {
            found[2 * index] = redeliver.getMessageIdAt(index).getLedgerId();
            found[2 * index + 1] = redeliver.getMessageIdAt(index).getEntryId();
        }
        return found;
    }

    private static Consumer consumer(ServerCnx connection, long consumerId) {
        CompletableFuture<Consumer> found = connection.getConsumers().get(consumerId);
        return found == null || !found.isDone() || found.isCompletedExceptionally() ? null : found.getNow(null);
    }

    /** Returns the cursor of a durable subscription of a persistent topic, else null. */
    private static ManagedCursor cursor(Consumer consumer) {
        if (consumer.getSubscription() instanceof PersistentSubscription subscription) {
            ManagedCursor cursor = subscription.getCursor();
            return cursor != null && cursor.isDurable() ? cursor : null;
        }
        return null;
    }

    private static OpenedCursor opened(ManagedCursor cursor) {
        boolean isSmall = cursor.getTotalNonContiguousDeletedMessagesRange() <= OpenedCursor.RANGES_MAX;
        long openedMillis = cursor instanceof ManagedCursorImpl impl ? impl.getLastLedgerSwitchTimestamp() : -1;
        return new OpenedCursor(openedMillis, cursor.getMarkDeletedPosition().toString(),
                isSmall && cursor instanceof ManagedCursorImpl impl ? impl.getIndividuallyDeletedMessages() : null);
    }
}
