"""Forked children: one that says something, one that fails or not, and one that only lives."""

import gc
import os
from contextlib import contextmanager, suppress


def in_child(function):
    # Else the child may collect garbage of earlier tests, such as a client whose threads it lacks, and wait for them.
    gc.collect()
    gc.freeze()  # All that is left is in use: the collection before the next fork need not traverse it again.
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def status_of_child(function):
    """Return the wait status of a child: 0 unless the function raises."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            function()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1]


@contextmanager
def living_child():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(pid, 0)
