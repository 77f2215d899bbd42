package org.apache.pulsar.broker.delayed;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.pulsar.broker.delayed.bucket.BucketSnapshotStorage;
import org.apache.pulsar.broker.delayed.proto.SnapshotMetadata;
import org.apache.pulsar.broker.delayed.proto.SnapshotSegment;
import org.apache.pulsar.broker.service.persistent.AbstractPersistentDispatcherMultipleConsumers;
import org.mockito.Mockito;

/** Stores the snapshots of buckets in memory, as bytes, in no time. */
final class SnapshotsInMemory implements BucketSnapshotStorage {
    /** The metadata and the segments of each. */
    private final Map<Long, List<byte[]>> snapshots = new TreeMap<>();
    private long lastId;

    /** A dispatcher with a cursor that keeps its properties, in which a tracker finds its buckets again. */
    static AbstractPersistentDispatcherMultipleConsumers dispatcherWithCursor() {
        Map<String, String> properties = new TreeMap<>();
        ManagedLedger ledger = Mockito.mock(ManagedLedger.class, Mockito.withSettings().stubOnly());
        Mockito.when(ledger.getName()).thenReturn("public/default/persistent/t");
        ManagedCursor cursor = Mockito.mock(ManagedCursor.class, Mockito.withSettings().stubOnly());
        Mockito.when(cursor.getName()).thenReturn("s");
        Mockito.when(cursor.getManagedLedger()).thenReturn(ledger);
        Mockito.when(cursor.getCursorProperties()).thenReturn(properties);
        Mockito.when(cursor.putCursorProperty(Mockito.anyString(), Mockito.anyString())).thenAnswer(call -> {
            properties.put(call.getArgument(0), call.getArgument(1));
            return CompletableFuture.completedFuture(null);
        });
        Mockito.when(cursor.removeCursorProperty(Mockito.anyString())).thenAnswer(call -> {
            properties.remove(call.<String>getArgument(0));
            return CompletableFuture.completedFuture(null);
        });
        AbstractPersistentDispatcherMultipleConsumers dispatcher =
                Mockito.mock(AbstractPersistentDispatcherMultipleConsumers.class, Mockito.withSettings().stubOnly());
        Mockito.when(dispatcher.getName()).thenReturn("persistent://public/default/t / s");
        Mockito.when(dispatcher.getCursor()).thenReturn(cursor);
        return dispatcher;
    }

    long bytes() {
        return snapshots.keySet().stream().mapToLong(this::length).sum();
    }

    private long length(long id) {
        return snapshots.getOrDefault(id, List.of()).stream().mapToLong(part -> part.length).sum();
    }

    @Override
    public CompletableFuture<Long> createBucketSnapshot(SnapshotMetadata metadata, List<SnapshotSegment> segments,
            String bucketKey, String topic, String cursor) {
        List<byte[]> parts = new ArrayList<>();
        parts.add(metadata.toByteArray());
        segments.forEach(segment -> parts.add(segment.toByteArray()));
        snapshots.put(++lastId, parts);
        return CompletableFuture.completedFuture(lastId);
    }

    @Override
    public CompletableFuture<SnapshotMetadata> getBucketSnapshotMetadata(long id) {
        SnapshotMetadata metadata = new SnapshotMetadata();
        metadata.parseFrom(snapshots.get(id).get(0));
        return CompletableFuture.completedFuture(metadata);
    }

    @Override
    public CompletableFuture<List<SnapshotSegment>> getBucketSnapshotSegment(long id, long first, long last) {
        List<byte[]> parts = snapshots.get(id);
        List<SnapshotSegment> segments = new ArrayList<>();
        for (int i = (int) first; i <= last && i < parts.size(); i++) {
            SnapshotSegment segment = new SnapshotSegment();
            segment.parseFrom(parts.get(i));
            segments.add(segment);
        }
        return CompletableFuture.completedFuture(segments);
    }

    @Override
    public CompletableFuture<Long> getBucketSnapshotLength(long id) {
        return CompletableFuture.completedFuture(length(id));
    }

    @Override
    public CompletableFuture<Void> deleteBucketSnapshot(long id) {
        snapshots.remove(id);
        return CompletableFuture.completedFuture(null);
    }

    @Override
    public void start() {
    }

    @Override
    public void close() {
    }
}
