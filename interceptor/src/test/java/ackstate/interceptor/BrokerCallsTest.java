package ackstate.interceptor;

import static org.testng.Assert.assertEquals;
import static org.testng.Assert.assertTrue;

import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.pulsar.broker.service.Consumer;
import org.apache.pulsar.broker.service.ServerCnx;
import org.apache.pulsar.broker.service.persistent.PersistentSubscription;
import org.apache.pulsar.common.api.proto.BaseCommand;
import org.apache.pulsar.common.api.proto.CommandAck;
import org.apache.pulsar.common.api.proto.CommandSubscribe;
import org.apache.pulsar.common.util.collections.ConcurrentLongHashMap;
import org.testng.annotations.AfterMethod;
import org.testng.annotations.BeforeMethod;
import org.testng.annotations.Test;
import sun.reflect.ReflectionFactory;

/** What a broker's calls put into the queue, and what the recorder remembers of them. */
public class BrokerCallsTest {
    private static final String TOPIC = "persistent://a/b/c";
    private static final Map<Class<?>, Constructor<?>> CONSTRUCTORS = new HashMap<>();
    private Path directory;
    private EventQueue queue;
    private EventWriter writer;
    private RecordingInterceptor interceptor;
    private final List<Event> events = new ArrayList<>();

    @BeforeMethod
    public void begin() throws Exception {
        directory = Files.createTempDirectory("ackstate");
        Properties found = new Properties();
        found.setProperty("ackstateRecorderDirectory", directory.toString());
        found.setProperty("ackstateRecorderFreeBytesMin", "0");
        Settings settings = Settings.of(found, new Properties());
        queue = new EventQueue(1 << 12);
        writer = new EventWriter(settings, queue, new FileHead("host", "0123456789", 1, 1, 2, Map.of()));
        interceptor = new RecordingInterceptor();
        set(interceptor, RecordingInterceptor.class, "settings", settings);
        set(interceptor, RecordingInterceptor.class, "queue", queue);
        events.clear();
    }

    @AfterMethod
    public void removeDirectory() throws Exception {
        try (var files = Files.walk(directory)) {
            files.sorted((one, other) -> other.compareTo(one)).forEach(each -> each.toFile().delete());
        }
    }

    @Test
    public void consumersThatClosedAreForgotten() throws Exception {
        ServerCnx connection = connection();
        PersistentSubscription subscription = subscription(cursor());
        long now = System.currentTimeMillis();
        for (int number = 0; number < 100_000; number++) {
            Consumer consumer = consumer(connection, subscription, number);
            interceptor.consumerCreated(connection, consumer, Map.of());
            ack(connection, consumer, number);
            if (number % 2 == 0) {
                interceptor.consumerClosed(connection, consumer, Map.of());
                connection.getConsumers().remove(number);
            } else {
                interceptor.onConnectionClosed(connection);
                connection.getConsumers().clear();
            }
            if (number % 500 == 0) {
                writer.turn(now);
                assertTrue(writer.remembered() <= 2, "remembers " + writer.remembered());
            }
        }
        writer.turn(now);
        assertEquals(queue.dropped(), 0);
        assertEquals(writer.remembered(), 1); // the cursor, for which a record may still be written
    }

    /** A broker that unloads a topic closes its consumers without a call, and a last delivery may follow a close. */
    @Test
    public void whatNoEventConcernsForAMinuteIsForgotten() throws Exception {
        ServerCnx connection = connection();
        PersistentSubscription subscription = subscription(cursor());
        for (int number = 0; number < 1_000; number++) {
            interceptor.consumerCreated(connection, consumer(connection, subscription, number), Map.of());
        }
        Consumer last = consumer(connection, subscription, 1_000);
        ack(connection, last, 0);
        long now = System.currentTimeMillis();
        writer.turn(now);
        assertEquals(writer.remembered(), 1_002);
        writer.turn(now + 120_000);
        assertEquals(writer.remembered(), 1);
        ack(connection, last, 1);
        writer.turn(now + 120_001);
        assertEquals(writer.remembered(), 2);
        writer.turn(now + 1_000_000);
        writer.turn(now + 1_000_100);
        assertEquals(writer.remembered(), 0);
    }

    @Test
    public void aConnectionWithoutConsumersWritesNothing() throws Exception {
        ServerCnx stranger = connection();
        for (int number = 0; number < 10_000; number++) {
            BaseCommand ack = new BaseCommand().setType(BaseCommand.Type.ACK);
            ack.setAck().setConsumerId(number).setAckType(CommandAck.AckType.Individual);
            BaseCommand seek = new BaseCommand().setType(BaseCommand.Type.SEEK);
            seek.setSeek().setConsumerId(number).setRequestId(1).setMessagePublishTime(1);
            BaseCommand again = new BaseCommand().setType(BaseCommand.Type.REDELIVER_UNACKNOWLEDGED_MESSAGES);
            again.setRedeliverUnacknowledgedMessages().setConsumerId(number);
            BaseCommand leave = new BaseCommand().setType(BaseCommand.Type.UNSUBSCRIBE);
            leave.setUnsubscribe().setConsumerId(number).setRequestId(1);
            for (BaseCommand each : List.of(ack, seek, again, leave)) {
                interceptor.onPulsarCommand(each, stranger);
            }
        }
        interceptor.onConnectionClosed(stranger);
        assertEquals(queue.drain(events::add, 10), 0);
        assertEquals(queue.dropped(), 0);
    }

    /** The broker calls onWebserviceRequest before it authenticates, and onWebserviceResponse afterwards. */
    @Test
    public void anAdminRequestIsRecordedOnceItHasSucceeded() {
        String path = "/admin/v2/persistent/a/b/c/subscription/s/resetcursor/5";
        interceptor.onWebserviceRequest(request("POST", path));
        interceptor.onWebserviceResponse(request("POST", path), answer(401));
        interceptor.onWebserviceResponse(request("POST", path), answer(307));
        interceptor.onWebserviceResponse(request("GET", path), answer(200));
        interceptor.onWebserviceResponse(request("POST", "/metrics/subscription/"), answer(200)); // open to all
        assertEquals(queue.drain(events::add, 10), 0);
        interceptor.onWebserviceResponse(request("POST", path), answer(204));
        assertEquals(queue.drain(events::add, 10), 1);
        assertEquals(events.get(0).detail(), "POST " + path);
        // As Pulsar 5.0 calls it.
        interceptor.onWebserviceResponse(
                answering(jakarta.servlet.http.HttpServletRequest.class,
                        Map.of("getMethod", "POST", "getRequestURI", path)),
                answering(jakarta.servlet.http.HttpServletResponse.class, Map.of("getStatus", 204)));
        assertEquals(queue.drain(events::add, 10), 1);
    }

    private void ack(ServerCnx connection, Consumer consumer, long entry) {
        CommandAck ack = new CommandAck().setConsumerId(consumer.consumerId()).setAckType(CommandAck.AckType.Individual);
        ack.addMessageId().setLedgerId(7).setEntryId(entry);
        interceptor.messageAcked(connection, consumer, ack);
    }

    // A broker's classes without a broker: only the fields that the recorder reads are set.

    private static ServerCnx connection() throws Exception {
        ServerCnx made = bare(ServerCnx.class);
        set(made, ServerCnx.class, "consumers", ConcurrentLongHashMap.newBuilder().expectedItems(16).concurrencyLevel(1)
                .build());
        return made;
    }

    private static Consumer consumer(ServerCnx connection, PersistentSubscription subscription, long id)
            throws Exception {
        Consumer made = bare(Consumer.class);
        set(made, Consumer.class, "subscription", subscription);
        set(made, Consumer.class, "consumerId", id);
        set(made, Consumer.class, "consumerName", "consumer-" + id);
        set(made, Consumer.class, "subType", CommandSubscribe.SubType.Shared);
        connection.getConsumers().put(id, CompletableFuture.completedFuture(made));
        return made;
    }

    private static PersistentSubscription subscription(ManagedCursor cursor) throws Exception {
        PersistentSubscription made = bare(PersistentSubscription.class);
        set(made, PersistentSubscription.class, "topicName", TOPIC);
        set(made, PersistentSubscription.class, "subName", "s");
        set(made, PersistentSubscription.class, "cursor", cursor);
        return made;
    }

    private static ManagedCursor cursor() {
        return answering(ManagedCursor.class, Map.of("isDurable", true, "isClosed", false,
                "getTotalNonContiguousDeletedMessagesRange", 0,
                "getMarkDeletedPosition", PositionFactory.create(7, -1),
                "getPersistentMarkDeletedPosition", PositionFactory.create(7, -1)));
    }

    private static HttpServletRequest request(String method, String path) {
        return answering(HttpServletRequest.class, Map.of("getMethod", method, "getRequestURI", path));
    }

    private static HttpServletResponse answer(int status) {
        return answering(HttpServletResponse.class, Map.of("getStatus", status));
    }

    private static <T> T answering(Class<T> kind, Map<String, Object> answers) {
        return kind.cast(Proxy.newProxyInstance(kind.getClassLoader(), new Class<?>[] {kind},
                (self, method, arguments) -> switch (method.getName()) {
                    case "hashCode" -> System.identityHashCode(self);
                    case "equals" -> self == arguments[0];
                    case "toString" -> kind.getSimpleName();
                    default -> {
                        if (!answers.containsKey(method.getName())) {
                            throw new UnsupportedOperationException(method.getName());
                        }
                        yield answers.get(method.getName());
                    }
                }));
    }

    private static <T> T bare(Class<T> kind) throws Exception {
        if (!CONSTRUCTORS.containsKey(kind)) {
            CONSTRUCTORS.put(kind, ReflectionFactory.getReflectionFactory()
                    .newConstructorForSerialization(kind, Object.class.getDeclaredConstructor()));
        }
        return kind.cast(CONSTRUCTORS.get(kind).newInstance());
    }

    private static void set(Object object, Class<?> owner, String field, Object value) throws Exception {
        Field found = owner.getDeclaredField(field);
        found.setAccessible(true);
        found.set(object, value);
    }
}
