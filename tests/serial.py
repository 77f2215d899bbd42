"""An executor that runs each call at once, in the caller's thread: so many cursors write in one order."""

from concurrent.futures import Executor, Future


class SerialExecutor(Executor):
    """Calls each function when it is submitted."""

    def submit(self, call, /, *args, **named):
        future = Future()
        try:
            future.set_result(call(*args, **named))
        except BaseException as error:
            future.set_exception(error)
        return future
