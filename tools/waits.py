"""Waits that end."""
import asyncio
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, late):
    """Calls late() once a block has taken so long, in Python or in a wait; only in the main thread, elsewhere never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    older = signal.signal(signal.SIGALRM, lambda *_: late())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, older)


class Patience:
    """Waits for answers. Whoever gives none for `seconds`, though somebody waits for one, counts as dead.

    So a long queue is no reason to give up, and one request may take longer than that as long as others return.
    """

    def __init__(self, seconds: float, flag: str):
        self.seconds, self.flag = seconds, flag             # which flag says how many
        self.heard, self.tasks = Counter(), {}              # by name: the last answer's time, what is open

    async def wait(self, name: str, call):
        """The result of an awaitable that `name` has to answer. Raises TimeoutError if it is silent too long."""
        task, start = asyncio.ensure_future(call), time.monotonic()
        self.tasks.setdefault(name, set()).add(task)
        task.add_done_callback(self.tasks[name].discard)
        while not task.done():
            left = max(start, self.heard[name]) + self.seconds - time.monotonic()
            await asyncio.wait({task}, timeout=max(left, 0))        # at least once: the loop itself may have been busy
            if left <= 0 and not task.done():
                task.cancel()
                raise TimeoutError(f"{name} was silent for {self.seconds:g} s ({self.flag})")
        if task.cancelled():
            raise ConnectionError(f"{name} was given up")
        self.heard[name] = time.monotonic()
        return task.result()

    def give_up(self, name: str):
        """Ends every wait for `name`, with a ConnectionError. To be called on the loop."""
        for task in list(self.tasks.get(name, ())):
            task.cancel()
