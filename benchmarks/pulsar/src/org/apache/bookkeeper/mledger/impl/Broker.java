package org.apache.bookkeeper.mledger.impl;

import java.util.Optional;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.client.InstantBookKeeper;
import org.apache.bookkeeper.common.util.OrderedExecutor;
import org.apache.bookkeeper.mledger.ManagedLedgerConfig;
import org.apache.bookkeeper.mledger.ManagedLedgerFactoryConfig;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.proto.ManagedLedgerInfo;
import org.apache.pulsar.common.api.proto.CommandSubscribe.InitialPosition;
import org.apache.pulsar.metadata.api.MetadataStoreConfig;
import org.apache.pulsar.metadata.api.extended.MetadataStoreExtended;

/** A managed ledger with one real cursor, over storage in memory that takes no time. */
final class Broker implements AutoCloseable {
    /** Entries of a ledger of messages, Pulsar's default. */
    static final int LEDGER_SIZE = 50_000;
    static final long FIRST_LEDGER = 3;
    private static final String NAME = "public/default/persistent/t";

    final InstantBookKeeper storage;
    private final OrderedExecutor executor;
    private final MetadataStoreExtended metadata;
    private final ManagedLedgerFactoryImpl factory;
    private final ManagedLedgerConfig config = new ManagedLedgerConfig();

    Broker(boolean words, double persistsPerSecond, int ledgers) throws Exception {
        executor = OrderedExecutor.newBuilder().numThreads(1).name("storage").build();
        storage = new InstantBookKeeper(executor);
        metadata = MetadataStoreExtended.create("memory:local", MetadataStoreConfig.builder().build());
        ManagedLedgerFactoryConfig factoryConfig = new ManagedLedgerFactoryConfig();
        factoryConfig.setCursorPositionFlushSeconds(3600);
        factoryConfig.setStatsPeriodSeconds(3600);
        factoryConfig.setNumManagedLedgerSchedulerThreads(1);
        factoryConfig.setMaxCacheSize(0);
        factory = new ManagedLedgerFactoryImpl(metadata, storage, factoryConfig);
        // No limit drops acks: both sides store all of them.
        config.setMaxUnackedRangesToPersist(Integer.MAX_VALUE);
        config.setMaxUnackedRangesToPersistInMetadataStore(Integer.MAX_VALUE);
        config.setPersistIndividualAckAsLongArray(words);
        config.setThrottleMarkDelete(persistsPerSecond);
        config.setMaxEntriesPerLedger(Integer.MAX_VALUE);
        config.setMetadataMaxEntriesPerLedger(Integer.MAX_VALUE);
        config.setRetentionTime(-1, TimeUnit.SECONDS);
        config.setRetentionSizeInMB(-1);
        declareLedgers(ledgers);
    }

    /** Only the last ledger exists in storage: the others are never read. */
    private void declareLedgers(int ledgers) throws Exception {
        ManagedLedgerInfo info = new ManagedLedgerInfo();
        for (int i = 0; i <= ledgers; i++) {
            long entries = i < ledgers ? LEDGER_SIZE : 1;
            info.addLedgerInfo().setLedgerId(FIRST_LEDGER + i).setEntries(entries).setSize(entries)
                    .setTimestamp(1_700_000_000_000L);
        }
        storage.createLedgerOfOneEntry(FIRST_LEDGER + ledgers, config.getPassword());
        metadata.put("/managed-ledgers/" + NAME, info.toByteArray(), Optional.of(-1L)).get();
    }

    /** Open the cursor, with a ledger of its own that has one entry. */
    ManagedCursorImpl openFirst() throws Exception {
        storage.delayAdds(1);
        ManagedCursorImpl cursor = open();
        cursor.markDelete(PositionFactory.create(FIRST_LEDGER, -1));
        awaitStorage(cursor);
        storage.delayAdds(0);
        return cursor;
    }

    /** Open the managed ledger and the cursor. */
    ManagedCursorImpl open() throws Exception {
        return (ManagedCursorImpl) factory.open(NAME, config).openCursor("s", InitialPosition.Earliest);
    }

    /** Forget the state in memory, as a crash does: nothing is closed or written. */
    void crash() {
        factory.ledgers.remove(NAME);
    }

    /** Wait until the cursor has its ledger and nothing in flight. */
    static void awaitStorage(ManagedCursorImpl cursor) throws Exception {
        while (!cursor.getState().equals("Open")) {
            Thread.sleep(1);
        }
        Thread.sleep(20);
    }

    @Override
    public void close() throws Exception {
        factory.ledgers.clear();
        factory.shutdown();
        metadata.close();
        storage.shutdown();
        executor.shutdownNow();
    }
}
