"""An error for each promise that was seen broken."""


class PromiseBrokenError(AssertionError):
    """A promise was broken: what was found contradicts it, about a number of lost or invented entries."""

    def __init__(self, promise, found, *, entry_count=1):
        super().__init__(found)
        self.promise = promise
        self.found = found
        self.entry_count = entry_count


def hold(promise, is_kept, found):
    """Raise `PromiseBrokenError` unless a promise is kept."""
    if not is_kept:
        raise PromiseBrokenError(promise, found)
