package ackstate;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;

/** One line of the input: a name, then {@code key=value}, separated by spaces. */
public final class Command {
    public final String name;
    private final Map<String, String> values = new HashMap<>();

    Command(String line) {
        String[] words = line.split(" ");
        name = words[0];
        for (int i = 1; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            values.put(pair[0], pair[1]);
        }
    }

    public String text(String key) {
        if (!values.containsKey(key)) {
            throw new IllegalArgumentException(name + " needs " + key);
        }
        return values.get(key);
    }

    public int integer(String key) {
        return Integer.parseInt(text(key));
    }

    public boolean flag(String key) {
        return integer(key) != 0;
    }

    /** Read a file of 64-bit little-endian integers. */
    public long[] numbers(String key) {
        try {
            ByteBuffer content = ByteBuffer.wrap(Files.readAllBytes(Path.of(text(key)))).order(ByteOrder.LITTLE_ENDIAN);
            long[] numbers = new long[content.remaining() / Long.BYTES];
            content.asLongBuffer().get(numbers);
            return numbers;
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }
}
