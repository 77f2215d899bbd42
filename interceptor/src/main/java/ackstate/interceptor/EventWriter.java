package ackstate.interceptor;

import java.util.IdentityHashMap;
import java.util.Iterator;
import java.util.Map;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.Position;
import org.apache.pulsar.broker.service.Consumer;
import org.apache.pulsar.broker.service.persistent.PersistentSubscription;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The one thread that turns events into lines of JSON, looks at cursors, and writes files. */
final class EventWriter implements Runnable {
    private static final Logger LOG = LoggerFactory.getLogger(EventWriter.class);
    private static final int EVENTS_AT_ONCE = 4_096;
    private static final int TEXT_MAX = 1 << 20;
    /** Most time between two looks at the queue; waking up costs the thread more than most events. */
    private static final long PAUSE_MILLIS_MAX = 100;
    private static final long CLOSES_WITHIN_MILLIS = 5_000;
    private static final long NOT_LOOKED_AT = -2; // in this file
    /** A cursor without acks for so long has long been flushed. */
    private static final long LOOKS_FOR_MILLIS = 600_000;

    private final Settings settings;
    private final EventQueue queue;
    private final FileHead head;
    private final RecordingFiles files;
    private final Lines lines = new Lines();
    private final Map<ManagedCursor, Look> looks = new IdentityHashMap<>();
    private volatile boolean isClosing;
    private long flushedMillis;
    private long unflushed; // events whose lines are not in a file
    private long lost; // events whose lines could not be written
    private long reportedLoss;
    private Thread thread;

    /** The last look at a cursor's ledger. */
    private static final class Look {
        private final String topic;
        private final String subscription;
        private int number; // in the file
        private long ackedMillis;
        private long ledger = NOT_LOOKED_AT;
        private long begun;
        private long written;
        private String markDelete;

        Look(PersistentSubscription subscription) {
            this.topic = subscription.getTopicName();
            this.subscription = subscription.getName();
        }
    }

    EventWriter(Settings settings, EventQueue queue, FileHead head) {
        this.settings = settings;
        this.queue = queue;
        this.head = head;
        this.files = new RecordingFiles(settings, head);
    }

    static EventWriter start(Settings settings, EventQueue queue, FileHead head) {
        EventWriter writer = new EventWriter(settings, queue, head);
        writer.thread = new Thread(writer, "ackstate-recorder");
        writer.thread.setDaemon(true);
        writer.thread.start();
        return writer;
    }

    /** Ends the recording in order; returns after at most some seconds. */
    void close() {
        isClosing = true;
        try {
            thread.join(CLOSES_WITHIN_MILLIS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    /** Waits until the thread has ended. */
    void join() throws InterruptedException {
        thread.join();
    }

    @Override
    public void run() {
        try {
            files.findOlder();
        } catch (Exception error) {
            LOG.warn("{} cannot be listed: {}", settings.directory(), error.toString());
        }
        while (true) {
            boolean isLast = isClosing;
            try {
                int count = turn(System.currentTimeMillis());
                if (count == 0 && isLast) {
                    end();
                    return;
                }
                if (count < EVENTS_AT_ONCE) {
                    // Also while events come: meanwhile the broker extends its runs.
                    Thread.sleep(Math.min(settings.flushMillis(), PAUSE_MILLIS_MAX));
                }
            } catch (Throwable error) {
                // The queue must be drained whatever happens, and the thread must not end.
                LOG.warn("Events are lost: {}", error.toString());
                giveUpLines();
            }
        }
    }

    /** Takes waiting events, and writes lines if it is time to; returns how many events there were. */
    int turn(long now) {
        int count = queue.drain(this::take, EVENTS_AT_ONCE);
        if (now - flushedMillis >= settings.flushMillis() || lines.size() > TEXT_MAX) {
            flush(now);
        }
        return count;
    }

    /** Returns how many consumers, topics and cursors are remembered. */
    int remembered() {
        return lines.remembered() + looks.size();
    }

    private void end() {
        long now = System.currentTimeMillis();
        flush(now);
        if (files.isOpen()) {
            lines.mark("end", now);
            files.write(lines.take(), now);
            files.close(now);
        }
    }

    private void take(Event event) {
        unflushed++;
        try {
            if (isOpen(event.millis())) {
                if (event.kind() == Event.Kind.ACK) {
                    lookAt((Consumer) event.subject(), event.millis());
                }
                lines.add(event);
            } else {
                if (event.detail() instanceof EntryRun run) {
                    run.take(); // or the broker would extend it in vain
                }
                lost++;
                unflushed--;
            }
        } catch (RuntimeException error) {
            lost++;
            unflushed--;
        }
    }

    private boolean isOpen(long now) {
        if (files.isOpen()) {
            return true;
        }
        if (!files.open(now)) {
            return false;
        }
        lines.begin(head, now);
        looks.values().forEach(look -> look.ledger = NOT_LOOKED_AT);
        return true;
    }

    private void lookAt(Consumer consumer, long now) {
        PersistentSubscription subscription = (PersistentSubscription) consumer.getSubscription();
        looks.computeIfAbsent(subscription.getCursor(), absent -> new Look(subscription)).ackedMillis = now;
    }

    private void flush(long now) {
        flushedMillis = now;
        if (!isOpen(now)) {
            return;
        }
        lines.addPending(now);
        look(now);
        long loss = queue.dropped() + lost;
        if (loss > reportedLoss) {
            lines.dropped(loss - reportedLoss, now);
        }
        lines.mark("alive", now);
        if (!files.write(lines.take(), now)) {
            giveUpLines();
            return;
        }
        reportedLoss = loss;
        unflushed = 0;
        if (files.isComplete(now)) {
            lines.mark("next", now);
            files.write(lines.take(), now);
            files.close(now);
        }
    }

    private void giveUpLines() {
        lines.clear();
        lost += unflushed;
        unflushed = 0;
    }

    /** Adds a line for each cursor whose ledger has changed. */
    private void look(long now) {
        for (Iterator<Map.Entry<ManagedCursor, Look>> each = looks.entrySet().iterator(); each.hasNext();) {
            Map.Entry<ManagedCursor, Look> entry = each.next();
            Look look = entry.getValue();
            ManagedCursor cursor = entry.getKey();
            LedgerHandle handle = CursorLedger.of(cursor);
            long written = CursorLedger.confirmed(handle);
            long begun = CursorLedger.pushed(handle);
            Position position = cursor.getPersistentMarkDeletedPosition();
            String markDelete = position == null ? "" : position.toString();
            boolean isSame = handle == null || look.ledger == handle.getId() && look.begun == begun
                    && look.written == written && markDelete.equals(look.markDelete);
            if (!isSame) {
                if (look.ledger == NOT_LOOKED_AT) {
                    look.number = lines.introduce(look.topic, "subscription", look.subscription);
                }
                look.ledger = handle.getId();
                look.begun = begun;
                look.written = written;
                look.markDelete = markDelete;
                lines.looked(look.number, now, new long[] {look.ledger, begun, written}, markDelete);
            } else if (cursor.isClosed() || now - look.ackedMillis > LOOKS_FOR_MILLIS) {
                each.remove();
            }
        }
    }
}
