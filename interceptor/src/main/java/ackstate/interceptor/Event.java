package ackstate.interceptor;

/**
 * Something that happened in a broker, handed from its thread to the writer.
 *
 * @param kind what happened
 * @param millis when, in ms since 1970
 * @param subject the consumer, the topic's name or the cursor that it happened to
 * @param numbers depends on the kind
 * @param detail depends on the kind, else null
 */
record Event(Kind kind, long millis, Object subject, long[] numbers, Object detail) {
    enum Kind {
        /** Entries were published. Subject: the topic's name. Detail: the {@link EntryRun}. */
        PUBLISH,
        /** Entries are about to be sent to a consumer. Detail: the {@link EntryRun}. */
        DELIVER,
        /**
         * A partly acked batch is about to be sent to a consumer. Numbers: ledger, entry, the number of its messages,
         * the words of its unacked messages.
         */
        DELIVER_PARTLY,
        /**
         * An ACK command was handled. Numbers: when it was received, or -1; the cursor's ledger and the last record
         * begun before and after it; then the acks as {@link AckRuns} lays them out. Detail: the type.
         */
        ACK,
        /** A consumer requests messages again. Numbers: ledger, entry, and so on; none for all. */
        REDELIVER,
        /** A consumer seeks. Numbers: ledger, entry; or one time. */
        SEEK,
        /** A consumer removes its subscription. */
        UNSUBSCRIBE,
        /** A consumer was created. Detail: the {@link OpenedCursor}, of the first one of a cursor. */
        CONSUMER,
        /** A consumer was closed. */
        CLOSED,
        /** A request changes a subscription over the admin interface. Detail: method and path. */
        ADMIN
    }
}
