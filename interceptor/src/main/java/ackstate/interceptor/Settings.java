package ackstate.interceptor;

import java.nio.file.Path;
import java.util.Arrays;
import java.util.Properties;
import java.util.function.Predicate;
import java.util.regex.Pattern;

/**
 * The settings of a recording: keys of broker.conf; a system property of the same name has precedence.
 *
 * @param directory where the files are written
 * @param topics which topics are recorded, by tenant/namespace/topic
 * @param fileBytesMax a file of more compressed bytes is followed by another
 * @param fileMillisMax so is a file of this age
 * @param totalBytesMax the oldest files are deleted while all files together have more bytes
 * @param freeBytesMin nothing is written while the disk has fewer free bytes
 * @param queueEventsMax how many events may wait for the writer; more are dropped
 * @param flushMillis how often events are written to the file, and cursors are looked at
 */
record Settings(
        Path directory,
        Predicate<String> topics,
        long fileBytesMax,
        long fileMillisMax,
        long totalBytesMax,
        long freeBytesMin,
        int queueEventsMax,
        long flushMillis) {
    static final String PREFIX = "ackstateRecorder";

    /**
     * Returns the settings of a broker.
     *
     * @throws IllegalArgumentException a value is missing, malformed or out of range; the message names its key
     */
    static Settings of(Properties broker, Properties system) {
        Source source = new Source(broker, system);
        String directory = source.text("Directory", "");
        if (directory.isBlank()) {
            throw new IllegalArgumentException(PREFIX + "Directory must be a directory, got nothing");
        }
        return new Settings(
                Path.of(directory),
                matcher(source.text("Topics", "")),
                source.number("FileBytesMax", 256L << 20, 1 << 16, 1L << 40),
                1_000 * source.number("FileSecondsMax", 3_600, 1, 86_400),
                source.number("TotalBytesMax", 10L << 30, 1 << 20, 1L << 50),
                source.number("FreeBytesMin", 1L << 30, 0, 1L << 50),
                (int) source.number("QueueEventsMax", 1 << 17, 1 << 10, 1 << 22),
                source.number("FlushMillis", 100, 10, 60_000));
    }

    /** Returns a test of tenant/namespace/topic: some of the patterns must match; none are all but the tenant pulsar. */
    static Predicate<String> matcher(String globs) {
        if (globs.isBlank()) {
            return name -> !name.startsWith("pulsar/");
        }
        Pattern any = Pattern.compile(String.join("|",
                Arrays.stream(globs.split(",")).map(String::strip).map(Settings::regex).toList()));
        return name -> any.matcher(name).matches();
    }

    private static String regex(String glob) {
        StringBuilder found = new StringBuilder();
        for (char each : glob.toCharArray()) {
            found.append(each == '*' ? ".*" : each == '?' ? "." : Pattern.quote(String.valueOf(each)));
        }
        return found.toString();
    }

    private record Source(Properties broker, Properties system) {
        String text(String name, String otherwise) {
            String key = PREFIX + name;
            Object found = system.getProperty(key) != null ? system.getProperty(key) : broker.get(key);
            return found == null || found.toString().isBlank() ? otherwise : found.toString().strip();
        }

        long number(String name, long otherwise, long least, long most) {
            String found = text(name, Long.toString(otherwise));
            long value;
            try {
                value = Long.parseLong(found);
            } catch (NumberFormatException error) {
                value = Long.MIN_VALUE;
            }
            if (value < least || value > most) {
                throw new IllegalArgumentException(
                        PREFIX + name + " must be a whole number from " + least + " to " + most + ", got " + found);
            }
            return value;
        }
    }
}
