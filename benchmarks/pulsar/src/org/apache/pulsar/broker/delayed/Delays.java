package org.apache.pulsar.broker.delayed;

import ackstate.Answer;
import ackstate.Command;
import ackstate.Main;
import io.netty.util.Timeout;
import io.netty.util.Timer;
import io.netty.util.TimerTask;
import java.time.Clock;
import java.time.Instant;
import java.time.ZoneId;
import java.time.ZoneOffset;
import java.util.NavigableSet;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.mledger.Position;
import org.apache.pulsar.broker.delayed.bucket.BucketDelayedDeliveryTracker;
import org.apache.pulsar.broker.service.persistent.AbstractPersistentDispatcherMultipleConsumers;
import org.mockito.Mockito;

/** Times and weighs the real trackers of delayed messages, of which each subscription has one. */
public final class Delays {
    private static final long TICK_MILLIS = 1_000;
    /** The fields of a message in a file: ledger, entry, time. */
    private static final int FIELDS = 3;
    /** Makes a sum of which each message changes another part. */
    private static final long LEDGER_WEIGHT = 1_000_003;

    /** Gives its name once, and is else called when the timer fires, which ours never does. */
    private static final AbstractPersistentDispatcherMultipleConsumers DISPATCHER =
            Mockito.mock(AbstractPersistentDispatcherMultipleConsumers.class, Mockito.withSettings().stubOnly());

    private Delays() {
    }

    /** Add the messages of a file, then advance the clock in steps and take due messages, a bounded number a call. */
    public static Answer delay(Command command) throws Exception {
        long[] file = command.numbers("file");
        SetClock clock = new SetClock();
        try (DelayedDeliveryTracker tracker = tracker(clock)) {
            System.gc();
            long begun = System.nanoTime();
            add(tracker, file);
            long nanos = System.nanoTime() - begun;
            return drain(tracker, clock, command).number("add_nanos", nanos);
        }
    }

    /** The same for the tracker that stores buckets, which a restart reads again before the messages are due. */
    public static Answer bucket(Command command) throws Exception {
        long[] file = command.numbers("file");
        SetClock clock = new SetClock();
        SnapshotsInMemory snapshots = new SnapshotsInMemory();
        AbstractPersistentDispatcherMultipleConsumers dispatcher = SnapshotsInMemory.dispatcherWithCursor();
        long nanos;
        try (DelayedDeliveryTracker tracker = bucketTracker(dispatcher, clock, snapshots, command)) {
            System.gc();
            long begun = System.nanoTime();
            add(tracker, file);
            // A message of the next ledger seals the last bucket; it is not in a bucket itself.
            tracker.addMessage(file[file.length - FIELDS] + 1, 0, 2 * command.integer("end"));
            nanos = System.nanoTime() - begun;
        }
        long bytes = snapshots.bytes();
        System.gc();
        long begun = System.nanoTime();
        try (DelayedDeliveryTracker tracker = bucketTracker(dispatcher, clock, snapshots, command)) {
            long recoverNanos = System.nanoTime() - begun;
            long recovered = tracker.getNumberOfDelayedMessages();
            return drain(tracker, clock, command).number("add_nanos", nanos).number("recover_nanos", recoverNanos)
                    .number("recovered", recovered).number("bytes", bytes);
        }
    }

    private static Answer drain(DelayedDeliveryTracker tracker, SetClock clock, Command command) {
        int maximum = command.integer("maximum");
        long step = command.integer("step");
        long end = command.integer("end");
        long nanos = 0;
        long count = 0;
        long sum = 0;
        for (clock.now = step; clock.now <= end; clock.now += step) {
            NavigableSet<Position> due;
            do {
                long start = System.nanoTime();
                due = tracker.getScheduledMessages(maximum);
                nanos += System.nanoTime() - start;
                count += due.size();
                for (Position position : due) {
                    sum += position.getLedgerId() * LEDGER_WEIGHT + position.getEntryId();
                }
            } while (!due.isEmpty());
        }
        return new Answer().number("drain_nanos", nanos).number("drained", count).number("sum", sum)
                .number("left", tracker.getNumberOfDelayedMessages());
    }

    private static DelayedDeliveryTracker bucketTracker(AbstractPersistentDispatcherMultipleConsumers dispatcher,
            Clock clock, SnapshotsInMemory snapshots, Command command) throws Exception {
        // Pulsar's defaults: at most 5 minutes and 5,000 messages a segment, and any number of buckets.
        return new BucketDelayedDeliveryTracker(dispatcher, new StoppedTimer(), TICK_MILLIS, clock, false, snapshots,
                command.integer("sealed"), 300_000, 5_000, -1);
    }

    /** Return the bytes of a number of subscriptions with the messages of a file, from those of fewer trackers. */
    public static Answer weigh(Command command) throws Exception {
        long[] file = command.numbers("file");
        SetClock clock = new SetClock();
        DelayedDeliveryTracker[] trackers = new DelayedDeliveryTracker[command.integer("trackers")];
        long before = Main.heapBytes();
        for (int i = 0; i < trackers.length; i++) {
            trackers[i] = tracker(clock);
            add(trackers[i], file);
        }
        long bytes = Main.heapBytes() - before;
        return new Answer().number("bytes", bytes * command.integer("subscriptions") / trackers.length)
                .number("held", trackers[trackers.length - 1].getNumberOfDelayedMessages());
    }

    private static DelayedDeliveryTracker tracker(Clock clock) {
        return new InMemoryDelayedDeliveryTracker(DISPATCHER, new StoppedTimer(), TICK_MILLIS, clock, false, 0);
    }

    private static void add(DelayedDeliveryTracker tracker, long[] file) {
        for (int i = 0; i < file.length; i += FIELDS) {
            tracker.addMessage(file[i], file[i + 1], file[i + 2]);
        }
    }

    private static final class SetClock extends Clock {
        long now;

        @Override
        public long millis() {
            return now;
        }

        @Override
        public ZoneId getZone() {
            return ZoneOffset.UTC;
        }

        @Override
        public Clock withZone(ZoneId zone) {
            return this;
        }

        @Override
        public Instant instant() {
            return Instant.ofEpochMilli(now);
        }
    }

    private static final class StoppedTimer implements Timer, Timeout {
        @Override
        public Timeout newTimeout(TimerTask task, long delay, TimeUnit unit) {
            return this;
        }

        @Override
        public Set<Timeout> stop() {
            return Set.of();
        }

        @Override
        public Timer timer() {
            return this;
        }

        @Override
        public TimerTask task() {
            return null;
        }

        @Override
        public boolean isExpired() {
            return false;
        }

        @Override
        public boolean isCancelled() {
            return false;
        }

        @Override
        public boolean cancel() {
            return true;
        }
    }
}
