"""L6: power cuts without root: the states that a disk may be left in, built from the calls that the tracer saw.

The tracer (`ackstate.analysis.crash.kills`) stops the subject after each call that can change its directory. A
`DiskRecorder` compares the directory with its last known content, and logs the difference. When the subject was killed
before its n-th call, the simulated disk draws states that a power cut at that moment may leave, and a process recovers
from each. Changes that no traced call explains are named, and the layer then passes nothing: stores into mapped memory,
writes through io_uring, files above `SIZE_MAX`, links to other places.

Each write since the last sync of a file may be lost, independently of the others, and the last one that is there may be
cut at any byte; bytes below its end that never reached the disk read as zeros. A name that was created, changed or
removed is durable after the next sync of the directory; unless the file was synced before, a renamed one may have none
or part of its bytes. In the terms of LazyFS and ALICE: a torn write, a lost write, reordered writes, a missing sync of
the directory, a rename before its data.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.kills import CallKill, CallTracer
from ackstate.analysis.crash.process import subject_launch
from ackstate.analysis.crash.runs import Crash, CrashTiming, ProcessLayer, RunSize, scratch_directory
from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.process import Subject, SubjectProcess


_TORN_SHARE = 0.3  # of the states


class CallKind(Enum):
    """The kinds of calls."""

    CREATE = "create"
    WRITE = "write"
    TRUNCATE = "truncate"
    SYNC = "sync"
    RENAME = "rename"
    LINK = "link"
    REMOVE = "remove"
    SYNC_DIRECTORY = "sync the directory"


class DiskCall(NamedTuple):
    """One call that changed the disk or made data durable."""

    kind: CallKind  # The kind of the call
    # The file's path in the directory at that time; a subdirectory ends with a slash. SYNC_DIRECTORY: the synced one,
    # without a slash, empty for the directory itself.
    name: str = ""
    file_number: int = -1  # The number of the file, independent of its name and never reused. -1 for the directory
    offset: int = 0  # WRITE: the start of the data. TRUNCATE: the new size
    data: bytes = b""  # WRITE: the written data
    new_name: str = ""  # RENAME, LINK: the name after it

    def __str__(self) -> str:
        match self.kind:
            case CallKind.WRITE:
                return f"write bytes {self.offset} to {self.offset + len(self.data)} of {self.name}"
            case CallKind.TRUNCATE:
                return f"truncate {self.name} to {self.offset} bytes"
            case CallKind.RENAME | CallKind.LINK:
                return f"{self.kind.value} {self.name} to {self.new_name}"
        return f"{self.kind.value} {self.name}".rstrip()


@dataclass(slots=True)
class _File:
    """The durable content of one file, its present one, and the calls between them."""

    certain: bytes
    whole: bytes
    changes: list[DiskCall] = field(default_factory=list)


@final
class DiskHistory:
    """Follows the calls on a directory, and separates durable from unsynced data; `start` is its content at first."""

    def __init__(self, start: Mapping[str, bytes]) -> None:
        self._files = {number: _File(content, content) for number, content in enumerate(start.values())}
        self._names = {name: number for number, name in enumerate(start)}  # the durable ones
        self._unsynced: list[DiskCall] = []
        self._calls: list[DiskCall] = []

    def follow(self, call: DiskCall) -> None:
        """Process the next call."""
        self._calls.append(call)
        match call.kind:
            case CallKind.WRITE | CallKind.TRUNCATE:
                file = self._files[call.file_number]
                file.whole = _changed(file.whole, call)
                file.changes.append(call)
            case CallKind.SYNC:
                whole = self._files[call.file_number].whole
                self._files[call.file_number] = _File(whole, whole)
            case CallKind.SYNC_DIRECTORY:
                # A rename between directories is durable with either of them.
                synced = {each.file_number for each in self._unsynced if call.name in _parents(each)}
                committed = [each for each in self._unsynced if each.file_number in synced]
                self._names = _listed(self._names, committed)
                self._unsynced = [each for each in self._unsynced if each.file_number not in synced]
            case _:
                if call.kind is CallKind.CREATE:
                    self._files[call.file_number] = _File(b"", b"")
                self._unsynced.append(call)

    def whole(self) -> dict[str, bytes]:
        """Return the names and bytes without any loss."""
        return {name: self._files[number].whole for name, number in _listed(self._names, self._unsynced).items()}

    def drawn(self, chance: Random) -> tuple[dict[str, bytes], list[str]]:
        """Return the names and bytes of a state at random, and each loss as text, in the order of the calls."""
        kept = _drawn(len(self._unsynced), chance)
        lost = {id(call): "" for index, call in enumerate(self._unsynced) if index not in kept}
        names = _listed(self._names, [self._unsynced[index] for index in kept])
        contents = {number: _drawn_bytes(self._files[number], chance, lost) for number in sorted(set(names.values()))}
        losses = [_loss_line(call, lost[id(call)]) for call in self._calls if id(call) in lost]
        return {name: contents[number] for name, number in names.items()}, losses


def _drawn_bytes(file: _File, chance: Random, lost: dict[int, str]) -> bytes:
    """Return one of the possible contents at random; add the lost calls by `id`, with the part that is there."""
    kept, content = _drawn(len(file.changes), chance), file.certain
    lost.update({id(call): "" for index, call in enumerate(file.changes) if index not in kept})
    for index in kept:
        call, size = file.changes[index], len(file.changes[index].data)
        if index == kept[-1] and size > 1 and chance.random() < _TORN_SHARE:
            arrived = chance.randrange(1, size)
            lost[id(call)] = f", but the first {arrived}"
            call = call._replace(data=call.data[:arrived])
        content = _changed(content, call)
    return content


def _changed(content: bytes, call: DiskCall) -> bytes:
    """Return the content of a file after a call; lost data below it is a hole of zeros."""
    before = content[: call.offset].ljust(call.offset, b"\0")
    if call.kind is CallKind.TRUNCATE:
        return before
    return before + call.data + content[call.offset + len(call.data) :]


def _listed(names: Mapping[str, int], calls: Iterable[DiskCall]) -> dict[str, int]:
    """Return the names in a directory after calls, if some of the earlier calls were lost."""
    listed = dict(names)
    for call in calls:
        if call.kind is CallKind.CREATE:
            listed[call.name] = call.file_number
            continue
        if call.kind is not CallKind.LINK and listed.get(call.name) == call.file_number:
            del listed[call.name]
        if call.new_name:
            listed[call.new_name] = call.file_number
    return listed


def parent(name: str) -> str:
    """Return the path of the directory of a name, without a slash at its end."""
    return name.rstrip("/").rpartition("/")[0]


def _parents(call: DiskCall) -> set[str]:
    return {parent(name) for name in (call.name, call.new_name) if name}


def _loss_line(call: DiskCall, arrived: str) -> str:
    if call.kind in {CallKind.WRITE, CallKind.TRUNCATE}:
        return f"the disk lost: {call}{arrived} (the file was not synced after that)"
    directory = " or ".join(sorted(f"directory {name or '.'}" for name in _parents(call)))
    return f"the disk lost: {call} (the {directory} was not synced after that)"


def _drawn(count: int, chance: Random) -> Sequence[int]:
    """Return a set of the indexes below a count, in order; often none, all, or the first."""
    toss = chance.random()
    if toss < 0.35:
        return ()
    if toss < 0.75:
        return range(count if toss < 0.55 else chance.randint(0, count))
    return [index for index in range(count) if chance.random() < 0.5]


SIZE_MAX = 16 * 1024 * 1024
"""The bytes of the largest file that is followed."""
_SIZE = RunSize(lives=12, operations=24)
_STATES = 4  # drawn after each crash

# The index of the argument with the descriptor of the changed file.
_DESCRIPTOR_OF = {
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate", "sendfile"), 0),
    **dict.fromkeys(("fsync", "fdatasync", "syncfs"), 0),
    **dict.fromkeys(("copy_file_range", "splice"), 2),
    "mmap": 4,
}
_SYNCS = frozenset({"fsync", "fdatasync"})
_NAMING = frozenset(
    {
        *("open", "openat", "openat2", "creat", "rename", "renameat", "renameat2", "link", "linkat", "symlink"),
        *("symlinkat", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
    }
)
_OPENS = frozenset({"open", "openat", "openat2", "creat"})
_ANYWHERE = frozenset({"truncate", "io_submit", "io_uring_enter"})
_RWF_SYNCS = 2 | 4  # RWF_DSYNC, RWF_SYNC
_PROT_WRITE = 2


class _Pending(NamedTuple):
    """A call that a thread has begun."""

    name: str
    arguments: Sequence[int]
    file_number: int | None  # of the followed file that its descriptor refers to
    directory: str | None  # of the subdirectory that its descriptor refers to


@final
class DiskRecorder:
    """Logs the changes of a directory, call by call; used by the tracer, which may be killed at any time."""

    def __init__(self, directory: Path, log: Path) -> None:
        self._directory = directory
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._names: dict[str, int] = {}
        self._contents = dict(enumerate(snapshot(directory).values()))
        self._number_of: dict[int, int] = {}  # by inode
        self._next_number = len(self._contents)
        for number, (name, inode) in enumerate(sorted(self._scan().items())):
            self._names[name], self._number_of[inode] = inode, number
        self._pending: dict[int, _Pending] = {}

    def entered(self, thread: int, name: str, arguments: Sequence[int]) -> bool:
        """Note that a thread begins a call; return whether `left` is due after it."""
        number = directory = None
        if (index := _DESCRIPTOR_OF.get(name)) is not None:
            descriptor = ctypes.c_int(arguments[index]).value
            try:
                inode, mode = _inode_of(f"/proc/{thread}/fd/{descriptor}")
            except OSError:
                return False
            number = self._number_of.get(inode)
            if stat.S_ISDIR(mode):
                directory = "" if inode == self._directory.stat().st_ino else self._name_of(inode)
            if name != "syncfs" and number is None and directory is None:
                return False
        elif name not in _NAMING | _ANYWHERE | {"sync"}:
            return False
        if name == "mmap":
            if number is not None and arguments[2] & _PROT_WRITE:
                self._unseen(f"{self._shown(number)} is mapped into memory for writing")
            return False
        if number is not None:
            if all(each.file_number != number for each in self._pending.values()):
                self._compare(number, is_explained=False)
            self._write(("begun", number))
        self._pending[thread] = _Pending(name, arguments, number, directory)
        return True

    def left(self, thread: int, result: int) -> None:
        """Log the changes of the call that a thread has ended."""
        if (call := self._pending.pop(thread, None)) is None:
            return
        with suppress(OSError):
            self._changed(thread, call, result)
        if call.file_number is not None:
            self._write(("ended", call.file_number))

    def _changed(self, thread: int, call: _Pending, result: int) -> None:
        name, number = call.name, call.file_number
        if name in _NAMING:
            self._compare_names()
            if name in _OPENS and result >= 0:
                number = self._number_of.get(_inode_of(f"/proc/{thread}/fd/{result}")[0])
        if name in {"sync", "syncfs"}:
            if result >= 0:
                self._sync_everything()
        elif name in _SYNCS:
            if result >= 0:
                self._synced(number, call.directory)
        elif name in _ANYWHERE:
            for each in list(self._contents):
                self._compare(each)
        elif number is not None:
            self._compare(number)
            is_sync = name == "pwritev2" and call.arguments[5] & _RWF_SYNCS
            if name in _DESCRIPTOR_OF and (is_sync or _opened_to_sync(thread, call.arguments[_DESCRIPTOR_OF[name]])):
                self._synced(number, None)

    def _synced(self, number: int | None, directory: str | None) -> None:
        if directory is not None:
            self._write(DiskCall(CallKind.SYNC_DIRECTORY, directory))
        elif number is not None:
            self._compare(number)
            self._write(DiskCall(CallKind.SYNC, self._name_of_number(number), number))

    def _sync_everything(self) -> None:
        for number in list(self._contents):
            self._synced(number, None)
        for directory in {parent(name) for name in self._names} | {""}:
            self._synced(None, directory)

    def _compare_names(self) -> None:
        """Log the names that were created, changed and removed since the last comparison."""
        before, now = self._names, self._scan()
        self._names = now
        moved = {inode: name for name, inode in before.items() if now.get(name) != inode}
        for name, inode in sorted(now.items()):
            if before.get(name) == inode:
                continue
            number = self._number_of.get(inode)
            if number is None:
                number, self._next_number = self._next_number, self._next_number + 1
                self._number_of[inode], self._contents[number] = number, b""
                self._write(DiskCall(CallKind.CREATE, name, number))
                self._compare(number)
            elif (old := moved.pop(inode, None)) is not None:
                self._write(DiskCall(CallKind.RENAME, old, number, new_name=name))
                if name.endswith("/"):
                    self._unseen(f"the directory {printable(old)} was renamed")
            else:
                old = next(each for each, its in [*before.items(), *now.items()] if its == inode and each != name)
                self._write(DiskCall(CallKind.LINK, old, number, new_name=name))
        for name, inode in before.items():
            if name not in now and moved.get(inode) == name:
                self._write(DiskCall(CallKind.REMOVE, name, self._number_of[inode]))
        for inode in set(before.values()) - set(now.values()):  # may be used again
            self._contents.pop(self._number_of.pop(inode), None)

    def _compare(self, number: int, *, is_explained: bool = True) -> None:
        """Log how the bytes of a file differ from those known."""
        name = self._name_of_number(number)
        if not name or name.endswith("/"):
            return
        before, now = self._contents[number], _read(self._directory / name)
        if now is None:
            self._unseen(f"{printable(name)} is larger than {SIZE_MAX >> 20} MiB")
        elif now != before:
            if not is_explained:
                self._unseen(f"{printable(name)} was changed by no call that is traced")
            for call in _differences(name, number, before, now):
                self._write(call)
            self._contents[number] = now

    def _scan(self) -> dict[str, int]:
        names = {}
        for name, entry in _entries(self._directory):
            if entry.is_symlink():
                self._unseen(f"{printable(name)} is a symbolic link")
            else:
                names[name] = entry.inode()
        return names

    def _name_of(self, inode: int) -> str | None:
        return next((name.rstrip("/") for name, its in self._names.items() if its == inode), None)

    def _name_of_number(self, number: int) -> str:
        return next((name for name, inode in self._names.items() if self._number_of.get(inode) == number), "")

    def _shown(self, number: int) -> str:
        return printable(self._name_of_number(number))

    def _unseen(self, what: str) -> None:
        self._write(("unseen", what))

    def _write(self, record: object) -> None:
        os.write(self._log, pickle.dumps(record))


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return the files below a directory by path, sorted; a subdirectory ends with a slash and is empty."""
    found = {}
    for name, entry in sorted(_entries(directory)):
        if not entry.is_symlink():
            found[name] = b"" if name.endswith("/") else _read(directory / name) or b""
    return found


def losses(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Return what a disk lost, bytes before names, as they would have had to be synced; from two snapshots."""
    lines = []
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            first, end = _equal_prefix(before[name], after[name]), max(len(before[name]), len(after[name]))
            lines.append(f"the disk lost: bytes {first} to {end} of {name} (the file was not synced after that)")
    unsynced = "(its directory was not synced after that)"
    lines += [f"the disk lost: the name {name} {unsynced}" for name in before.keys() - after.keys()]
    lines += [f"the disk lost: the removal of {name} {unsynced}" for name in after.keys() - before.keys()]
    return [printable(line) for line in sorted(lines, key=lambda line: "(its" in line)]


def _entries(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files, subdirectories and links below a directory; pipes and sockets are not kept by a disk."""
    try:
        entries = list(os.scandir(directory / prefix))
    except FileNotFoundError:  # removed by another thread
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield f"{prefix}{entry.name}/", entry
            yield from _entries(directory, f"{prefix}{entry.name}/")
        elif entry.is_symlink() or entry.is_file():
            yield f"{prefix}{entry.name}", entry


def _read(path: Path) -> bytes | None:
    """Return the bytes of a file; None if there are too many."""
    with suppress(FileNotFoundError):
        return path.read_bytes() if path.stat().st_size <= SIZE_MAX else None
    return b""


def _inode_of(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 - of a descriptor
    return found.st_ino, found.st_mode


def _opened_to_sync(thread: int, descriptor: int) -> bool:
    for line in Path(f"/proc/{thread}/fdinfo/{ctypes.c_int(descriptor).value}").read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & os.O_DSYNC)
    return False


def _differences(name: str, number: int, before: bytes, now: bytes) -> Iterator[DiskCall]:
    """Yield the calls that turn some bytes into others: one that cuts, and one that writes the changed range."""
    if len(now) < len(before):
        before = before[: len(now)]
        yield DiskCall(CallKind.TRUNCATE, name, number, len(now))
    first = _equal_prefix(before, now)
    if first == len(now):
        return
    end = len(now)
    if len(now) == len(before):
        end -= _equal_prefix(before[:first:-1], now[:first:-1])
    yield DiskCall(CallKind.WRITE, name, number, first, now[first:end])


def _equal_prefix(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@final
class TracedPowerCut(Crash):
    """A cut before each traced call in turn, in random order, and the states that it may leave."""

    def __init__(self, tracer: CallTracer, chance: Random, directory: Path, log: Path) -> None:
        self._kill, self._tracer = CallKill(tracer, chance), tracer
        self._chance, self._directory, self._log = chance, directory, log
        self._lost: list[str] = []
        self._states: list[tuple[dict[str, bytes], list[str]]] = []
        self.unseen: set[str] = set()
        self._begin()

    def prepare(self) -> None:
        self._begin()
        self._kill.prepare()

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """See `Crash`; all output counts, because the log has every call that ended before it was written."""
        try:
            return self._kill(process)
        finally:
            history = self._followed()
            drawn = [history.drawn(self._chance) for _ in range(_STATES)]
            self._states = [
                each for index, each in enumerate(drawn) if each[0] not in [its for its, _ in drawn[:index]]
            ]
            self.next_state()

    @property
    def states_left(self) -> int:
        return len(self._states)

    def next_state(self) -> None:
        files, self._lost = self._states.pop()
        _lay(self._directory, files)
        self._begin()

    def __str__(self) -> str:
        how = str(self._kill).replace("SIGKILL", "the power is cut")
        return "\n".join([how, *(printable(line) for line in self._lost or ["the disk lost nothing"])])

    def _begin(self) -> None:
        """Follow the next process, from the present content of the directory."""
        self._start = snapshot(self._directory)
        self._log.write_bytes(b"")
        self._tracer.make_recorder = lambda: DiskRecorder(self._directory, self._log)

    def _followed(self) -> DiskHistory:
        history, begun = DiskHistory(self._start), []
        with self._log.open("rb") as log, suppress(EOFError, pickle.UnpicklingError):
            while True:
                match pickle.load(log):  # noqa: S301 - our own
                    case ("unseen", what):
                        self.unseen.add(what)
                    case ("begun", number):
                        begun.append(number)
                    case ("ended", number):
                        begun.remove(number)
                    case call:
                        history.follow(call)
        # A process that was killed within a call may have done a part of it.
        if not begun:
            now, known = snapshot(self._directory), history.whole()
            for name in sorted(now.keys() & known.keys()):
                if now[name] != known[name]:
                    self.unseen.add(f"{printable(name)} was changed by no call that is traced")
        return history


def _lay(directory: Path, files: dict[str, bytes]) -> None:
    """Make a directory hold these files; one without its subdirectory is lost."""
    for each in directory.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    for name, content in sorted(files.items()):
        path = directory / name
        if not path.parent.is_dir():
            continue
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_bytes(content)


def traced_cuts(first_seed: int, *, subject: Subject, shrink_tries: int = 24) -> Generator[RunOutcome]:
    """Run L6."""
    tracer = CallTracer()

    @contextmanager
    def stage(chance: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory("traced-cuts") as scratch:
            directory = scratch / "subject"
            directory.mkdir()
            yield directory, TracedPowerCut(tracer, chance, directory, scratch / "calls")

    layer = ProcessLayer(
        name="traced cuts",
        launches=[subject_launch(subject, tracer=tracer)],
        stage=stage,
        size=_SIZE,
        timing=CrashTiming(early_s=None),
        shrink_tries=shrink_tries,
    )
    return layer(first_seed)
