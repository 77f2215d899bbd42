package ackstate.interceptor;

import java.util.concurrent.atomic.AtomicLongFieldUpdater;

/**
 * Consecutive entries of one ledger, published to a topic or sent to a consumer.
 *
 * <p>A thread of the broker offers a run with its first entry, and extends it until the writer takes it from the queue.
 * So most entries cost neither an object nor a place in the queue.
 */
final class EntryRun {
    private static final long TAKEN = -1;
    private static final AtomicLongFieldUpdater<EntryRun> LAST =
            AtomicLongFieldUpdater.newUpdater(EntryRun.class, "last");

    private final Object subject;
    private final long ledger;
    private final long first;
    private final int messages;
    private volatile long last;

    /** A run of one entry; `messages` are those of each entry, and `subject` is a consumer or the name of a topic. */
    EntryRun(Object subject, long ledger, long entry, int messages) {
        this.subject = subject;
        this.ledger = ledger;
        this.first = this.last = entry;
        this.messages = messages;
    }

    /** Adds an entry, and returns whether it belongs to this run and the writer has not taken it. */
    boolean extend(Object to, long ledgerId, long entry, int count) {
        long before = last;
        return to == subject && ledgerId == ledger && count == messages && before != TAKEN && entry == before + 1
                && LAST.compareAndSet(this, before, entry);
    }

    /** Ends the run, and returns its last entry. Only the writer calls this, once. */
    long take() {
        return LAST.getAndSet(this, TAKEN);
    }

    boolean isOf(Object other) {
        return other == subject;
    }

    long ledger() {
        return ledger;
    }

    long first() {
        return first;
    }

    int messages() {
        return messages;
    }
}
