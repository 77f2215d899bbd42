package ackstate.interceptor;

/**
 * The state of a cursor before the first ack that the recording has of it.
 *
 * @param openedMillis when it was opened, which is when its rate limiter was created
 * @param markDelete its mark-delete position, as ledger:entry
 * @param deleted the ranges above it, as Pulsar writes them; null if there are too many to look at
 */
record OpenedCursor(long openedMillis, String markDelete, String deleted) {
    static final int RANGES_MAX = 20_000;
}
