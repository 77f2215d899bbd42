package org.apache.bookkeeper.mledger.impl;

import ackstate.Answer;
import ackstate.Command;
import ackstate.Main;
import java.lang.reflect.Constructor;
import java.util.Arrays;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.pulsar.common.util.collections.LongPairRangeSet;

/** Times and weighs the real set of individually deleted ranges. */
public final class RangeSets {
    private static final int COUNTS = 20;

    private RangeSets() {
    }

    /** Add the positions of a file one by one, look up those of another, then count the ranges after each of 20 adds. */
    public static Answer fill(Command command) {
        long[] added = command.numbers("file");
        long[] lookedUp = command.numbers("lookups");
        int adds = added.length / 2 - COUNTS;
        System.gc();
        LongPairRangeSet<Position> ranges = empty();
        long begun = System.nanoTime();
        add(ranges, added, 0, adds);
        long filled = System.nanoTime();
        long found = 0;
        for (int i = 0; i < lookedUp.length; i += 2) {
            found += ranges.contains(lookedUp[i], lookedUp[i + 1]) ? 1 : 0;
        }
        long searched = System.nanoTime();
        long counted = 0;
        for (int i = adds; i < adds + COUNTS; i++) {
            add(ranges, added, i, i + 1);
            counted += ranges.size();
        }
        long end = System.nanoTime();
        return new Answer().number("add_nanos", filled - begun).number("lookup_nanos", searched - filled)
                .number("count_nanos", end - searched).number("found", found).number("counted", counted)
                .number("ranges", ranges.size());
    }

    /** Weigh {@code copies} sets of the positions of a file. */
    public static Answer weigh(Command command) throws Exception {
        long[] added = command.numbers("file");
        Object[] copies = new Object[command.integer("copies")];
        long before = Main.heapBytes();
        for (int i = 0; i < copies.length; i++) {
            LongPairRangeSet<Position> ranges = empty();
            add(ranges, added, 0, added.length / 2);
            copies[i] = ranges;
        }
        long bytes = Main.heapBytes() - before;
        return new Answer().number("bytes", bytes / copies.length)
                .number("ranges", ((LongPairRangeSet<?>) copies[0]).size());
    }

    /** Return an empty set of the class that cursors have: up to 5.0.0-M1 a wrapper, then one of its own. */
    @SuppressWarnings("unchecked")
    static LongPairRangeSet<Position> empty() {
        LongPairRangeSet.LongPairConsumer<Position> toPosition = PositionFactory::create;
        LongPairRangeSet.RangeBoundConsumer<Position> toPair =
                position -> new LongPairRangeSet.LongPair(position.getLedgerId(), position.getEntryId());
        try {
            Constructor<?>[] all = ManagedCursorImpl.class.getDeclaredField("individualDeletedMessages").getType()
                    .getDeclaredConstructors();
            Constructor<?> make = Arrays.stream(all)
                    .filter(each -> each.getParameterTypes()[each.getParameterCount() - 1] == boolean.class)
                    .findFirst().orElseThrow();
            make.setAccessible(true);
            return (LongPairRangeSet<Position>) (make.getParameterCount() == 2 ? make.newInstance(toPosition, false)
                    : make.newInstance(toPosition, toPair, true, false));
        } catch (ReflectiveOperationException e) {
            throw new IllegalStateException(e);
        }
    }

    private static void add(LongPairRangeSet<Position> ranges, long[] file, int first, int end) {
        for (int i = 2 * first; i < 2 * end; i += 2) {
            ranges.addOpenClosed(file[i], file[i + 1] - 1, file[i], file[i + 1]);
        }
    }
}
