package ackstate.interceptor;

import java.lang.invoke.VarHandle;
import java.lang.management.ManagementFactory;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.mledger.impl.ManagedLedgerFactoryImpl;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.broker.PulsarService;
import org.apache.pulsar.broker.ServiceConfiguration;

/**
 * What the first line of each file says about the broker.
 *
 * @param broker its address
 * @param life tells its processes apart
 * @param begunMillis when the recording began
 * @param timerFirstMillis the broker's timer that flushes cursors was started at this time or later
 * @param timerLastMillis and at this time or earlier
 * @param config settings of broker.conf that decide when cursors are written, and the release as pulsarVersion
 */
record FileHead(String broker, String life, long begunMillis, long timerFirstMillis,
                long timerLastMillis, Map<String, String> config) {
    static FileHead of(PulsarService broker) {
        ServiceConfiguration conf = broker.getConfiguration();
        Map<String, String> config = new LinkedHashMap<>();
        config.put("pulsarVersion", PulsarVersion.getVersion());  // not a setting: decides what the limits count
        config.put("managedLedgerDefaultMarkDeleteRateLimit",
                Double.toString(conf.getManagedLedgerDefaultMarkDeleteRateLimit()));
        config.put("managedLedgerCursorPositionFlushSeconds",
                Integer.toString(conf.getManagedLedgerCursorPositionFlushSeconds()));
        config.put("managedLedgerMaxUnackedRangesToPersist",
                Integer.toString(conf.getManagedLedgerMaxUnackedRangesToPersist()));
        config.put("managedLedgerMaxBatchDeletedIndexToPersist",
                Integer.toString(conf.getManagedLedgerMaxBatchDeletedIndexToPersist()));
        config.put("managedLedgerMaxUnackedRangesToPersistInMetadataStore",
                Integer.toString(conf.getManagedLedgerMaxUnackedRangesToPersistInMetadataStore()));
        config.put("managedLedgerPersistIndividualAckAsLongArray",
                Boolean.toString(conf.isManagedLedgerPersistIndividualAckAsLongArray()));
        config.put("managedLedgerUnackedRangesOpenCacheSetEnabled",
                Boolean.toString(conf.isManagedLedgerUnackedRangesOpenCacheSetEnabled()));
        config.put("acknowledgmentAtBatchIndexLevelEnabled",
                Boolean.toString(conf.isAcknowledgmentAtBatchIndexLevelEnabled()));
        long now = System.currentTimeMillis();
        long timer = timerMillis(broker, conf.getManagedLedgerCursorPositionFlushSeconds(), now);
        boolean isKnown = timer >= 0;
        return new FileHead(conf.getAdvertisedAddress() == null ? "broker" : conf.getAdvertisedAddress(),
                UUID.randomUUID().toString(), now,
                isKnown ? timer - 1 : ManagementFactory.getRuntimeMXBean().getStartTime(), isKnown ? timer + 1 : now,
                config);
    }

    /** Returns when the timer that flushes cursors was started; -1 if this release hides it. */
    private static long timerMillis(PulsarService broker, int periodSeconds, long now) {
        VarHandle handle = CursorLedger.find(ManagedLedgerFactoryImpl.class, "flushCursorsTask", ScheduledFuture.class);
        if (handle == null || !(broker.getDefaultManagedLedgerFactory() instanceof ManagedLedgerFactoryImpl factory)) {
            return -1;
        }
        long next = now + ((ScheduledFuture<?>) handle.get(factory)).getDelay(TimeUnit.MILLISECONDS);
        return next - TimeUnit.SECONDS.toMillis(periodSeconds);
    }
}
