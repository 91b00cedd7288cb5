"""Staying beside a server: it runs as a child that gets our signals and gives us its exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
JOIN_SECONDS = 2.0


def run_beside(launch: Sequence[str], beside: Callable[[threading.Event], None]) -> int:
    """Run a command, and ``beside`` in a thread meanwhile; returns the command's exit code, 128 + N after signal N.

    ``beside`` is given an event that is set once the command has ended. The command gets every signal of ``FORWARDED``
    that we get, and nothing else of us: it ends when it sees fit. Where there is Linux it gets SIGTERM, too, when we
    are gone without a word. Needs the main thread.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before = _take_over(forward)
    try:
        # A group of its own: an interrupt typed at the terminal reaches it once, through us.
        child = subprocess.Popen(  # noqa: S603 - the command line is ours
            list(launch), stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with(os.getpid())
        )
        for number in early:
            child.send_signal(number)
        over = threading.Event()
        companion = threading.Thread(target=_without_signals, args=(beside, over), daemon=True)
        companion.start()
        code = child.wait()
        over.set()
        companion.join(JOIN_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _take_over(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """The handlers that were there. What is ignored stays so, for the child as well (nohup)."""
    found: dict[int, Any] = {number: signal.getsignal(number) for number in FORWARDED}
    taken = {number: old for number, old in found.items() if old is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, handler)
    return taken


def _without_signals(beside: Callable[[threading.Event], None], over: threading.Event) -> None:
    """Signals are for the main thread, which waits for the child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    beside(over)


def _end_with(parent: int) -> Callable[[], None] | None:
    """What a child does before it becomes the command, so that it is told to end when ``parent`` was killed."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)

    def ask() -> None:
        library.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it went before we asked
            os._exit(128 + signal.SIGTERM)

    return ask
