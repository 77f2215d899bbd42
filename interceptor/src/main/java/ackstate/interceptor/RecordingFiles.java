package ackstate.interceptor;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.channels.Channels;
import java.nio.channels.FileChannel;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermission;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Set;
import java.util.zip.Deflater;
import java.util.zip.GZIPOutputStream;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The compressed files of a recording. Only the writer's thread uses it.
 *
 * <p>A file that cannot be written is left as it is, and another is tried after a while: a full disk costs the
 * recording, not the broker.
 */
final class RecordingFiles {
    private static final Logger LOG = LoggerFactory.getLogger(RecordingFiles.class);
    private static final String NAME = "ackstate-*.jsonl.gz";
    private static final Set<PosixFilePermission> FILE_RIGHTS = PosixFilePermissions.fromString("rw-------");
    private static final Set<PosixFilePermission> DIRECTORY_RIGHTS = PosixFilePermissions.fromString("rwx------");
    private static final long RETRY_MILLIS = 10_000;
    private static final long LOOK_MILLIS = 1_000;

    private final Settings settings;
    private final String prefix;
    private final Deque<Path> older = new ArrayDeque<>();
    private long olderBytes;
    private int number;
    private Path path;
    private Counted counted;
    private OutputStream out;
    private long begunMillis;
    private long lookedMillis;
    private long blockedUntilMillis;

    RecordingFiles(Settings settings, FileHead head) {
        this.settings = settings;
        String broker = head.broker().replaceAll("[^A-Za-z0-9.-]", "_");
        this.prefix = String.format("ackstate-%013d-%s-%s", head.begunMillis(), broker, head.life().substring(0, 8));
    }

    /** Finds the files of earlier processes, which count for the total. */
    void findOlder() throws IOException {
        Path directory = settings.directory();
        // The rights of an existing directory are the administrator's choice: perhaps a group copies the files.
        Files.createDirectories(directory, PosixFilePermissions.asFileAttribute(DIRECTORY_RIGHTS));
        Set<PosixFilePermission> rights = Files.getPosixFilePermissions(directory);
        if (!DIRECTORY_RIGHTS.containsAll(rights)) {
            LOG.warn("{} is open to other users ({}); the files in it are not", directory,
                    PosixFilePermissions.toString(rights));
        }
        List<Path> found = new ArrayList<>();
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, NAME)) {
            files.forEach(found::add);
        }
        found.sort(null); // names begin with the time of the process
        for (Path each : found) {
            older.add(each);
            olderBytes += Files.size(each);
        }
    }

    /** Returns whether a file is open. */
    boolean isOpen() {
        return out != null;
    }

    /** Opens a file, unless the disk is too full, or an attempt failed a moment ago; returns whether one is open. */
    boolean open(long nowMillis) {
        if (out == null && nowMillis >= blockedUntilMillis && hasRoom(nowMillis)) {
            try {
                path = settings.directory().resolve(String.format("%s-%05d.jsonl.gz", prefix, number++));
                counted = new Counted(Channels.newOutputStream(FileChannel.open(path,
                        Set.of(StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE),
                        PosixFilePermissions.asFileAttribute(FILE_RIGHTS))));
                out = new FastGzip(counted);
                begunMillis = nowMillis;
            } catch (IOException error) {
                failed(error, nowMillis);
            }
        }
        return out != null;
    }

    /** Writes bytes so that they survive a kill of this process; returns whether that succeeded. */
    boolean write(byte[] bytes, long nowMillis) {
        try {
            out.write(bytes);
            out.flush();
            return true;
        } catch (IOException error) {
            failed(error, nowMillis);
            return false;
        }
    }

    /** Returns whether the file is to be followed by another. */
    boolean isComplete(long nowMillis) {
        boolean isLate = nowMillis - begunMillis >= settings.fileMillisMax();
        return counted.bytes >= settings.fileBytesMax() || isLate || !hasRoom(nowMillis);
    }

    /** Closes the file, if one is open. */
    void close(long nowMillis) {
        if (out != null) {
            try {
                out.close();
            } catch (IOException error) {
                failed(error, nowMillis);
            }
            leave();
        }
    }

    private void failed(IOException error, long nowMillis) {
        LOG.warn("{} cannot be written, trying another file in {} ms: {}", path, RETRY_MILLIS, error.toString());
        blockedUntilMillis = nowMillis + RETRY_MILLIS;
        leave();
    }

    private void leave() {
        if (out != null) {
            try {
                counted.close();
            } catch (IOException error) {
                LOG.debug("{} cannot be closed: {}", path, error.toString());
            }
            older.add(path);
            olderBytes += counted.bytes;
            out = null;
        }
    }

    /** Deletes old files above the total, and returns whether the disk has enough free bytes. */
    private boolean hasRoom(long nowMillis) {
        if (nowMillis - lookedMillis < LOOK_MILLIS && out != null) {
            return true;
        }
        lookedMillis = nowMillis;
        try {
            while (olderBytes + (out == null ? 0 : counted.bytes) > settings.totalBytesMax() && !older.isEmpty()) {
                Path oldest = older.remove();
                olderBytes -= Files.exists(oldest) ? Files.size(oldest) : 0;
                Files.deleteIfExists(oldest);
            }
            if (Files.getFileStore(settings.directory()).getUsableSpace() >= settings.freeBytesMin()) {
                return true;
            }
            LOG.warn("{} has less than {} free bytes: nothing is recorded", settings.directory(),
                    settings.freeBytesMin());
        } catch (IOException error) {
            LOG.warn("{} cannot be examined: {}", settings.directory(), error.toString());
        }
        blockedUntilMillis = nowMillis + RETRY_MILLIS;
        return false;
    }

    /** Counts the bytes that a file has. */
    private static final class Counted extends OutputStream {
        private final OutputStream file;
        private long bytes;

        Counted(OutputStream file) {
            this.file = file;
        }

        @Override
        public void write(int value) throws IOException {
            file.write(value);
            bytes++;
        }

        @Override
        public void write(byte[] data, int begin, int count) throws IOException {
            file.write(data, begin, count);
            bytes += count;
        }

        @Override
        public void close() throws IOException {
            file.close();
        }
    }

    /** Compresses quickly, and hands everything on at a flush. */
    private static final class FastGzip extends GZIPOutputStream {
        FastGzip(OutputStream out) throws IOException {
            super(out, 1 << 16, true);
            def.setLevel(Deflater.BEST_SPEED);
        }
    }
}
