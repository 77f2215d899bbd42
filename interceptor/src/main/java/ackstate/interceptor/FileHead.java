package ackstate.interceptor;

import java.lang.management.ManagementFactory;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.UUID;
import org.apache.pulsar.broker.PulsarService;
import org.apache.pulsar.broker.ServiceConfiguration;

/**
 * What the first line of each file says about the broker.
 *
 * @param broker its address
 * @param life tells its processes apart
 * @param startedMillis when the process was started, before the broker's timers
 * @param readyMillis when the recording began, after them
 * @param config settings of broker.conf that decide when cursors are written
 */
record FileHead(String broker, String life, long startedMillis, long readyMillis, Map<String, String> config) {
    static FileHead of(PulsarService broker) {
        ServiceConfiguration conf = broker.getConfiguration();
        Map<String, String> config = new LinkedHashMap<>();
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
        return new FileHead(conf.getAdvertisedAddress() == null ? "broker" : conf.getAdvertisedAddress(),
                UUID.randomUUID().toString(), ManagementFactory.getRuntimeMXBean().getStartTime(),
                System.currentTimeMillis(), config);
    }
}
