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
        private final Consumer consumer;
        private long ackedMillis;
        private long ledger = -2; // not looked at
        private long begun;
        private long written;
        private String markDelete;

        Look(Consumer consumer) {
            this.consumer = consumer;
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
                int count = queue.drain(this::take, EVENTS_AT_ONCE);
                long now = System.currentTimeMillis();
                if (now - flushedMillis >= settings.flushMillis() || lines.size() > TEXT_MAX) {
                    flush(now);
                }
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
        looks.values().forEach(look -> look.ledger = -2);
        return true;
    }

    private void lookAt(Consumer consumer, long now) {
        ManagedCursor cursor = ((PersistentSubscription) consumer.getSubscription()).getCursor();
        looks.computeIfAbsent(cursor, absent -> new Look(consumer)).ackedMillis = now;
    }

    private void flush(long now) {
        flushedMillis = now;
        if (!isOpen(now)) {
            return;
        }
        lines.addPending();
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
            if (handle == null) {
                continue;
            }
            long written = CursorLedger.confirmed(handle);
            long begun = CursorLedger.pushed(handle);
            Position position = cursor.getPersistentMarkDeletedPosition();
            String markDelete = position == null ? "" : position.toString();
            boolean isSame = look.ledger == handle.getId() && look.begun == begun && look.written == written;
            if (!isSame || !markDelete.equals(look.markDelete)) {
                look.ledger = handle.getId();
                look.begun = begun;
                look.written = written;
                look.markDelete = markDelete;
                lines.looked(look.consumer, now, new long[] {look.ledger, begun, written}, markDelete);
            } else if (now - look.ackedMillis > LOOKS_FOR_MILLIS) {
                each.remove();
            }
        }
    }
}
