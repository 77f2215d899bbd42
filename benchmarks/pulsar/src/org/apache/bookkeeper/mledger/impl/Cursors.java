package org.apache.bookkeeper.mledger.impl;

import ackstate.Answer;
import ackstate.Command;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.bookkeeper.mledger.AsyncCallbacks.DeleteCallback;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;

/** Times the real cursor: acks in memory, acks that are each persisted, and reopening. */
public final class Cursors {
    private static final int IN_FLIGHT_MAX = 1_000;
    /** Calls after which the contents of old records are dropped: at most 50 whole states are in memory. */
    private static final int RECORDS_KEPT = 50;
    /** So low that nothing is persisted after the first ack. */
    private static final double HARDLY_EVER = 1e-6;

    private static Broker reopened;

    private Cursors() {
    }

    /**
     * Ack the positions of a file, of which the first {@code holes} are acked beforehand in one call.
     *
     * <p>{@code persist} tells whether each call is persisted, {@code list} how many positions a call has.
     */
    public static Answer ack(Command command) throws Exception {
        long[] file = command.numbers("file");
        int holes = command.integer("holes");
        boolean persist = command.flag("persist");
        try (Broker broker = new Broker(command.flag("words"), persist ? 0 : HARDLY_EVER, ledgersOf(file))) {
            ManagedCursorImpl cursor = broker.openFirst();
            if (holes > 0) {
                cursor.delete(positions(file, 0, holes));
            }
            Broker.awaitStorage(cursor);
            List<List<Position>> calls = new ArrayList<>();
            int end = holes + command.integer("acks");
            for (int i = holes; i < end; i += command.integer("list")) {
                calls.add(positions(file, i, Math.min(i + command.integer("list"), end)));
            }
            return timed(broker, cursor, calls);
        }
    }

    private static Answer timed(Broker broker, ManagedCursorImpl cursor, List<List<Position>> calls) throws Exception {
        long cursorLedger = cursor.getCursorLedger();
        int first = broker.storage.entryCount(cursorLedger);
        int dropped = first;
        InFlight inFlight = new InFlight();
        long bytes = 0;
        int count = 0;
        System.gc();
        long start = System.nanoTime();
        for (List<Position> call : calls) {
            inFlight.calls.acquire();
            cursor.asyncDelete(call, inFlight, null);
            if (++count % RECORDS_KEPT == 0) {
                int end = Math.max(dropped, broker.storage.entryCount(cursorLedger) - 1);
                bytes += broker.storage.drop(cursorLedger, dropped, end);
                dropped = end;
            }
        }
        inFlight.calls.acquire(IN_FLIGHT_MAX);
        long nanos = System.nanoTime() - start;
        if (inFlight.failure.get() != null) {
            throw inFlight.failure.get();
        }
        byte[] last = broker.storage.lastEntry(cursorLedger);
        int end = broker.storage.entryCount(cursorLedger);
        bytes += broker.storage.drop(cursorLedger, dropped, end);
        return state(cursor).number("nanos", nanos).number("bytes", bytes).number("persists", end - first)
                .binary("record", last);
    }

    /** Make a cursor with the runs of a file (ledger, first entry, end), which {@link #reopen} opens again. */
    public static Answer store(Command command) throws Exception {
        forget(command);
        long[] file = command.numbers("file");
        reopened = new Broker(command.flag("words"), 0, (int) (file[file.length - 3] - Broker.FIRST_LEDGER + 1));
        ManagedCursorImpl cursor = reopened.openFirst();
        for (int i = 0; i < file.length; i += 3) {
            cursor.individualDeletedMessages.addOpenClosed(file[i], file[i + 1] - 1, file[i], file[i + 2] - 1);
        }
        cursor.markDelete(cursor.getMarkDeletedPosition());
        Broker.awaitStorage(cursor);
        byte[] last = reopened.storage.lastEntry(cursor.getCursorLedger());
        return state(cursor).number("bytes", last.length).binary("record", last);
    }

    /** Open the stored cursor after a crash. */
    public static Answer reopen(Command command) throws Exception {
        reopened.crash();
        System.gc();
        long start = System.nanoTime();
        ManagedCursorImpl cursor = reopened.open();
        long nanos = System.nanoTime() - start;
        return state(cursor).number("nanos", nanos);
    }

    /** Free the stored cursor. */
    public static Answer forget(Command command) throws Exception {
        if (reopened != null) {
            reopened.close();
            reopened = null;
        }
        return new Answer();
    }

    private static Answer state(ManagedCursorImpl cursor) {
        Position position = cursor.getMarkDeletedPosition();
        return new Answer().number("ranges", cursor.individualDeletedMessages.size())
                .number("acked", cursor.individualDeletedMessages.cardinality(0, 0, 1L << 62, Integer.MAX_VALUE))
                .number("mark_delete_ledger", position.getLedgerId())
                .number("mark_delete_entry", position.getEntryId());
    }

    private static int ledgersOf(long[] file) {
        long last = Broker.FIRST_LEDGER;
        for (int i = 0; i < file.length; i += 2) {
            last = Math.max(last, file[i]);
        }
        return (int) (last - Broker.FIRST_LEDGER + 1);
    }

    private static List<Position> positions(long[] file, int first, int end) {
        List<Position> positions = new ArrayList<>(end - first);
        for (int i = first; i < end; i++) {
            positions.add(PositionFactory.create(file[2 * i], file[2 * i + 1]));
        }
        return positions;
    }

    private static final class InFlight implements DeleteCallback {
        final Semaphore calls = new Semaphore(IN_FLIGHT_MAX);
        final AtomicReference<ManagedLedgerException> failure = new AtomicReference<>();

        @Override
        public void deleteComplete(Object context) {
            calls.release();
        }

        @Override
        public void deleteFailed(ManagedLedgerException exception, Object context) {
            failure.set(exception);
            calls.release();
        }
    }
}
