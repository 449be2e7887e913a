"""Ctrl-C at a clean place: held back while lines run that belong together.

Invariant: no Ctrl-C is lost. The first is raised at the end of the block, and every
further one at once, so what hangs can be stopped.

Only for Python's own handler, in the main thread, where signals arrive. Whoever has set
another handler (a program, asyncio, a block around this one) decides alone.

Called by `LLM`.

Source: appendix A7, "LLM".
"""

import signal
import threading
from types import FrameType


class HeldInterrupts:
    """A block, for `with`, that Ctrl-C does not cut in two.

    Cost:
        About 20 microseconds; next to nothing outside the main thread.
    """

    def __enter__(self) -> None:
        self._is_pressed = False
        self._is_holding = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_holding:
            signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self._is_pressed:
            self._let_go()
            signal.default_int_handler(number, frame)
        self._is_pressed = True

    def _let_go(self) -> None:
        self._is_holding = False
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_holding and signal.getsignal(signal.SIGINT) == self._press:
            self._let_go()  # else the block has set another handler, which stays
        if self._is_pressed and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt
