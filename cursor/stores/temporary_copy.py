"""Where does the copy of a store lie, and who removes it?"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from typing import TYPE_CHECKING, final

from cursor.stores.directory_lock import leave_to_parent_at_fork

if TYPE_CHECKING:
    from pathlib import Path


@final
class TemporaryCopy:
    """A new directory among those for temporary files, removed with this, or at the end of the process that made it.

    Args:
        directory: What is to be copied; the name of the copy tells of it.

    Attributes:
        name: Its path.
    """

    def __init__(self, directory: Path) -> None:
        self.name = tempfile.mkdtemp(prefix=f"copy-of-{directory.absolute().name[:40]}-")
        self._remove = weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)
        leave_to_parent_at_fork(self)

    def cleanup(self) -> None:
        """Remove it with all that it holds; doing it twice, or in a forked child, does nothing."""
        self._remove()

    def leave_to_parent(self) -> None:
        """See `cursor.stores.directory_lock.Opened`."""
        self._remove.detach()
