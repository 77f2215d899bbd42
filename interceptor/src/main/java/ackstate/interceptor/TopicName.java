package ackstate.interceptor;

/** Names of topics as patterns match them. */
final class TopicName {
    private TopicName() {
    }

    /** Returns tenant/namespace/topic of a topic or of one of its partitions. */
    static String glob(String topic) {
        int scheme = topic.indexOf("://");
        String name = scheme < 0 ? topic : topic.substring(scheme + 3);
        int partition = name.lastIndexOf("-partition-");
        boolean isPartition = partition >= 0 && !name.substring(partition + 11).isEmpty()
                && name.substring(partition + 11).chars().allMatch(Character::isDigit);
        return isPartition ? name.substring(0, partition) : name;
    }
}
