package ackstate;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import org.apache.bookkeeper.mledger.impl.Cursors;
import org.apache.bookkeeper.mledger.impl.RangeSets;
import org.apache.pulsar.broker.delayed.Delays;

/** Reads a command per line, runs one round of it on Pulsar's classes, and answers with a line of JSON. */
public final class Main {
    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Answer answer;
            try {
                answer = answer(new Command(line));
            } catch (Throwable e) {
                e.printStackTrace();
                answer = new Answer().text("error", e.toString());
            }
            out.println(answer);
            out.flush();
        }
        System.exit(0);
    }

    private static Answer answer(Command command) throws Exception {
        return switch (command.name) {
            case "java" -> new Answer().text("version", System.getProperty("java.version"));
            case "ack" -> Cursors.ack(command);
            case "store" -> Cursors.store(command);
            case "reopen" -> Cursors.reopen(command);
            case "forget" -> Cursors.forget(command);
            case "fill" -> RangeSets.fill(command);
            case "weigh" -> RangeSets.weigh(command);
            case "delay" -> Delays.delay(command);
            case "bucket" -> Delays.bucket(command);
            case "weigh_delays" -> Delays.weigh(command);
            default -> throw new IllegalArgumentException("unknown command " + command.name);
        };
    }

    /** Return the used heap after several collections. */
    public static long heapBytes() throws InterruptedException {
        for (int i = 0; i < 3; i++) {
            System.gc();
            Thread.sleep(100);
        }
        return ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed();
    }
}
