"""Finds the subject given by a user, and starts it."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, TypeAlias

from ackstate.analysis.crash.serve import SUBJECTS, is_class_name, subject_class
from ackstate.analysis.crash.subject_process import SubjectProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.crash.call_tracer import CallTracer

Launch: TypeAlias = "Callable[[], SubjectProcess]"
"""Starts a subject in a new process."""


def subject_launch(text: str, *, tracer: CallTracer | None = None) -> Launch:
    """Return the launcher of the subject given by a user.

    Args:
        tracer: Kills it at a system call; None for processes that are not traced.
        text: ``ours``, ``ours-limited``, ``naive``, ``module:Class`` for a `CrashSubject` in Python,
            or a command line.

    Raises:
        ValueError: There is none of that name.
    """
    if is_class_name(text):
        make_subject = subject_class(text)
        return lambda: SubjectProcess.fork(make_subject, tracer=tracer)
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"subject {text!r}: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise ValueError(
            f"subject {text!r}: neither one of {', '.join(SUBJECTS)}, nor module:Class, nor the command of a program"
        )
    return lambda: SubjectProcess.spawn(command, tracer=tracer)
