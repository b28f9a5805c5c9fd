"""Worker processes: how they start, and the board on which each notes its progress, in memory shared with the trainer.

The worker writes them as it goes; the training process looks at them only when a batch does not come. So they can be
read of a worker that is stopped, that holds the interpreter lock in a call, or that is gone.

Layout, in words of 8 bytes: whether it has begun; CLOCK_MONOTONIC in ns when it began the current microbatch, 0 between
two; microbatches made and sent in this pass; messages of its own watchdog on the current microbatch; of a worker on
another machine, 1 if it has ended, or 1,000 plus its exit code; then `Activity.words` of the thread that runs hooks and
of those that load.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import functools
import gc
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Literal

from energon_bridge.core.encoder.hooks import Hook
from energon_bridge.core.errors import LoaderError
from energon_bridge.core.storage.forks import at_rest
from energon_bridge.core.stream.watchdog import HOOK, INDEX, LEAF, WORDS

BEGUN, SINCE, _MADE, SENT, _SAID, ENDED = range(6)
_FACTS = 6
_THREADS = 32
"""Loading threads whose work a worker reports to the watchdog; further ones are not reported."""
_BY_CODE = {hook.code: hook for hook in Hook}


class SharedMemory(mmap.mmap):
    """Memory that a worker shares with the training process, without a name that anything could leave behind.

    Forked workers have it anyway. To others it is sent as a file descriptor, for which it must be made `sendable`.
    """

    _file: int | None
    _owner: int
    _made: bool

    def fileno(self) -> int:
        """Return the descriptor by which another process maps it."""
        assert self._file is not None, "sendable"
        return self._file

    def __new__(cls, size: int, *, sendable: bool = False, file: int | None = None) -> SharedMemory:
        """Map `size` bytes, of the file if one is given."""
        made = file is None
        if sendable and file is None:
            file = os.memfd_create("energon-shared")
            os.ftruncate(file, size)
        self = super().__new__(cls, -1 if file is None else file, size)
        self._file = file
        self._owner = os.getpid()
        self._made = made
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self.fileno()), len(self))

    def __del__(
        self,
        process: Callable[[], int] = os.getpid,  # at the interpreter's end `os` may be gone
        close: Callable[[int], None] = os.close,
        remove: int | None = getattr(mmap, "MADV_REMOVE", None),
    ) -> None:
        if getattr(self, "_owner", None) != process():
            return
        if self._file is not None:
            close(self._file)
        # Workers that were forked later have it too, without using it: the pages go at once, not when they end.
        if self._made and remove is not None:
            self.madvise(remove)


def _attached(descriptor: Any, size: int) -> SharedMemory:
    return SharedMemory(size, file=descriptor.detach())


class StackFile:
    """A file without a name into which a worker writes the stacks of its threads when it gets a signal."""

    number = -1  # for `__del__`, if there is no descriptor left for the file

    def __init__(self, file: int | None = None) -> None:
        self.number = os.memfd_create("energon-stack") if file is None else file

    def __reduce__(self) -> tuple[Any, ...]:
        return _stack_file_of, (DupFd(self.number),)

    def read(self) -> str:
        """Return what has been written so far."""
        return os.pread(self.number, 1 << 16, 0).decode(errors="replace")

    def fileno(self) -> int:
        """Return its descriptor."""
        return self.number

    def close(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` may be gone
        """Close the file in this process."""
        number = self.number
        self.number = -1
        if number >= 0:
            close(number)

    __del__ = close


def _stack_file_of(descriptor: Any) -> StackFile:
    return StackFile(descriptor.detach())


class Board:
    """The words of one worker, in memory that others may map."""

    def __init__(self, *, sendable: bool = False, memory: SharedMemory | None = None) -> None:
        self.memory = memory or SharedMemory(8 * (_FACTS + WORDS * (1 + _THREADS)), sendable=sendable)
        self.words = memoryview(self.memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Board, memory=self.memory), ()

    def fileno(self) -> int:
        """Return the descriptor by which another process maps it."""
        return self.memory.fileno()

    # Written by the worker --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the worker runs."""
        self.words[BEGUN] = 1

    def start_pass(self) -> None:
        """Begin to count again."""
        self.words[_MADE] = self.words[SENT] = self.words[SINCE] = 0

    def start_item(self) -> None:
        """Note that the worker makes a microbatch from now on."""
        words = self.words
        words[_SAID] = 0
        words[SINCE] = time.monotonic_ns()

    def end_item(self) -> None:
        """Note that the microbatch has been made."""
        words = self.words
        words[SINCE] = 0
        words[_MADE] += 1

    def sent(self) -> None:
        """Note that the microbatch has been sent."""
        self.words[SENT] += 1

    def said(self) -> None:
        """Record that the worker's own watchdog has reported its activity."""
        self.words[_SAID] += 1

    def activities(self) -> Sequence[memoryview]:
        """Return the memory where the hook thread and each loading thread write their activity."""
        starts = range(_FACTS, len(self.words), WORDS)
        return [self.words[start : start + WORDS] for start in starts]

    # Read by the training process -------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the worker runs."""
        return bool(self.words[BEGUN])

    @property
    def making_since(self) -> float | None:
        """When the worker started its current microbatch, by `time.monotonic`; None: it is idle."""
        since = self.words[SINCE]
        return since / 1e9 if since else None

    @property
    def num_made(self) -> int:
        """Microbatches that it has made in this pass."""
        return self.words[_MADE]

    @property
    def num_sent(self) -> int:
        """Microbatches that it has sent in this pass."""
        return self.words[SENT]

    @property
    def has_said(self) -> bool:
        """Whether the worker's own watchdog has reported its activity."""
        return bool(self.words[_SAID])

    def running(self) -> list[tuple[Hook, int, int]]:
        """Return the running hooks, each with user key and index of its sample; key 0 if it has more than one."""
        found = []
        for words in self.activities():
            hook = _BY_CODE.get(words[HOOK])
            if hook is not None:
                found.append((hook, words[LEAF], words[INDEX]) if hook.is_single else (hook, 0, -1))
        return found


# ---------------------------------------------------------------------------------------------------------------------
# Starting worker processes so that they end with the training process, and with nobody else.
#
# Workers are bound to whoever starts them by PR_SET_PDEATHSIG, which is to say to the *thread* that does. So they are
# started by the main thread, or by one thread of this module that lives as long as the process.
#
# A fork of the training process has copies of its workers' process objects. Multiprocessing would end their processes
# when such a fork ends; here they are what they are in the process that started them only.


StartMethod = Literal["fork", "forkserver", "spawn"]


class _OfThisProcess:
    """A process object of multiprocessing that does nothing in forks of the process that started it."""

    _started_by = 0

    def __init__(self, **arguments: Any) -> None:
        self._surroundings = _Surroundings()  # first, so that it is unpickled before the arguments
        super().__init__(**arguments)

    def start(self) -> None:
        self._started_by = os.getpid()
        super().start()  # type: ignore[misc]

    @property
    def daemon(self) -> bool:
        """Whether it must be terminated when this process ends."""
        return self._started_by in (0, os.getpid()) and bool(super().daemon)  # type: ignore[misc]

    @daemon.setter
    def daemon(self, value: bool) -> None:
        BaseProcess.daemon.fset(self, value)  # type: ignore[attr-defined]

    def join(self, timeout: float | None = None) -> None:
        if self._started_by == os.getpid():
            super().join(timeout)  # type: ignore[misc]


class _Surroundings:
    """Unpickled in a worker, gives it the environment of the training process.

    The forkserver keeps that of its own start, and finds modules where a new interpreter does.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_over, (dict(os.environ), __file__)


def _take_over(environment: dict[str, str], file: str) -> None:
    if file != __file__:
        raise LoaderError(
            f"a worker of the forkserver has imported {__file__}, the training process {file}: the folder of the "
            "package is not on the path of a new interpreter, or another one precedes it. Put it into PYTHONPATH, or "
            'use start_method="fork" or "spawn"'
        )
    os.environ.clear()
    os.environ.update(environment)


class ForkedWorker(_OfThisProcess, ForkProcess):
    """A worker that is a copy of this process."""


class ServedWorker(_OfThisProcess, ForkServerProcess):
    """A worker that a process without threads has forked."""


class SpawnedWorker(_OfThisProcess, SpawnProcess):
    """A worker that is an interpreter of its own."""


_KINDS: dict[str, Any] = {"fork": ForkedWorker, "forkserver": ServedWorker, "spawn": SpawnedWorker}
_PRELOADED = "energon_bridge.core.loader.workers"
"""What the forkserver imports once, with torch and all else that it needs, so that its workers need not."""
_FORKSERVER_END_SECONDS, _FORKSERVER_PAUSE_SECONDS = 30.0, 0.05
"""The forkserver ends when a client breaks off, for example one that has no descriptors left."""
_starting = threading.Lock()
_calls: queue.SimpleQueue[tuple[contextvars.Context, Callable[[], None], Future[None]]] | None = None


def start_process(method: StartMethod, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """Start a process that runs a function; return multiprocessing's object for it."""
    if method == "forkserver" and not _forkserver_is_ours():
        method = "spawn"
    process = _KINDS[method](target=target, args=arguments, name=name, daemon=True)
    start = functools.partial(_start_forked if method == "fork" else _start_unforked, process)
    if threading.current_thread() is threading.main_thread():
        start()
    else:
        _by_the_lasting_thread(start)
    return process


def _forkserver_is_ours() -> bool:
    """Have the forkserver of multiprocessing run; False in a fork, whose parent's it is (workers are spawned there).

    It imports what `_PRELOADED` names beside what the program has it import.
    """
    server = forkserver._forkserver
    named = getattr(server, "_preload_modules", [])  # there is no public way to read it
    if _PRELOADED not in named:
        multiprocessing.set_forkserver_preload([*named, _PRELOADED])
    try:
        with _interrupts_blocked():
            forkserver.ensure_running()
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT on this thread: a worker that is forked here inherits that until it ignores it (`set_up_worker`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_forked(process: ForkedWorker) -> None:
    collecting = gc.isenabled()
    gc.disable()  # the fork must not destroy this process's garbage; `set_up_worker` turns it on again
    try:
        with _interrupts_blocked(), at_rest():
            _leave_scalers_behind()
            process.start()
    finally:
        if collecting:
            gc.enable()


def _start_unforked(process: ServedWorker | SpawnedWorker) -> None:
    """Start a worker; if the forkserver is about to end, wait, and multiprocessing starts another one."""
    deadline = time.monotonic() + _FORKSERVER_END_SECONDS
    while True:
        try:
            with _interrupts_blocked() if isinstance(process, SpawnedWorker) else contextlib.nullcontext():
                process.start()
            return
        except (ConnectionError, EOFError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the forkserver of multiprocessing does not serve: {error!r}") from error
            time.sleep(_FORKSERVER_PAUSE_SECONDS)


def refused_part(
    value: object, dumps: Callable[[Any], bytes] = pickle.dumps, path: str = "", above: tuple[object, ...] = ()
) -> str | None:
    """Name the innermost part of an object that pickle refuses, such as `task_encoder.lock (lock)`; None: no part."""
    above = *above, value
    for name, part in _parts(value):
        if any(part is one for one in above) or _is_pickled(part, dumps):
            continue
        inner = f"{path}{name}" if path else name.removeprefix(".")
        return refused_part(part, dumps, inner, above) or f"{inner} ({type(part).__name__})"
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object (`.name`), or the items of a collection (`[0]`), by that notation."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    else:
        for name in {**getattr(value, "__dict__", {}), **dict.fromkeys(copyreg._slotnames(type(value)))}:  # type: ignore[attr-defined]
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _is_pickled(value: object, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _by_the_lasting_thread(call: Callable[[], None]) -> None:
    """Call a function on a thread that only ends with the process; raise what it raises."""
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


def _forget_starter() -> None:
    """Forget, in a fork, the starting thread of the process that it was forked from."""
    global _calls, _starting
    _calls, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_starter)


def _leave_scalers_behind() -> None:
    """Drop what PyAV keeps per thread for `VideoFrame.reformat` (from PyAV 19 on), so that no worker inherits it.

    A scaler of FFmpeg owns threads. A fork has the scaler without its threads, and waits for them forever: when it
    scales a frame, or when Python destroys there what belonged to other threads. PyAV makes a new one when it needs it.
    """
    frames: Any = sys.modules.get("av.video.frame")
    if frames is not None and hasattr(frames, "_thread_local"):
        frames._thread_local = threading.local()  # a thread that is scaling now holds its own scaler
