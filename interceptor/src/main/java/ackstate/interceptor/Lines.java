package ackstate.interceptor;

import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.broker.service.Consumer;

/**
 * The lines of a file; broker_recording.py describes them. Only the writer's thread uses it.
 *
 * <p>Consumers, cursors and topics have numbers within a file. Published and delivered entries are gathered: those
 * between two flushes become one line for each consumer or topic, and consecutive entries one run. A consumer that was
 * closed is forgotten. Not every close is seen, so what no event concerns for a while is forgotten, too; the next event
 * introduces it again.
 */
final class Lines {
    static final int VERSION = 1;
    private static final int PENDING_MAX = 1 << 16;
    private static final long REMEMBERED_MILLIS = 60_000;

    private final StringBuilder text = new StringBuilder(1 << 16);
    private final Map<Object, Subject> subjects = new IdentityHashMap<>();
    private final Map<String, Subject> topics = new HashMap<>();
    private int introduced;

    /** A consumer or a topic, with its entries that wait for a line. */
    private static final class Subject {
        private final int number;
        private final String kind;
        private final StringBuilder entries = new StringBuilder();
        private long usedMillis;
        private long sinceMillis;
        private long untilMillis;
        private int messages;
        private long ledger = -1;
        private long first;
        private long last;

        Subject(int number, String kind) {
            this.number = number;
            this.kind = kind;
        }
    }

    /** Begins a file. */
    void begin(FileHead head, long now) {
        clear();
        subjects.clear();
        topics.clear();
        introduced = 0;
        text.append("{\"kind\":\"start\",\"format\":\"ackstate broker recording\",\"version\":").append(VERSION)
                .append(",\"ts_ms\":").append(now).append(",\"broker\":");
        quote(head.broker());
        text.append(",\"life\":");
        quote(head.life());
        text.append(",\"timer_first_ms\":").append(head.timerFirstMillis()).append(",\"timer_last_ms\":")
                .append(head.timerLastMillis()).append(",\"config\":{");
        String separator = "";
        for (Map.Entry<String, String> each : head.config().entrySet()) {
            text.append(separator);
            quote(each.getKey());
            text.append(':');
            quote(each.getValue());
            separator = ",";
        }
        text.append("}}\n");
    }

    int size() {
        return text.length();
    }

    /** Returns how many consumers and topics are remembered. */
    int remembered() {
        return subjects.size() + topics.size();
    }

    /** Forgets the lines that were not taken. */
    void clear() {
        text.setLength(0);
    }

    /** Returns the lines, and forgets them. */
    byte[] take() {
        byte[] found = text.toString().getBytes(StandardCharsets.UTF_8);
        text.setLength(0);
        return found;
    }

    /** Adds a line without a subject. */
    void mark(String kind, long now) {
        text.append("{\"kind\":\"").append(kind).append("\",\"ts_ms\":").append(now).append("}\n");
    }

    /** Adds the number of events that are missing. */
    void dropped(long events, long now) {
        text.append("{\"kind\":\"dropped\",\"ts_ms\":").append(now).append(",\"events\":").append(events)
                .append("}\n");
    }

    /** Adds a look at a cursor: its ledger, the last record begun, the last one written, and the position in it. */
    void looked(int cursor, long now, long[] numbers, String markDelete) {
        begin("look", cursor, now);
        text.append(",\"ledger_id\":").append(numbers[0]).append(",\"begun\":").append(numbers[1])
                .append(",\"written\":").append(numbers[2]).append(",\"mark_delete\":");
        text.append(markDelete.isEmpty() ? "null" : "\"" + markDelete + "\"").append("}\n");
    }

    /** Adds an event. */
    void add(Event event) {
        switch (event.kind()) {
            case PUBLISH -> gather(subject(event), event.millis(), (EntryRun) event.detail());
            case DELIVER -> gather(subject(event), event.millis(), (EntryRun) event.detail());
            case DELIVER_PARTLY -> gather(subject(event), event.millis(), event.numbers());
            case ADMIN -> {
                text.append("{\"kind\":\"admin\",\"ts_ms\":").append(event.millis()).append(",\"request\":");
                quote((String) event.detail());
                text.append("}\n");
            }
            default -> {
                Subject subject = subject(event);
                addPending(subject);
                begin(name(event.kind()), subject.number, event.millis());
                finish(event);
                if (event.kind() == Event.Kind.CLOSED) {
                    subjects.remove(event.subject());
                }
            }
        }
    }

    private void finish(Event event) {
        long[] numbers = event.numbers();
        switch (event.kind()) {
            case ACK -> {
                text.append(",\"received_ms\":").append(numbers[0]).append(",\"type\":\"").append(event.detail())
                        .append("\",\"before\":[").append(numbers[1]).append(',').append(numbers[2])
                        .append("],\"after\":[").append(numbers[3]).append(',').append(numbers[4])
                        .append("],\"entries\":[");
                acks(numbers);
                text.append(']');
            }
            case REDELIVER -> {
                text.append(",\"entries\":[");
                for (int index = 0; index < numbers.length; index += 2) {
                    text.append(index == 0 ? "[" : ",[").append(numbers[index]).append(',')
                            .append(numbers[index + 1]).append(']');
                }
                text.append(']');
            }
            case SEEK -> {
                if (numbers.length == 2) {
                    text.append(",\"to\":[").append(numbers[0]).append(',').append(numbers[1]).append(']');
                } else {
                    text.append(",\"to_ms\":").append(numbers[0]);
                }
            }
            case CONSUMER -> {
                if (event.detail() instanceof OpenedCursor opened) {
                    text.append(",\"opened_ms\":").append(opened.openedMillis()).append(",\"mark_delete\":");
                    quote(opened.markDelete());
                    text.append(",\"deleted\":");
                    if (opened.deleted() == null) {
                        text.append("null");
                    } else {
                        quote(opened.deleted());
                    }
                }
            }
            default -> {
            }
        }
        text.append("}\n");
    }

    private void acks(long[] numbers) {
        for (int at = RecordingInterceptor.ACK_HEAD; at < numbers.length;) {
            text.append(at == RecordingInterceptor.ACK_HEAD ? "[" : ",[").append(numbers[at]).append(',')
                    .append(numbers[at + 1]).append(',').append(numbers[at + 2]);
            int words = (int) numbers[at + 3];
            words(numbers, at + 4, words, text);
            text.append(']');
            at += 4 + words;
        }
    }

    private static void words(long[] numbers, int begin, int count, StringBuilder into) {
        for (int word = 0; word < count; word++) {
            into.append(word == 0 ? ",[" : ",").append(numbers[begin + word]);
        }
        into.append(count > 0 ? "]" : "");
    }

    /** Adds the lines of all entries that wait, and forgets whom no event has concerned for a while. */
    void addPending(long now) {
        for (Map<?, Subject> each : List.of(subjects, topics)) {
            each.values().forEach(this::addPending);
            each.values().removeIf(subject -> now - subject.usedMillis > REMEMBERED_MILLIS);
        }
    }

    private void gather(Subject subject, long millis, EntryRun run) {
        long last = run.take();
        await(subject, millis, run.messages());
        if (subject.ledger == run.ledger() && subject.last + 1 == run.first()) {
            subject.last = last;
            return;
        }
        endRun(subject);
        subject.ledger = run.ledger();
        subject.first = run.first();
        subject.last = last;
    }

    private void gather(Subject subject, long millis, long[] numbers) {
        await(subject, millis, (int) numbers[2]);
        endRun(subject);
        subject.entries.append('[').append(numbers[0]).append(',').append(numbers[1]).append(',').append(numbers[1]);
        words(numbers, 3, numbers.length - 3, subject.entries);
        subject.entries.append("],");
    }

    /** Prepares a subject for entries with a number of messages each. */
    private void await(Subject subject, long millis, int messages) {
        boolean isEmpty = subject.ledger < 0 && subject.entries.length() == 0;
        if (!isEmpty && (messages != subject.messages || subject.entries.length() > PENDING_MAX)) {
            addPending(subject);
            isEmpty = true;
        }
        if (isEmpty) {
            subject.sinceMillis = millis;
            subject.messages = messages;
        }
        subject.untilMillis = millis;
    }

    private static void endRun(Subject subject) {
        if (subject.ledger >= 0) {
            subject.entries.append('[').append(subject.ledger).append(',').append(subject.first).append(',')
                    .append(subject.last).append("],");
            subject.ledger = -1;
        }
    }

    private void addPending(Subject subject) {
        endRun(subject);
        int length = subject.entries.length();
        if (length > 0) {
            begin(subject.kind, subject.number, subject.sinceMillis);
            text.append(",\"until_ms\":").append(subject.untilMillis).append(",\"messages\":")
                    .append(subject.messages).append(",\"entries\":[").append(subject.entries, 0, length - 1)
                    .append("]}\n");
            subject.entries.setLength(0);
        }
    }

    private void begin(String kind, int subject, long millis) {
        text.append("{\"kind\":\"").append(kind).append("\",\"subject\":").append(subject)
                .append(",\"ts_ms\":").append(millis);
    }

    private static String name(Event.Kind kind) {
        return switch (kind) {
            case ACK -> "ack";
            case REDELIVER -> "redeliver";
            case SEEK -> "seek";
            case UNSUBSCRIBE -> "unsubscribe";
            case CONSUMER -> "consumer";
            case CLOSED -> "closed";
            default -> throw new IllegalArgumentException(kind.toString());
        };
    }

    private Subject subject(Event event) {
        Subject found = event.subject() instanceof Consumer consumer
                ? subjects.computeIfAbsent(consumer, absent -> new Subject(introduce(consumer), "deliver"))
                : topics.computeIfAbsent((String) event.subject(), name -> new Subject(introduce(name), "publish"));
        found.usedMillis = Math.max(found.usedMillis, event.millis());
        return found;
    }

    private int introduce(Consumer consumer) {
        return introduce(consumer.getSubscription().getTopicName(), "subscription", consumer.getSubscription().getName(),
                "consumer", consumer.consumerName(), "type", String.valueOf(consumer.subType()));
    }

    /** Adds the names of a subject, and returns its number. */
    int introduce(String topic, String... more) {
        text.append("{\"kind\":\"subject\",\"subject\":").append(introduced).append(",\"topic\":");
        quote(topic);
        for (int index = 0; index < more.length; index += 2) {
            text.append(",\"").append(more[index]).append("\":");
            quote(more[index + 1]);
        }
        text.append("}\n");
        return introduced++;
    }

    private void quote(String value) {
        text.append('"');
        for (int index = 0; index < value.length(); index++) {
            char each = value.charAt(index);
            if (each == '"' || each == '\\') {
                text.append('\\').append(each);
            } else if (each < ' ' || Character.isSurrogate(each)) {
                text.append(String.format("\\u%04x", (int) each));
            } else {
                text.append(each);
            }
        }
        text.append('"');
    }
}
