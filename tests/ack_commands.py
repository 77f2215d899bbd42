"""What the ACK commands of a recorded broker acked, as events of messages.

A run is an object with these fields, and others that are not read here.

==================  ====================================================================================================
field               meaning
==================  ====================================================================================================
config              keys of ``broker.conf`` that differ from the defaults of Pulsar 4.2; may be missing
entries             runs of entries in the order of publishing, ``[ledger, first entry, last entry]``; entry index k is
                    the k-th entry of that list
batch_sizes         messages in each entry; null or missing for 1 each. Message i is the i-th of that concatenation
index_ack           false if the client acked no parts of batches; may be missing
broker_acks_ms      the ACK commands, ``[received, handled, [index | [index, [words]]], type]``: entry indexes; words of
                    the batch ack set, 1 is not acknowledged; type ``Individual``, or ``Cumulative`` for an ack of
                    everything up to its last entry. Without a type it is individual
==================  ====================================================================================================

An ack counts from the time when the broker had handled it. Batches are split: an event's entries are messages, numbered
from 0 in each ledger; a BATCH event names the messages of a batch that is acked in parts. Parts count unless the broker
or the client ignores them.
"""

from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import EntrySet
from ackstate.pulsar_conf import BATCH_INDEX_ACKS


def messages_of(run):
    """Return ledger, first message and end (exclusive) of each entry of a run."""
    entries = [(ledger, entry) for ledger, first, last in run["entries"] for entry in range(first, last + 1)]
    sizes, ends, messages = run.get("batch_sizes"), {}, []
    if sizes is None:
        return [(ledger, entry, entry + 1) for ledger, entry in entries]
    for (ledger, _), size in zip(entries, sizes, strict=True):
        first = ends.get(ledger, 0)
        ends[ledger] = first + size
        messages.append((ledger, first, first + size))
    return messages


def acks_of(run):
    """Return the acks of a run, with a COMMAND before each command that shares its time with the one before."""
    messages, named, events, ts_ms = messages_of(run), set(), [], -1
    is_off = str(run.get("config", {}).get(BATCH_INDEX_ACKS, "")).lower() == "false"
    counts_parts = run.get("index_ack", True) and not is_off
    for _, handled_ms, acked, *type_ in run["broker_acks_ms"]:
        if handled_ms == ts_ms:
            events.append(Event(ts_ms, EventKind.COMMAND))
        ts_ms, kind, listed = handled_ms, EventKind.ACK, acked
        if type_ == ["Cumulative"]:
            kind, last = EventKind.MARK_DELETE, acked[-1]
            listed = [*range(last if isinstance(last, int) else last[0]), last]
        runs = EntrySet()
        for index, words in ((each, ()) if isinstance(each, int) else each for each in listed):
            ledger, first, end = messages[index]
            if not any(words):
                runs.add_run(ledger, first, end)
            elif counts_parts:
                if index not in named:
                    named.add(index)
                    events.append(Event(ts_ms, EventKind.BATCH, ledger, first, end - 1))
                for offset in range(end - first):
                    word, bit = divmod(offset, 64)
                    if word >= len(words) or not words[word] >> bit & 1:
                        runs.add_run(ledger, first + offset, first + offset + 1)
        events += [Event(ts_ms, kind, ledger, first, end - 1) for ledger, first, end in runs.runs()]
    return events
