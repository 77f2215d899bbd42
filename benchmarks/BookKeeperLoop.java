import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/**
 * Appends with BookKeeper's own client, as the reference of bench_bookkeeper.
 *
 * Arguments: the metadata URI, the entry's size in bytes, how many appends are in flight, how many ledgers they go to.
 * For each line of its input, a number of appends, it prints the nanoseconds that they took.
 */
public class BookKeeperLoop {
    public static void main(String[] arguments) throws Exception {
        ClientConfiguration configuration = new ClientConfiguration();
        configuration.setMetadataServiceUri(arguments[0]);
        configuration.setUseV2WireProtocol(true);
        configuration.setThrottleValue(0);
        configuration.setNumIOThreads(2);
        configuration.setNumWorkerThreads(2);
        byte[] entry = new byte[Integer.parseInt(arguments[1])];
        Semaphore room = new Semaphore(Integer.parseInt(arguments[2]));
        BookKeeper client = new BookKeeper(configuration);
        List<LedgerHandle> ledgers = new ArrayList<>();
        for (int number = 0; number < Integer.parseInt(arguments[3]); number++) {
            ledgers.add(client.createLedger(2, 2, 2, BookKeeper.DigestType.CRC32C, new byte[0]));
        }
        AtomicInteger failures = new AtomicInteger();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            int count = Integer.parseInt(line);
            long begin = System.nanoTime();
            for (int number = 0; number < count; number++) {
                room.acquire();
                ledgers.get(number % ledgers.size()).asyncAddEntry(entry, (code, ledger, id, context) -> {
                    if (code != 0) {
                        failures.incrementAndGet();
                    }
                    room.release();
                }, null);
            }
            int all = Integer.parseInt(arguments[2]);
            room.acquire(all);
            room.release(all);
            if (failures.get() != 0) {
                throw new IllegalStateException(failures.get() + " appends failed");
            }
            System.out.println(System.nanoTime() - begin);
        }
        System.exit(0);
    }
}
