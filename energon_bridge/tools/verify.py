"""`verify_resume`: run a pipeline, stop it, resume it, and compare every batch with the uninterrupted run.

Resuming is exact only if the encoder depends on nothing but the sample and the seeded global generators. A counter, a
generator of the encoder's own or the clock breaks it silently; `verify_resume` finds this before a long run does. It
cannot find differences that appear only in another process or on another machine, such as the order of a set of
strings, which depends on PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import reprlib
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError, ResumeMismatchError
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

Loader: TypeAlias = SavableDataLoader | EnergonDataloader
LoaderState = Any
_KEYS = ("__key__", "__restore_key__")
_RESTORED_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What `verify_resume` compared and found equal.

    Attributes:
        steps: Microbatches of the uninterrupted run.
        save_points: After how many microbatches it was saved.
        resumes: How often loaders were restored from a state.
        compared: Microbatches compared, over all resumed loaders.
        restored_samples: Microbatches that `restore_sample` rebuilt; 0 if batches carry no restore key.
        fields: Names of the compared fields.
        not_compared: Fields, or parts of them, that cannot be compared, each with the types of its values.
        state_bytes: Size of the largest state as JSON.
    """

    steps: int
    save_points: tuple[int, ...]
    resumes: int
    compared: int
    restored_samples: int
    fields: tuple[str, ...]
    not_compared: dict[str, tuple[str, ...]]
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivered:
    """The fields of a delivered microbatch as hashes, for comparison without keeping it."""

    fields: dict[str, Field]
    keys: Any
    restore_key: Any
    masked: bool


def verify_resume(
    make_loader: Callable[..., Loader],
    steps: int = 50,
    *,
    save_points: Sequence[int] | None = None,
    worker_config: WorkerConfig | None = None,
    topologies: Sequence[tuple[int, int]] = (),
) -> ResumeReport:
    """Check that resumed loaders deliver the same batches as an uninterrupted one, bit for bit.

    Examples:
        >>> def make_loader():
        ...     return get_savable_loader(get_train_dataset("data/captions", batch_size=4))
        >>> report = verify_resume(make_loader, steps=6)
        >>> report.steps, report.save_points
        (6, (1, 3, 5))

    Args:
        make_loader: Builds a fresh loader over the data, encoder included: `get_savable_loader(…)`, also inside an
            `EnergonDataloader`. Called without arguments, or with a `WorkerConfig` if `worker_config` is given.
        steps: Microbatches of the uninterrupted run; fewer if a validation stream ends earlier. Lanes take turns
            (`num_lanes`, 48 in most runs), so choose at least twice their number to test the state of each.
        save_points: After how many microbatches to save and resume; default: the first, the middle, the last but one.
        worker_config: Passed to `make_loader`; with `topologies` it must be for a single rank.
        topologies: Pairs (ranks, workers per rank) to resume each state on, too; all ranks run in this process, one
            after the other.

    Raises:
        ResumeMismatchError: A resumed loader or `restore_sample` delivered a different batch, or a state does not
            survive JSON and `torch.load(weights_only=True)`. Names the microbatch, its samples, the
            field and the likely cause.
        ConfigurationError: The arguments contradict each other.
    """
    check = _Check(make_loader, worker_config, topologies)
    states = check.run_uninterrupted(steps, save_points)
    for point, state in states.items():
        check.resume(point, state)
    restored = check.restore_samples()
    fields: dict[str, None] = {}
    opaque: dict[str, tuple[str, ...]] = {}
    for delivered in check.expected:
        for name, field in delivered.fields.items():
            fields[name] = None
            if field.opaque:
                opaque[name] = field.opaque
    if opaque:
        named = ", ".join(f"{name} ({', '.join(types)})" for name, types in opaque.items())
        logger.warning("verify_resume: cannot compare %s, which have no bytes of their own", named)
    return ResumeReport(
        steps=len(check.expected),
        save_points=tuple(states),
        resumes=check.resumes,
        compared=check.compared,
        restored_samples=restored,
        fields=tuple(fields),
        not_compared=opaque,
        state_bytes=max(len(json.dumps(state)) for state in states.values()),
    )


class _Check:
    """The uninterrupted run, and the comparisons with it.

    From each save point p with state s(p) two chains of fresh loaders run to the end:

        s(p) -> A ................................ end
        s(p) -> A, saved at once -> B .... saved -> C ... end

    so states saved right after a restore, and in the middle of a resumed run, are tested too.
    """

    def __init__(
        self, make_loader: Callable[..., Loader], config: WorkerConfig | None, topologies: Sequence[tuple[int, int]]
    ) -> None:
        if topologies and (config is None or config.dp_size != 1):
            raise ConfigurationError(
                "verify_resume: topologies need the worker_config of one rank, to derive those of all ranks, and a "
                "make_loader that takes it"
            )
        self._make = make_loader
        self._config = config
        self._topologies = topologies
        self._first: Callable[[], object] = lambda: None
        self.expected: list[_Delivered] = []
        self.resumes = 0
        self.compared = 0

    def run_uninterrupted(self, steps: int, save_points: Sequence[int] | None) -> dict[int, LoaderState]:
        """Deliver the first microbatches, and return the states by save point."""
        if steps < 2:
            raise ConfigurationError(f"verify_resume: steps must be at least 2, got {steps}")
        wanted = {1, steps // 2, steps - 1} if save_points is None else set(save_points)
        if not wanted or not wanted <= set(range(steps)):
            raise ConfigurationError(f"verify_resume: save_points must lie in range({steps}), got {save_points!r}")
        states = {}
        with self._loaders(self._config) as (loader,):
            batches = iter(loader)
            for step in range(steps):
                if step in wanted:
                    states[step] = _through_files(_save(loader), step)
                batch = next(batches, None)
                if batch is None:
                    break
                self.expected.append(_delivered(batch))
        if len(self.expected) < 2:
            raise ConfigurationError(f"verify_resume: the loader ended after {len(self.expected)} microbatches")
        reached = {point: state for point, state in states.items() if point < len(self.expected)}
        if save_points is None and len(reached) < len(wanted):  # the stream ended early: run it again, up to its end
            steps = len(self.expected)
            self.expected.clear()
            return self.run_uninterrupted(steps, None)
        if not reached:
            raise ConfigurationError(
                f"verify_resume: the loader ended after {len(self.expected)} microbatches, before the first save "
                "point; save earlier"
            )
        return reached

    def resume(self, point: int, state: LoaderState) -> None:
        """Resume from a state in every way, and compare the batches that follow."""
        with self._loaders(self._config) as loaders:
            self._restore(loaders, state)
            again = _through_files(_save(loaders[0]), point)
            self._compare(loaders, point, len(self.expected), f"a resume at microbatch {point}")
        middle = (point + len(self.expected) + 1) // 2
        where = f"two resumes at microbatch {point}, with nothing delivered between them"
        with self._loaders(self._config) as loaders:
            self._restore(loaders, again)
            self._compare(loaders, point, middle, where)
            later = _through_files(_save(loaders[0]), middle)
        if middle < len(self.expected):
            with self._loaders(self._config) as loaders:
                self._restore(loaders, later)
                self._compare(loaders, middle, len(self.expected), f"resumes at microbatches {point} and {middle}")
        for ranks, workers in self._topologies:
            assert self._config is not None
            configs = [replace(self._config, rank=rank, world_size=ranks, num_workers=workers) for rank in range(ranks)]
            where = f"a resume at microbatch {point} on {ranks} ranks of {workers} workers"
            with self._loaders(*configs) as loaders:
                self._restore(loaders, state)
                self._compare(loaders, point, len(self.expected), where)

    def restore_samples(self) -> int:
        """Rebuild some microbatches from their restore keys, compare them, and return how many."""
        real = [n for n, delivered in enumerate(self.expected) if delivered.restore_key and not delivered.masked]
        chosen = (
            sorted({real[place * (len(real) - 1) // (_RESTORED_SAMPLES - 1)] for place in range(3)}) if real else []
        )
        for number in chosen:
            with self._loaders(self._config) as (loader,):
                reencoded = self._reencoded(loader, number)
                if names := differing(self.expected[number].fields, reencoded.fields):
                    raise self._mismatch(number, names, reencoded, "restore_sample")
        return len(chosen)

    # Comparing -------------------------------------------------------------------------------------------------------

    def _compare(self, loaders: Sequence[Loader], first: int, last: int, after: str) -> None:
        """Compare microbatches [first, last); the ranks take turns delivering them."""
        number = first
        streams = [iter(loader) for loader in loaders]
        while number < last:
            for stream in streams:
                batch = next(stream, None)
                if batch is None:
                    raise ResumeMismatchError(
                        f"verify_resume: after {after} the loader ended at microbatch {number}; the uninterrupted run "
                        f"has at least {len(self.expected)}"
                    )
                delivered = _delivered(batch)
                # With several ranks there are masked microbatches that a single rank does not have.
                extra = delivered.masked and len(loaders) > 1 and number < last and not self.expected[number].masked
                if number == last or extra:
                    continue
                if names := differing(self.expected[number].fields, delivered.fields):
                    raise self._mismatch(number, names, delivered, after)
                number += 1
                self.compared += 1

    def _mismatch(self, number: int, names: list[str], delivered: _Delivered, after: str) -> ResumeMismatchError:
        expected = self.expected[number]
        lines = []
        for name in names[:4]:
            pair = [
                fields[name].shown if name in fields else "missing" for fields in (expected.fields, delivered.fields)
            ]
            lines.append(f"  {name}: {pair[0]} in the uninterrupted run, {pair[1]} now")
        fields = ", ".join(repr(name) for name in names)
        return ResumeMismatchError(
            f"verify_resume: after {after}, microbatch {number} ({self._samples(number)}) differs in {fields}:\n"
            + "\n".join(lines)
            + f"\nLikely cause: {self._cause(number, names)}"
        )

    def _samples(self, number: int) -> str:
        """Name the samples of a microbatch by key, or by position if the batch no longer has keys."""
        expected = self.expected[number]
        if expected.keys is not None or not expected.restore_key:
            return f"samples {expected.keys}"
        with self._loaders(self._config) as (loader,):
            return str(_raw(loader).describe_restore_key(expected.restore_key))

    def _cause(self, number: int, names: list[str]) -> str:
        if any(name in names for name in _KEYS):
            return (
                "other samples came: a hook skips, yields or refuses samples by something else than the sample and the "
                "seeded global generators, or make_loader does not build the same dataset every time"
            )
        if self.expected[number].masked or not self.expected[number].restore_key:
            return "make_loader builds another dataset or encoder the next time, or a hook keeps state"
        both = []
        for _ in range(2):
            with self._loaders(self._config) as (loader,):
                both.append(self._reencoded(loader, number).fields)
        if differing(*both):
            return (
                "encoding the same samples twice gives two results, so a hook uses randomness outside the global "
                "generators of random, numpy and torch (os.urandom, uuid, secrets, a generator of its own), or the "
                "time. Draw from the global generators, which are seeded per sample, or from the sample's key"
            )
        return (
            "the result depends on what was encoded before: the encoder, or something global, keeps a counter, a cache "
            "or a buffer, which no state restores. Make every hook a function of its sample alone"
        )

    def _reencoded(self, loader: Loader, number: int) -> _Delivered:
        try:
            return _delivered(_raw(loader).restore_sample(self.expected[number].restore_key))
        except LookupError as error:
            raise ResumeMismatchError(
                f"verify_resume: restore_sample cannot make microbatch {number} ({self._samples(number)}) "
                f"again: {error}. encode_sample must give the same outputs for a sample every time"
            ) from error

    # Loaders ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _loaders(self, *configs: WorkerConfig | None) -> Iterator[list[Loader]]:
        """Build fresh loaders, and stop their workers at the end."""
        loaders: list[Loader] = []
        try:
            for config in configs:
                loader = self._make() if config is None else self._make(config)
                raw = _raw(loader)
                if not hasattr(raw, "restore_state_rank"):
                    raise ConfigurationError(
                        f"verify_resume: make_loader must return a loader from get_savable_loader, or an "
                        f"EnergonDataloader of it, got {type(raw).__name__}"
                    )
                if raw is self._first():
                    raise ConfigurationError(
                        "verify_resume: make_loader returned the same loader again; make a new one in each call"
                    )
                if self._first() is None:
                    self._first = weakref.ref(raw)
                loaders.append(loader)
            yield loaders
        finally:
            for loader in loaders:
                loader.close()

    def _restore(self, loaders: Sequence[Loader], state: LoaderState) -> None:
        for loader in loaders:
            restore = loader.restore_state if isinstance(loader, EnergonDataloader) else loader.restore_state_rank
            restore(state)
            self.resumes += 1


def _raw(loader: Loader) -> SavableDataLoader:
    return loader.loader if isinstance(loader, EnergonDataloader) else loader


def _save(loader: Loader) -> LoaderState:
    return loader.save_state() if isinstance(loader, EnergonDataloader) else loader.save_state_rank()


def _through_files(state: LoaderState, step: int) -> LoaderState:
    """Return a state after a round trip through JSON and a checkpoint loaded with `weights_only=True`."""
    try:
        file = io.BytesIO()
        torch.save(json.loads(json.dumps(state)), file)
        torch.save(state, checkpoint := io.BytesIO())
        loaded = [torch.load(io.BytesIO(f.getvalue()), weights_only=True) for f in (file, checkpoint)]
    except Exception as error:
        raise ResumeMismatchError(
            f"verify_resume: the state after microbatch {step} does not survive JSON and "
            f"torch.load(weights_only=True): {type(error).__name__}: {error}"
        ) from error
    return loaded[0]


def _delivered(batch: Any) -> _Delivered:
    valid = meta_field(batch, "__valid__")
    masked = isinstance(valid, torch.Tensor) and not bool(valid.any())
    # The rows of a masked microbatch only give it a shape; which rows they are may differ.
    fields = fields_of({"__valid__": "masked"} if masked else batch)
    return _Delivered(
        fields=fields,
        keys=meta_field(batch, "__key__"),
        restore_key=meta_field(batch, "__restore_key__"),
        masked=masked,
    )


# Fields as digests ----------------------------------------------------------------------------------------------------
#
# Batches are compared field by field, by digests, so that neither has to be kept. A field is an entry of a dict or
# dataclass at any depth, named by its path (`image`, `meta.size`); lists and tuples belong to the field that holds
# them. Every bit counts: the type, shape and bytes of a tensor, the sign of a zero, the order of a dict. A value
# without bytes of its own (an open file, a decoder, an object of some class) is *opaque*: it is named and not compared.


_PLAIN = (str, int, bool, complex, type(None), Fraction, PurePath, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a batch.

    Attributes:
        digest: Hash of its value, without the opaque parts.
        shown: The value as error messages show it.
        opaque: Types of the parts that are not compared.
    """

    digest: bytes
    shown: str
    opaque: tuple[str, ...]


def fields_of(batch: Any) -> dict[str, Field]:
    """Return the fields of a batch by their paths."""
    return dict(_walk("", batch))


def differing(expected: Mapping[str, Field], delivered: Mapping[str, Field]) -> list[str]:
    """Return the paths of fields that differ or that only one side has, in the order of the expected batch."""
    paths = dict.fromkeys([*expected, *delivered])
    return [path for path in paths if _digest(expected.get(path)) != _digest(delivered.get(path))]


def _digest(field: Field | None) -> bytes | None:
    return None if field is None else field.digest


def _walk(path: str, value: Any) -> Iterator[tuple[str, Field]]:
    entries = _entries(value)
    if entries is None:
        yield path or "the batch", _field(value)
        return
    # The container itself: its type and the names in it, in their order.
    names = [name for name, _ in entries]
    shown = f"{type(value).__name__} of {', '.join(map(str, names))}"
    yield path or "the batch", replace(_field([_type_name(value), names]), shown=shown)
    for name, entry in entries:
        step = name if isinstance(name, str) else f"[{name!r}]"
        yield from _walk(f"{path}.{step}" if path else step, entry)


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the named entries of a dict or dataclass (not only its fields), None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value)]
        extra = [name for name in getattr(value, "__dict__", {}) if name not in names]
        return [(name, getattr(value, name)) for name in [*names, *sorted(extra)]]
    return None


def _field(value: Any) -> Field:
    state = hashlib.blake2b(digest_size=16)
    opaque: dict[str, None] = {}
    _feed(state, value, opaque)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shown = f"{value.dtype} {tuple(value.shape)} #{state.hexdigest()[:8]}"
    else:
        shown = reprlib.repr(value)
    return Field(digest=state.digest(), shown=shown, opaque=tuple(opaque))


def _feed(state: Any, value: Any, opaque: dict[str, None]) -> None:
    """Add a value to a hash; parts that cannot be added are noted."""
    name = _type_name(value)
    entries = _entries(value)
    if entries is not None:
        state.update(f"{name} {len(entries)}{{".encode())
        for key, entry in entries:
            _feed(state, key, opaque)
            _feed(state, entry, opaque)
    elif isinstance(value, (list, tuple)):
        state.update(f"{name} {len(value)}[".encode())
        for entry in value:
            _feed(state, entry, opaque)
    elif isinstance(value, AbstractSet):
        digests = []
        for entry in value:
            own = hashlib.blake2b(digest_size=16)
            _feed(own, entry, opaque)
            digests.append(own.digest())
        state.update(f"{name} {len(value)}(".encode() + b"".join(sorted(digests)))  # a set has no order to compare
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        state.update(f"{name} {value.dtype} {value.shape}".encode())
        _feed(state, value.tolist(), opaque)
    else:
        data = _bytes_of(value)
        if data is None:
            opaque[name] = None
            data = b""
        state.update(f"{name} {len(data)}:".encode())
        state.update(data)


def _bytes_of(value: Any) -> bytes | None:
    """Return bytes that identify a value without parts, None for an opaque one."""
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, Enum):
        return value.name.encode()
    if isinstance(value, _PLAIN):
        return str(value).encode("utf-8", "surrogatepass")
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return f"{value.mode} {value.size} ".encode() + value.tobytes()
    return None


def _tensor_bytes(tensor: torch.Tensor) -> bytes | None:
    try:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data: bytes = flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError):  # sparse, nested, quantised: they have no plain bytes
        return None
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
