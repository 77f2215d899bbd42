"""Mistakes between a store and its disk: missing syncs, syncs in another order, and wrong readings of a crash's
remains."""

from __future__ import annotations

from functools import wraps

from ackstate.stores import file_commit, file_generation, file_log
from ackstate.stores.kernel_directory import KernelFile
from ackstate.wire import native
from museum.exhibit import Exhibit, Replacement


class _BentFile:
    """A file that is synced in another way."""

    def __init__(self, file, sync):
        self.file, self._sync = file, sync

    def __getattr__(self, name):
        return getattr(self.file, name)

    def sync(self):
        self._sync(self.file)


class _BentDirectory:
    """A directory whose new files, or whose names, are synced in another way."""

    def __init__(self, directory, sync_file, sync_names):
        self._directory, self._sync_file, self._sync_names = directory, sync_file, sync_names

    def __getattr__(self, name):
        return getattr(self._directory, name)

    def __str__(self):
        return str(self._directory)

    def create(self, name):
        return _BentFile(self._directory.create(name), self._sync_file)

    def sync(self):
        self._sync_names(self._directory)


def _sync(what):
    what.sync()


def _do_not_sync(_):
    pass


def _bent(function, *, sync_file=_sync, sync_names=_sync):
    """Return a function of `file_generation` that syncs its new file in another way; later syncs are as ever."""

    @wraps(function)
    def call(directory, *args):
        made = function(_BentDirectory(directory, sync_file, sync_names), *args)
        if isinstance(made, file_generation.Generation):
            made.file = made.file.file
        return made

    return call


def _everywhere(name, by):
    return tuple(Replacement(module, name, by) for module in (file_generation, file_commit))


def _rename_before_the_bytes_are_synced():
    write, mark = file_generation.write_generation, file_generation._make_mark
    return (
        *_everywhere("write_generation", _bent(write, sync_file=_do_not_sync)),
        Replacement(file_generation, "_make_mark", _bent(mark, sync_file=_do_not_sync)),
    )


def _sync_no_names():
    write, mark, load = file_generation.write_generation, file_generation._make_mark, file_generation._load
    return (
        *_everywhere("write_generation", _bent(write, sync_names=_do_not_sync)),
        Replacement(file_generation, "_make_mark", _bent(mark, sync_names=_do_not_sync)),
        Replacement(file_generation, "_load", _bent(load, sync_names=_do_not_sync)),
    )


class _Believed(tuple):
    """Equal to anything."""

    __slots__ = ()

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0


class _UncheckedTrailer:
    """The trailer of a group, written as ever; no reader compares the checksum."""

    def __init__(self, trailer):
        self.size, self.pack, self._trailer = trailer.size, trailer.pack, trailer

    def unpack_from(self, buffer, offset):
        return _Believed(self._trailer.unpack_from(buffer, offset))


def _believe_the_tail():
    def read_unchecked(file, ledger, first, end, *, name):
        return [file.read(ledger.offsets[number], ledger.sizes[number]) for number in range(first, end)]

    return (
        Replacement(file_log, "TRAILER", _UncheckedTrailer(file_log.TRAILER)),
        *_everywhere("read_entries", read_unchecked),
        Replacement(native, "SEALED", _Believed()),
    )


def _take_an_empty_log_for_an_empty_store():
    load = file_generation._load

    def load_or_begin(directory, number, identity):
        file = directory.open(file_generation.log_name(number))
        try:
            is_empty = file.size == 0
        finally:
            file.close()
        if is_empty:
            place = file_log.LogOffset(identity or 0, 0, 0)
            return file_generation.Opened(file_generation.write_generation(directory, number + 1, place), None)
        return load(directory, number, identity)

    return (Replacement(file_generation, "_load", load_or_begin),)


def _sync_again_and_say_it_went_well():
    sync = KernelFile.sync

    def sync_again(self):
        try:
            sync(self)
        except OSError:
            sync(self)

    return (Replacement(KernelFile, "sync", sync_again),)


def _delete_the_old_log_first():
    write = file_generation.write_generation

    def write_over(directory, number, source):
        if not isinstance(source, file_generation.Generation):
            return write(directory, number, source)

        def delete_first(file):
            directory.remove(file_generation.log_name(source.number))
            directory.sync()
            file.sync()

        generation = _bent(write, sync_file=delete_first)(directory, number, source)
        # For the caller, who deletes the old log now.
        directory.create(file_generation.log_name(source.number)).close()
        return generation

    return _everywhere("write_generation", write_over)


FILES = (
    Exhibit(
        "M1",
        "a file is renamed into its place before its bytes are synced",
        "NATS JetStream, nats-io/nats-server#8036: after a power failure the ack floors of durable consumers were back "
        "at 1. A consumer's state is a file that is written beside and renamed, and synced only with `sync_always`; "
        "that this is the cause is likely, not proved.",
        "`write_generation` and `_make_mark` of `FileStore` skip the sync of the new file; later appends to it "
        "are synced.",
        _rename_before_the_bytes_are_synced,
    ),
    Exhibit(
        "M2",
        "the directory is never synced",
        "Similar to M1, in the same place: NATS JetStream syncs the directory of a renamed state file only "
        "with `sync_always`.",
        "`FileStore` syncs files and no names: a new log, and the deletion of the old one, may both be undone.",
        _sync_no_names,
    ),
    Exhibit(
        "M3",
        "the end of a log is accepted without a checksum",
        "NATS JetStream: `decodeConsumerState` looks at a magic number and a version, and there is no checksum. Single "
        "flipped bits lost 49.7 % of the messages in Jepsen's report on 2.12.1 (nats-io/nats-server#7564).",
        "`LogReader` takes any group whose header is sound and whose bytes are all there. Everything before the end is "
        "still chained to its successor. Our entries, and the journal's records in them, have checksums of their own, "
        "which would detect it: no reader compares these either.",
        _believe_the_tail,
    ),
    Exhibit(
        "M4",
        "an empty file is an empty state",
        "NATS JetStream: `stateWithCopyLocked` returns an empty state and no error for a consumer's file of no bytes; "
        "a consumer whose file was zeroed was deleted at the start (nats-io/nats-server#7691).",
        "`FileStore` begins a new store where the log is empty.",
        _take_an_empty_log_for_an_empty_store,
    ),
    Exhibit(
        "M11",
        "a failed fsync is repeated and trusted",
        "PostgreSQL until 2019 (fsync-gate): the kernel marks the pages of a failed fsync as clean, so that the next "
        "one succeeds and has written nothing. Rebello and others, USENIX ATC '20, found no strategy that is enough.",
        "`KernelFile` syncs a second time where the first failed, and reports success if that one succeeds.",
        _sync_again_and_say_it_went_well,
    ),
    Exhibit(
        "M14",
        "a compaction deletes the old log before the new one is durable",
        "No single report. Suspected in Atomix Copycat, in a change that its author later called incorrect "
        "(atomix/copycat#286); the compaction of NeDB let the new file take the old one's place before it was synced "
        "(louischatriot/nedb#265).",
        "`write_generation` deletes the old log, durably, and syncs and renames the new one after that.",
        _delete_the_old_log_first,
    ),
)
