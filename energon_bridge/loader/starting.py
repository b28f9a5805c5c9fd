"""Starting worker processes so that they end with the training process, and with nobody else.

Workers are bound to whoever starts them by PR_SET_PDEATHSIG, which is to say to the *thread* that does. So they are
started by the main thread, or by one thread of this module that lives as long as the process.

A fork of the training process has copies of its workers' process objects. Multiprocessing would end their processes
when such a fork ends; here they are what they are in the process that started them only.
"""

from __future__ import annotations

import contextvars
import gc
import multiprocessing.forkserver
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, Literal

StartMethod = Literal["fork", "forkserver", "spawn"]


class _OfThisProcess:
    """Makes a process object of multiprocessing one that has no effect in forks of the process that started it."""

    _started_by = 0

    def start(self) -> None:
        self._started_by = os.getpid()
        super().start()  # type: ignore[misc]

    @property
    def daemon(self) -> bool:
        """Whether it is to be terminated when this process ends."""
        return self._started_by in (0, os.getpid()) and bool(super().daemon)  # type: ignore[misc]

    @daemon.setter
    def daemon(self, value: bool) -> None:
        BaseProcess.daemon.fset(self, value)  # type: ignore[attr-defined]

    def join(self, timeout: float | None = None) -> None:
        if self._started_by == os.getpid():
            super().join(timeout)  # type: ignore[misc]


class ForkedWorker(_OfThisProcess, ForkProcess):
    """A worker that is a copy of this process."""


class ServedWorker(_OfThisProcess, ForkServerProcess):
    """A worker that a process without threads has forked."""


class SpawnedWorker(_OfThisProcess, SpawnProcess):
    """A worker that is an interpreter of its own."""


_KINDS: dict[str, Any] = {"fork": ForkedWorker, "forkserver": ServedWorker, "spawn": SpawnedWorker}
_FORKSERVER_TRIES, _FORKSERVER_PAUSE_SECONDS = 20, 0.05
"""The forkserver ends when a client breaks off, for example one that has no descriptors left."""
_starting = threading.Lock()
_calls: queue.SimpleQueue[tuple[contextvars.Context, Callable[[], None], Future[None]]] | None = None


def start_process(method: StartMethod, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Start a process that runs a function, and return what multiprocessing knows of it."""
    process = _KINDS[method](target=target, args=arguments, name=name, daemon=True)

    def start() -> None:
        # An interrupt while it starts must not reach it before it ignores it; this process gets it afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        collecting = gc.isenabled()
        gc.disable()  # the fork must not destroy this process's garbage; `set_up_worker` turns it on again
        try:
            _start(process)
        finally:
            if collecting:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    if threading.current_thread() is threading.main_thread():
        start()
    else:
        _by_the_lasting_thread(start)
    return process


def _start(process: Any) -> None:
    """Start a process; where the forkserver is about to end, wait for that, and multiprocessing starts another one."""
    for _ in range(_FORKSERVER_TRIES):
        try:
            process.start()
            return
        except (ConnectionError, EOFError):
            time.sleep(_FORKSERVER_PAUSE_SECONDS)
    process.start()


def _by_the_lasting_thread(call: Callable[[], None]) -> None:
    """Have a function called by a thread that ends with the process only; raise what it raises."""
    global _calls
    with _starting:
        if _calls is None:
            _calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(_calls,), name="energon-starter", daemon=True).start()
    done: Future[None] = Future()
    _calls.put((contextvars.copy_context(), call, done))
    done.result()


def _serve(calls: queue.SimpleQueue[tuple[contextvars.Context, Callable[[], None], Future[None]]]) -> None:
    while True:
        context, call, done = calls.get()
        try:
            context.run(call)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del context, call, done


def _begin_anew() -> None:
    """Forget, in a fork, what serves the process that it was forked from: its starting thread and its forkserver."""
    global _calls, _starting
    _calls, _starting = None, threading.Lock()
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]  # its server is no child of ours


def _leave_scalers_behind() -> None:
    """Drop what PyAV keeps per thread for `VideoFrame.reformat` (from PyAV 19 on), so that no fork inherits it.

    A scaler of FFmpeg owns threads. A fork has the scaler without its threads, and waits for them for ever: when it
    scales a frame, or when Python destroys there what belonged to other threads. PyAV makes a new one when it needs it.
    """
    frames: Any = sys.modules.get("av.video.frame")
    if frames is not None and hasattr(frames, "_thread_local"):
        frames._thread_local = threading.local()  # a thread that is scaling now holds its own scaler


os.register_at_fork(before=_leave_scalers_behind, after_in_child=_begin_anew)
