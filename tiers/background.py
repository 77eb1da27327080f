"""Work in a thread of its own that can be waited for at any time, also after Ctrl-C has cut its start or a wait for it."""

import threading
from collections.abc import Callable


class Background:
    """``error``: why the work failed, once it is over."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.error: Exception | None = None
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._over = threading.Event()  # a join that Ctrl-C has cut takes the thread for ended ever after
        self._thread: threading.Thread | None = None  # the one that does it

    @property
    def over(self) -> bool:
        """Whether it has ended, however."""
        return self._over.is_set()

    def start(self) -> None:
        """Begin."""
        # Not a daemon: an interpreter that ends waits for it.
        threading.Thread(target=self._run, name=self._name).start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over after so many seconds, however it ended. Where Ctrl-C cut ``start`` it is begun here."""
        if self._thread is None:
            self.start()
        return self._over.wait(timeout)

    def _run(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for it
            self.error = error
        finally:
            self._over.set()
