package ackstate.interceptor;

import java.util.Arrays;
import org.apache.pulsar.common.api.proto.CommandAck;
import org.apache.pulsar.common.api.proto.MessageIdData;

/**
 * Lays the acks of a command out as numbers.
 *
 * <p>Consecutive entries of a command become one run: ledger, first, last, 0. An entry of which messages are left is
 * ledger, entry, entry, n, and n words; a 1 is an unacked message.
 */
final class AckRuns {
    private long[] numbers;
    private int end;

    private AckRuns(int begin, int ids) {
        // Most commands have few runs.
        numbers = new long[begin + 4 * Math.min(ids, 8)];
        end = begin;
    }

    /** Returns the layout, with room for some numbers before it. Complexity: O(ids), one array if there are few runs. */
    static long[] of(CommandAck ack, int room) {
        int ids = ack.getMessageIdsCount();
        AckRuns found = new AckRuns(room, ids);
        int run = -1;
        for (int index = 0; index < ids; index++) {
            MessageIdData id = ack.getMessageIdAt(index);
            int words = id.getAckSetsCount();
            long ledger = id.getLedgerId();
            long entry = id.getEntryId();
            if (words == 0 && run >= 0 && found.numbers[run] == ledger) {
                long last = found.numbers[run + 2];
                // A client lists an entry once for each of its messages.
                if (entry == last || entry == last + 1) {
                    found.numbers[run + 2] = entry;
                    continue;
                }
            }
            run = words == 0 ? found.end : -1;
            found.add(ledger, entry, words);
            for (int word = 0; word < words; word++) {
                found.numbers[found.end++] = id.getAckSetAt(word);
            }
        }
        return found.end == found.numbers.length ? found.numbers : Arrays.copyOf(found.numbers, found.end);
    }

    private void add(long ledger, long entry, int words) {
        if (end + 4 + words > numbers.length) {
            numbers = Arrays.copyOf(numbers, 2 * numbers.length + 4 + words);
        }
        numbers[end] = ledger;
        numbers[end + 1] = entry;
        numbers[end + 2] = entry;
        numbers[end + 3] = words;
        end += 4;
    }
}
