package ackstate.interceptor;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.impl.ManagedCursorImpl;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Reads the ledger that a cursor writes its state to, without a lock.
 *
 * <p>The broker has no public method for the last record that was begun, so fields are read. A release that lacks one
 * of them yields {@link #NONE}, and the recording then has no records.
 */
final class CursorLedger {
    static final long NONE = -1;
    private static final Logger LOG = LoggerFactory.getLogger(CursorLedger.class);
    private static final VarHandle LEDGER = find(ManagedCursorImpl.class, "cursorLedger", LedgerHandle.class);
    private static final VarHandle PUSHED = find(LedgerHandle.class, "lastAddPushed", long.class);
    private static final VarHandle CONFIRMED = find(LedgerHandle.class, "lastAddConfirmed", long.class);

    private CursorLedger() {
    }

    /** Returns the handle of a cursor's ledger; null if it has none, or is not of the usual kind. */
    static LedgerHandle of(ManagedCursor cursor) {
        return LEDGER != null && cursor instanceof ManagedCursorImpl ? (LedgerHandle) LEDGER.get(cursor) : null;
    }

    /** Returns the last record that was begun. */
    static long pushed(LedgerHandle handle) {
        return handle == null || PUSHED == null ? NONE : (long) PUSHED.getOpaque(handle);
    }

    /** Returns the last record that certainly was written. */
    static long confirmed(LedgerHandle handle) {
        return handle == null || CONFIRMED == null ? NONE : (long) CONFIRMED.getOpaque(handle);
    }

    /** Returns access to a field; null if this release of the broker lacks it. */
    static VarHandle find(Class<?> owner, String field, Class<?> type) {
        try {
            return MethodHandles.privateLookupIn(owner, MethodHandles.lookup()).findVarHandle(owner, field, type);
        } catch (ReflectiveOperationException | RuntimeException error) {
            LOG.warn("This broker's cursors cannot be looked into, so records are not recorded: {}", error.toString());
            return null;
        }
    }
}
