package org.apache.bookkeeper.client;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.api.OpenBuilder;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.impl.LedgerEntryImpl;
import org.apache.bookkeeper.client.impl.OpenBuilderBase;
import org.apache.bookkeeper.common.util.OrderedExecutor;

/** The BookKeeper in memory of Pulsar's tests without its delays, so that only the cursor's own work is timed. */
public final class InstantBookKeeper extends PulsarMockBookKeeper {
    private volatile long addDelayMillis;

    public InstantBookKeeper(OrderedExecutor executor) throws Exception {
        super(executor);
    }

    /** Delay each add; with none, a cursor may switch to a second ledger while it opens its first. */
    public void delayAdds(long millis) {
        addDelayMillis = millis;
    }

    @Override
    public long getReadEntriesDelayMillis() {
        return 0;
    }

    @Override
    public long getNextAddEntryDelayMillis() {
        return addDelayMillis;
    }

    @Override
    public long getNextAddEntryResponseDelayMillis() {
        return 0;
    }

    /** Open the handle itself: 5.0.1 needs that class, which the one of the tests of 5.0.0-M1 has not. */
    @Override
    public OpenBuilder newOpenLedgerOp() {
        return new OpenBuilderBase() {
            @Override
            public CompletableFuture<ReadHandle> execute() {
                return CompletableFuture.completedFuture(ledgers.get(ledgerId));
            }
        };
    }

    /** Create and close a ledger of one entry with an id of the caller's choice. */
    public void createLedgerOfOneEntry(long ledgerId, byte[] password) throws Exception {
        sequence.set(ledgerId);
        LedgerHandle handle = createLedger(DigestType.CRC32C, password);
        handle.addEntry(new byte[1]);
        handle.close();
    }

    /** Return the handle that writes a ledger. */
    public LedgerHandle handle(long ledgerId) {
        return ledgers.get(ledgerId);
    }

    /** Return the number of entries. */
    public int entryCount(long ledgerId) {
        return ledgers.get(ledgerId).entries.size();
    }

    /** Drop the contents of the entries from {@code first} to {@code end}, excluded, and return their bytes. */
    public long drop(long ledgerId, int first, int end) {
        List<LedgerEntryImpl> entries = ledgers.get(ledgerId).entries;
        long bytes = 0;
        for (int i = first; i < end; i++) {
            bytes += entries.get(i).getLength();
            entries.set(i, null);
        }
        return bytes;
    }

    /** Return the last entry. */
    public byte[] lastEntry(long ledgerId) {
        List<LedgerEntryImpl> entries = ledgers.get(ledgerId).entries;
        LedgerEntryImpl last = entries.get(entries.size() - 1);
        byte[] content = new byte[last.getEntryBuffer().readableBytes()];
        last.getEntryBuffer().getBytes(last.getEntryBuffer().readerIndex(), content);
        return content;
    }
}
