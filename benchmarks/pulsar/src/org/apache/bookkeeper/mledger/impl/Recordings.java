package org.apache.bookkeeper.mledger.impl;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.BitSet;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.pulsar.common.util.collections.LongPairRangeSet;

/**
 * Answers recorded cases once more, with this release: a line of JSON for each line of a file of {@code tests/vectors}.
 *
 * <p>For {@code rangeset} the results of {@code toRanges}, for {@code positioninfo} the bytes of the entry in both forms.
 */
public final class Recordings {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Pattern RANGE = Pattern.compile("\\((\\d+):(-?\\d+)\\.\\.(\\d+):(\\d+)\\]");

    private Recordings() {
    }

    public static void main(String[] files) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err);
        for (String line : Files.readAllLines(Path.of(files[0]))) {
            JsonNode recorded = JSON.readTree(line);
            out.println(recorded.has("ops") ? ranges(recorded) : entries(recorded));
        }
        out.flush();
        System.exit(0);
    }

    private static ArrayNode ranges(JsonNode recorded) throws Exception {
        LongPairRangeSet<Position> set = RangeSets.empty();
        ArrayNode results = JSON.createArrayNode();
        for (JsonNode op : recorded.get("ops")) {
            switch (op.get(0).asText()) {
                case "addOpenClosed" -> set.addOpenClosed(long_(op, 1), long_(op, 2), long_(op, 3), long_(op, 4));
                case "removeAtMost" -> set.removeAtMost(long_(op, 1), long_(op, 2));
                case "toRanges" -> results.add(JSON.valueToTree(new TreeMap<>(set.toRanges(op.get(1).asInt()))));
                default -> { }
            }
        }
        return results;
    }

    private static ObjectNode entries(JsonNode recorded) throws Exception {
        JsonNode config = recorded.get("config");
        JsonNode state = recorded.get("state");
        ObjectNode found = JSON.createObjectNode();
        for (boolean words : new boolean[] {true, false}) {
            try (Broker broker = new Broker(words, 0, 1)) {
                ManagedCursorImpl cursor = broker.openFirst();
                cursor.getConfig().setMaxUnackedRangesToPersist(config.get("maxUnackedRangesToPersist").asInt());
                cursor.getConfig().setMaxBatchDeletedIndexToPersist(config.get("maxBatchDeletedIndexToPersist").asInt());
                Matcher range = RANGE.matcher(state.get("ranges").asText());
                while (range.find()) {
                    cursor.individualDeletedMessages.addOpenClosed(Long.parseLong(range.group(1)),
                            Long.parseLong(range.group(2)), Long.parseLong(range.group(3)), Long.parseLong(range.group(4)));
                }
                state.get("batch").fields().forEachRemaining(each -> cursor.batchDeletedIndexes.put(
                        position(each.getKey().split(":")), BitSet.valueOf(JSON.convertValue(each.getValue(), long[].class))));
                Map<String, Long> properties = new HashMap<>();
                state.get("props").fields().forEachRemaining(each -> properties.put(each.getKey(), each.getValue().asLong()));
                JsonNode position = state.get("md");
                CompletableFuture<Void> written = new CompletableFuture<>();
                cursor.persistPositionToLedger(broker.storage.handle(cursor.getCursorLedger()), cursor.new MarkDeleteEntry(
                        PositionFactory.create(long_(position, 0), long_(position, 1)), properties, null, null),
                        new ManagedCursorImpl.VoidCallback() {
                            @Override
                            public void operationComplete() {
                                written.complete(null);
                            }

                            @Override
                            public void operationFailed(ManagedLedgerException exception) {
                                written.completeExceptionally(exception);
                            }
                        }, false);
                written.get();
                byte[] entry = broker.storage.lastEntry(cursor.getCursorLedger());
                found.put(words ? "longArrayHex" : "messageRangeHex", HexFormat.of().formatHex(entry));
            }
        }
        return found;
    }

    private static long long_(JsonNode numbers, int index) {
        return numbers.get(index).asLong();
    }

    private static Position position(String[] numbers) {
        return PositionFactory.create(Long.parseLong(numbers[0]), Long.parseLong(numbers[1]));
    }
}
