"""Locations of files and directories: a local path, or a URL of a file system or object store elsewhere.

Files are written atomically, by rename or in a store. No link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TypeAlias, final
from uuid import uuid4

from ackstate.checks import did_you_mean
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterator


SCHEMES = ("abfs", "abfss", "file", "gs", "hdfs", "s3", "s3a")
_AZURE = frozenset(("abfs", "abfss"))
_S3 = frozenset(("s3", "s3a"))
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)
_HOST_AND_PORT = re.compile(r"([^:]+):(\d+)")
_CONNECT_SECONDS = 5.0
_COPY_BYTES = 8 << 20
# Messages of the S3 client.
_S3_ERROR = re.compile(r"AWS Error (\w+)(?: \([^)]*\))? during \w+ operation: (.*)")
_S3_REASONS = {
    "ACCESS_DENIED": (errno.EACCES, "access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "INVALID_ACCESS_KEY_ID": (errno.EACCES, "access denied: AWS_ACCESS_KEY_ID is unknown there"),
    "SIGNATURE_DOES_NOT_MATCH": (errno.EACCES, "access denied: AWS_SECRET_ACCESS_KEY is wrong"),
    "NO_SUCH_BUCKET": (errno.ENOENT, "no such bucket"),
}


class LocationError(AckStateError):
    """A URL that is not supported, or whose store needs a package that is not installed."""


class LocationStatus(NamedTuple):
    """The status of a location in a store."""

    is_dir: bool  # Whether it is a directory
    st_size: int  # Bytes of a file; 0 for a directory


@final
@dataclass(frozen=True, order=True)
class StorePath:
    """A file or directory behind a URL, with the part of `pathlib.Path` that is used here.

    Any method may raise OSError with the URL and a reason of one line. A file of an object store appears when it is
    closed; a file of HDFS appears, empty, when it is opened.
    """

    scheme: str  # One of `SCHEMES`, except ``file``
    authority: str  # Bucket, name node or container and account
    parts: tuple[str, ...]  # Names from the root down; none for the root
    # The status from a listing; None to request it.
    listed: LocationStatus | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}/{'/'.join(self.parts)}"

    def __truediv__(self, names: str) -> StorePath:
        return StorePath(self.scheme, self.authority, (*self.parts, *filter(None, names.split("/"))))

    @property
    def name(self) -> str:
        """The last name; empty for the root."""
        return self.parts[-1] if self.parts else ""

    @property
    def parent(self) -> StorePath:
        """The directory that it is in; the root is in itself."""
        return StorePath(self.scheme, self.authority, self.parts[:-1])

    def with_name(self, name: str) -> StorePath:
        """Return the location of another name in the same directory."""
        return self.parent / name

    def absolute(self) -> StorePath:
        """Return itself: a URL depends on no current directory."""
        return self

    def is_symlink(self) -> bool:
        """Return False: links are followed, if the store has any."""
        return False

    def exists(self) -> bool:
        """Return whether there is a file or directory; checked now, even if a listing reported it."""
        return replace(self, listed=None)._status() is not None

    def is_dir(self) -> bool:
        """Return whether it is a directory; in an object store, whether a file is below it."""
        status = self._status()
        return status is not None and status.is_dir

    def is_file(self) -> bool:
        """Return whether it is a file."""
        status = self._status()
        return status is not None and not status.is_dir

    def stat(self) -> LocationStatus:
        """Return the status; raise FileNotFoundError if nothing is there."""
        status = self._status()
        if status is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(self))
        return status

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the entries of the directory, in any order."""
        from pyarrow.fs import FileSelector

        with self.reasons():
            system, path = self._place()
            found = system.get_file_info(FileSelector(path))
        for info in found:
            below = info.path.strip("/").removeprefix(path.strip("/")).strip("/")
            # An object may mark the directory itself.
            if below:
                yield StorePath(self.scheme, self.authority, (self / below).parts, _status_of(info))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Yield the entries of the directory whose names match an `fnmatch` pattern; none if there is no directory."""
        return (each for each in self.iterdir() if fnmatchcase(each.name, pattern)) if self.is_dir() else iter(())

    def open(self, mode: Literal["rb", "wb"] = "rb") -> Any:
        """Open the file, as `pyarrow.NativeFile`; writing replaces an existing file."""
        with self.reasons():
            system, path = self._place()
            return system.open_input_file(path) if mode == "rb" else system.open_output_stream(path)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the file."""
        with self.open() as source, self.reasons():
            data: bytes = source.read()
        return data.decode(encoding)

    def put(self, file: Path) -> None:
        """Copy a local file there atomically, replacing an existing one."""
        if self.scheme != "hdfs":
            self._copy(file)
            return
        # It would be visible before it is complete.
        unfinished = self.with_name(f".{self.name}.{uuid4().hex}")
        try:
            unfinished._copy(file)
            with self.reasons():
                system, path = self._place()
                system.handler.fs.client.rename(unfinished._place()[1], path, overwrite=True)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete the file."""
        with self.reasons(), suppress(*((FileNotFoundError,) if missing_ok else ())):
            system, path = self._place()
            system.delete_file(path)

    def named(self, error: Exception) -> OSError:
        """Convert an error of a store's client into an OSError with a reason, and the URL unless it names a file."""
        if isinstance(error, OSError) and error.filename:
            return error
        return _os_error(error, str(self))

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Convert errors of a store's client into OSErrors with the URL and a reason."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            raise self.named(error) from error

    def _status(self) -> LocationStatus | None:
        if self.listed is not None:
            return self.listed
        with self.reasons():
            system, path = self._place()
            return _status_of(system.get_file_info(path))

    def _copy(self, file: Path) -> None:
        with self.reasons(), file.open("rb") as source, self.open("wb") as sink:
            shutil.copyfileobj(source, sink, _COPY_BYTES)

    def _place(self) -> tuple[Any, str]:
        """Return the file system, and the path in it."""
        system, root = _file_system(self.scheme, self.authority)
        return system, "/".join((root, *self.parts)) or "/"


Location: TypeAlias = Path | StorePath


def location(text: str) -> Location:
    """Return the location that a text names: a URL if it starts with a scheme (``s3a://``), else a local path.

    A URL is taken as Hadoop takes it: ``%20`` in it is three characters of a name. ``file:///x`` is a local path.
    """
    if not text:
        raise LocationError("must not be empty")
    url = _URL.fullmatch(text)
    if url is None:
        return Path(text)
    scheme, authority, path = url[1].lower(), url[2], url[3]
    if scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise LocationError(f"unknown scheme {scheme!r}, known: {known}{did_you_mean(scheme, SCHEMES)}")
    user, at, host = authority.rpartition("@")
    if at and (scheme not in _AZURE or ":" in user):
        raise LocationError(f"{scheme}://...@{host}{path}: a URL must not have a user or a password")
    if any(sign in path for sign in "?#") or not path.isprintable():
        raise LocationError(f"{scheme}://{authority}{path!r}: a URL must not have a query or control characters")
    if scheme == "file":
        if authority not in {"", "localhost"} or not path:
            raise LocationError(f"{text}: a local file is file:///PATH")
        return Path(path)
    if scheme in _AZURE and not (user and "." in host):
        raise LocationError(f"{text}: {scheme}:// needs CONTAINER@ACCOUNT.dfs.core.windows.net after it")
    if not authority:
        raise LocationError(f"{text}: {scheme}:// needs a {'name node' if scheme == 'hdfs' else 'bucket'} after it")
    parts = tuple(filter(None, path.split("/")))
    if not {".", ".."}.isdisjoint(parts):
        raise LocationError(f"{text}: a URL must not contain '.' or '..' as a name")
    return StorePath(scheme, authority, parts)


def spark_url(place: Location) -> str:
    """Return a location for Spark."""
    if isinstance(place, Path):
        return f"file://{place.absolute()}"
    # Hadoop's client of S3 has its own name.
    return str(StorePath("s3a" if place.scheme in _S3 else place.scheme, place.authority, place.parts))


@cache
def _file_system(scheme: str, authority: str) -> tuple[Any, str]:
    """Return a store as `pyarrow.fs.FileSystem`, and the path of its root in it."""
    from pyarrow import fs

    if scheme == "hdfs":
        return _hdfs(authority), ""
    if scheme in _S3:
        endpoint = next(filter(None, map(os.environ.get, _S3_ENDPOINTS)), None)
        return fs.S3FileSystem(endpoint_override=endpoint, allow_delayed_open=True), authority
    system, root = fs.FileSystem.from_uri(f"{scheme}://{authority}/")
    return system, root.strip("/")


def _hdfs(authority: str) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError as error:
        raise LocationError(f"hdfs:// needs a client, install ackstate[hdfs]: {error}") from None
    address = _HOST_AND_PORT.fullmatch(authority)
    if address is None:
        return PyFileSystem(FSSpecHandler(HdfsFileSystem(authority, skip_instance_cache=True)))
    # The client would otherwise retry for three minutes.
    socket.create_connection((address[1], int(address[2])), timeout=_CONNECT_SECONDS).close()
    # fsspec's cache is cleared in a forked process: it lacks the threads that a client joins when it closes.
    client = HdfsFileSystem(address[1], int(address[2]), skip_instance_cache=True)
    return PyFileSystem(FSSpecHandler(client))


def _status_of(info: Any) -> LocationStatus | None:
    from pyarrow.fs import FileType

    if info.type == FileType.NotFound:
        return None
    return LocationStatus(info.type == FileType.Directory, info.size or 0)


def _os_error(error: Exception, url: str) -> OSError:
    """Return an error with a number, a reason in a line and a URL; a number makes it FileNotFoundError and the like."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    from_s3 = _S3_ERROR.search(said)
    if from_s3 is None:
        reason = (error.strerror if isinstance(error, OSError) else None) or said
        if isinstance(error, FileNotFoundError):
            reason = "no such file or directory"
        return OSError(_number_of(error), reason, url)
    if from_s3[1] in _S3_REASONS:
        return OSError(*_S3_REASONS[from_s3[1]], url)
    return OSError(errno.EIO, f"{from_s3[1].lower().replace('_', ' ')}: {from_s3[2]}", url)


def _number_of(error: Exception) -> int:
    """Return the errno of an error, derived from its class if it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    numbers = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}
    return next((number for kind, number in numbers.items() if isinstance(error, kind)), errno.EIO)


@contextmanager
def atomic_write(path: Location) -> Iterator[Path]:
    """Yield a temporary local file, which replaces `path` when the block ends without an error.

    The temporary file is empty and newly created: an unfinished file of an earlier run, or a link in its place, is
    removed first, and no link is followed. A link at `path` itself is replaced, not followed.
    """
    if isinstance(path, StorePath):
        with TemporaryDirectory() as directory:
            yield Path(directory, path.name)
            path.put(Path(directory, path.name))
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        # A write that finds no room does not name the file, and Arrow does not always put a message in the usual place.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomically(path: Location, text: str) -> None:
    """Write a text file that exists either complete or not at all; raises as `atomic_write`."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def open_lock(path: Path) -> BinaryIO:
    """Open a file that is locked and never read, or create it; its bytes stay."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666), "rb")
