package ackstate;

import java.util.Base64;
import java.util.StringJoiner;

/** One line of the output: a JSON object. */
public final class Answer {
    /** Larger ones are not sent: a whole state can take megabytes. */
    private static final int BINARY_BYTES_MAX = 100_000;

    private final StringJoiner fields = new StringJoiner(", ", "{", "}");

    public Answer number(String name, long value) {
        fields.add('"' + name + "\": " + value);
        return this;
    }

    public Answer text(String name, String value) {
        fields.add('"' + name + "\": \"" + value.replaceAll("[\"\\\\\\p{Cntrl}]", "'") + '"');
        return this;
    }

    public Answer binary(String name, byte[] value) {
        return value.length > BINARY_BYTES_MAX ? this : text(name, Base64.getEncoder().encodeToString(value));
    }

    @Override
    public String toString() {
        return fields.toString();
    }
}
