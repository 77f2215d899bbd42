package ackstate.interceptor;

import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import java.util.function.Consumer;
import org.jctools.queues.MpscArrayQueue;

/** A bounded queue from the broker's threads to the writer. An offer never waits: what finds no room is counted. */
final class EventQueue {
    /** A command may hold many acks, so the numbers of waiting events are bounded, too: 64 for each event. */
    private static final int NUMBERS_PER_EVENT = 64;

    private final MpscArrayQueue<Event> events;
    private final AtomicLong numbers = new AtomicLong();
    private final long numbersMax;
    private final LongAdder dropped = new LongAdder();

    EventQueue(int eventsMax) {
        events = new MpscArrayQueue<>(eventsMax);
        numbersMax = (long) NUMBERS_PER_EVENT * eventsMax;
    }

    /** Adds an event, or counts it as dropped; returns whether it was added. */
    boolean offer(Event event) {
        int size = event.numbers().length > NUMBERS_PER_EVENT ? event.numbers().length : 0;
        if (size > 0 && numbers.addAndGet(size) > numbersMax || !events.relaxedOffer(event)) {
            if (size > 0) {
                numbers.addAndGet(-size);
            }
            dropped.increment();
            return false;
        }
        return true;
    }

    /** Counts an event that could not be made. */
    void drop() {
        dropped.increment();
    }

    /** Takes up to `limit` events; returns how many there were. Only the writer calls this. */
    int drain(Consumer<Event> taker, int limit) {
        return events.drain(event -> {
            if (event.numbers().length > NUMBERS_PER_EVENT) {
                numbers.addAndGet(-event.numbers().length);
            }
            taker.accept(event);
        }, limit);
    }

    /** Returns how many events were dropped so far. */
    long dropped() {
        return dropped.sum();
    }
}
