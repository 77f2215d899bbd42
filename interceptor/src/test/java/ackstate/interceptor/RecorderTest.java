package ackstate.interceptor;

import static org.testng.Assert.assertEquals;
import static org.testng.Assert.assertFalse;
import static org.testng.Assert.assertThrows;
import static org.testng.Assert.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.zip.GZIPInputStream;
import org.apache.pulsar.common.api.proto.CommandAck;
import org.testng.annotations.AfterMethod;
import org.testng.annotations.BeforeMethod;
import org.testng.annotations.Test;

/** The parts that need no broker; tests/live has one. */
public class RecorderTest {
    private static final FileHead HEAD = new FileHead("host:8080", "0123456789", 1_700_000_000_000L, 1, 2, Map.of());
    private Path directory;

    @BeforeMethod
    public void makeDirectory() throws IOException {
        directory = Files.createTempDirectory("ackstate");
    }

    @AfterMethod
    public void removeDirectory() throws IOException {
        try (var files = Files.walk(directory)) {
            files.sorted((one, other) -> other.compareTo(one)).forEach(each -> each.toFile().delete());
        }
    }

    private Settings settings(String... pairs) {
        Properties found = new Properties();
        found.setProperty("ackstateRecorderDirectory", directory.resolve("files").toString());
        found.setProperty("ackstateRecorderFreeBytesMin", "0");
        for (int index = 0; index < pairs.length; index += 2) {
            found.setProperty("ackstateRecorder" + pairs[index], pairs[index + 1]);
        }
        return Settings.of(found, new Properties());
    }

    private static Event published(long entry) {
        return new Event(Event.Kind.PUBLISH, 1_700_000_000_000L + entry, "persistent://a/b/c", new long[0],
                new EntryRun("persistent://a/b/c", 3, entry, 1));
    }

    /** Ends a recording; unlike a broker that is stopped, it waits however long the machine takes. */
    private static void ended(EventWriter writer) throws InterruptedException {
        writer.close();
        writer.join();
    }

    private List<String> lines() throws IOException {
        List<String> found = new ArrayList<>();
        try (var files = Files.list(directory.resolve("files"))) {
            for (Path file : files.sorted().toList()) {
                found.addAll(text(file).lines().toList());
            }
        }
        return found;
    }

    /** Returns the text of a file, which may not have been closed. */
    private static String text(Path file) throws IOException {
        var found = new ByteArrayOutputStream();
        try (var compressed = new GZIPInputStream(Files.newInputStream(file))) {
            for (int value = compressed.read(); value >= 0; value = compressed.read()) {
                found.write(value);
            }
        } catch (EOFException cut) {
            // Everything before the end was read.
        }
        return found.toString(StandardCharsets.UTF_8);
    }

    @Test
    public void anInvalidSettingNamesItsKey() {
        assertThrows(IllegalArgumentException.class, () -> settings("QueueEventsMax", "many"));
        assertThrows(IllegalArgumentException.class, () -> settings("FlushMillis", "0"));
        assertThrows(IllegalArgumentException.class, () -> Settings.of(new Properties(), new Properties()));
    }

    @Test
    public void aSystemPropertyHasPrecedence() {
        Properties system = new Properties();
        system.setProperty("ackstateRecorderDirectory", "/elsewhere");
        Properties broker = new Properties();
        broker.setProperty("ackstateRecorderDirectory", "/here");
        assertEquals(Settings.of(broker, system).directory(), Path.of("/elsewhere"));
    }

    @Test
    public void aPatternMatchesTheWholeTopicOfAPartition() {
        var orders = Settings.matcher("public/*/orders*, other/x/y");
        assertTrue(orders.test(TopicName.glob("persistent://public/default/orders-partition-12")));
        assertTrue(orders.test("other/x/y"));
        assertFalse(orders.test("public/default/my-orders"));
        assertFalse(Settings.matcher("").test("pulsar/system/topic"));
        assertEquals(TopicName.glob("persistent://a/b/c-partition-x"), "a/b/c-partition-x");
    }

    @Test
    public void consecutiveAndRepeatedAcksAreOneRun() {
        CommandAck ack = new CommandAck();
        for (long entry : new long[] {1, 1, 2, 3, 5}) {
            ack.addMessageId().setLedgerId(7).setEntryId(entry);
        }
        ack.addMessageId().setLedgerId(7).setEntryId(6).addAckSet(5);
        assertEquals(AckRuns.of(ack, 1), new long[] {0, 7, 1, 3, 0, 7, 5, 5, 0, 7, 6, 6, 1, 5});
    }

    @Test
    public void longCommandsGrow() {
        CommandAck ack = new CommandAck();
        for (int entry = 0; entry < 100; entry++) {
            ack.addMessageId().setLedgerId(7).setEntryId(2 * entry);
        }
        assertEquals(AckRuns.of(ack, 5).length, 5 + 4 * 100);
    }

    @Test
    public void aRunIsExtendedUntilItIsTaken() {
        EntryRun run = new EntryRun("topic", 3, 0, 1);
        assertTrue(run.extend("topic", 3, 1, 1));
        assertFalse(run.extend("topic", 3, 3, 1));
        assertFalse(run.extend("topic", 4, 2, 1));
        assertFalse(run.extend("topic", 3, 2, 5));
        assertFalse(run.extend("other", 3, 2, 1));
        assertEquals(run.take(), 1);
        assertFalse(run.extend("topic", 3, 2, 1));
        assertFalse(run.extend("topic", 3, 0, 1)); // the mark of a taken run is no entry
    }

    @Test
    public void noEntryOfARunIsLost() throws Exception {
        EventQueue queue = new EventQueue(1 << 16);
        EventWriter writer = EventWriter.start(settings("FlushMillis", "10"), queue, HEAD);
        EntryRun run = null;
        for (int entry = 0; entry < 300_000; entry++) {
            if (run == null || !run.extend("persistent://a/b/c", 3, entry, 1)) {
                run = new EntryRun("persistent://a/b/c", 3, entry, 1);
                assertTrue(queue.offer(new Event(Event.Kind.PUBLISH, 1, "persistent://a/b/c", new long[0], run)));
            }
            if (entry % 1_000 == 0) {
                Thread.sleep(1);
            }
        }
        ended(writer);
        long next = 0;
        for (String line : lines()) {
            var runs = java.util.regex.Pattern.compile("\\[3,(\\d+),(\\d+)\\]").matcher(line);
            while (runs.find()) {
                assertEquals(Long.parseLong(runs.group(1)), next);
                next = Long.parseLong(runs.group(2)) + 1;
            }
        }
        assertEquals(next, 300_000);
    }

    @Test
    public void aFullQueueDropsAndCounts() {
        EventQueue queue = new EventQueue(1_024);
        for (int entry = 0; entry < 2_000; entry++) {
            queue.offer(published(entry));
        }
        assertEquals(queue.dropped(), 2_000 - 1_024);
        List<Event> taken = new ArrayList<>();
        assertEquals(queue.drain(taken::add, 5_000), 1_024);
        queue.offer(published(1));
        assertEquals(queue.dropped(), 976);
    }

    @Test
    public void longCommandsAreBoundedByTheirNumbers() {
        EventQueue queue = new EventQueue(1_024);
        for (int each = 0; each < 10; each++) {
            queue.offer(new Event(Event.Kind.ACK, 0, null, new long[10_000], "Individual"));
        }
        assertEquals(queue.dropped(), 4); // 64 * 1,024 numbers fit
    }

    @Test
    public void whatIsWrittenCanBeRead() throws Exception {
        EventQueue queue = new EventQueue(1_024);
        for (int entry = 0; entry < 10; entry++) {
            queue.offer(published(entry));
        }
        for (int entry = 0; entry < 1_100; entry++) {
            queue.drop();
        }
        // Begun last, so that one flush has everything.
        ended(EventWriter.start(settings(), queue, HEAD));
        List<String> lines = lines();
        assertTrue(lines.get(0).startsWith("{\"kind\":\"start\""), lines.get(0));
        assertTrue(lines.stream().anyMatch(line -> line.contains("\"entries\":[[3,0,9]]")), lines.toString());
        assertTrue(lines.stream().anyMatch(line -> line.contains("\"dropped\"") && line.contains("1100")));
        assertTrue(lines.get(lines.size() - 1).startsWith("{\"kind\":\"end\""));
    }

    @Test
    public void aFileThatWasNotClosedHasWhatWasFlushed() throws Exception {
        RecordingFiles files = new RecordingFiles(settings(), HEAD);
        files.findOlder();
        assertTrue(files.open(1));
        assertTrue(files.write("{\"kind\":\"alive\"}\n".getBytes(StandardCharsets.UTF_8), 1));
        assertEquals(lines(), List.of("{\"kind\":\"alive\"}"));
    }

    private static String rights(Path path) throws IOException {
        return PosixFilePermissions.toString(Files.getPosixFilePermissions(path));
    }

    @Test
    public void onlyTheBrokersUserMayReadTheFiles() throws Exception {
        RecordingFiles files = new RecordingFiles(settings(), HEAD);
        files.findOlder();
        assertTrue(files.open(1));
        files.close(1);
        assertEquals(rights(directory.resolve("files")), "rwx------");
        try (var found = Files.list(directory.resolve("files"))) {
            assertEquals(rights(found.findFirst().orElseThrow()), "rw-------");
        }
    }

    @Test
    public void theRightsOfAnExistingDirectoryStay() throws Exception {
        Path open = Files.createDirectory(directory.resolve("files"));
        Files.setPosixFilePermissions(open, PosixFilePermissions.fromString("rwxr-xr-x"));
        RecordingFiles files = new RecordingFiles(settings(), HEAD);
        files.findOlder();
        assertTrue(files.open(1));
        files.close(1);
        assertEquals(rights(open), "rwxr-xr-x");
        try (var found = Files.list(open)) {
            assertEquals(rights(found.findFirst().orElseThrow()), "rw-------");
        }
    }

    @Test
    public void oldFilesGiveWay() throws Exception {
        Path older = directory.resolve("files");
        Files.createDirectories(older);
        for (int number = 0; number < 3; number++) {
            Files.write(older.resolve("ackstate-000000000000" + number + "-x-y-00000.jsonl.gz"), new byte[600_000]);
        }
        Files.write(older.resolve("foreign.gz"), new byte[600_000]);
        RecordingFiles files = new RecordingFiles(settings("TotalBytesMax", "1300000"), HEAD);
        files.findOlder();
        assertTrue(files.open(10_000));
        try (var left = Files.list(older)) {
            assertEquals(left.map(each -> each.getFileName().toString()).filter(each -> each.endsWith("-00000.jsonl.gz"))
                    .filter(each -> each.startsWith("ackstate-0000")).count(), 2);
        }
        assertTrue(Files.exists(older.resolve("foreign.gz")));
    }

    @Test
    public void aDirectoryThatCannotBeWrittenCostsOnlyTheRecording() throws Exception {
        Files.write(directory.resolve("files"), new byte[0]); // a file, where the directory should be
        EventQueue queue = new EventQueue(1_024);
        for (int entry = 0; entry < 500; entry++) {
            queue.offer(published(entry));
        }
        ended(EventWriter.start(settings(), queue, HEAD));
        assertEquals(queue.dropped(), 0);
        assertEquals(queue.drain(event -> { }, 10), 0);
    }

    @Test
    public void aFullDiskStopsTheRecordingBeforeItIsFull() throws Exception {
        RecordingFiles files = new RecordingFiles(settings("FreeBytesMin", Long.toString(1L << 50)), HEAD);
        files.findOlder();
        assertFalse(files.open(1));
    }
}
