"""One plan for several grids: language ranks get tokens, encoder ranks the media of the language ranks that they serve.

    roles = make_roles(grids={"language": language_dp_group, "vision": vision_dp_group})
    loader = roles.loader(get_train_dataset("data/chats", batch_size=2, task_encoder=encoder))
    for step in loader:
        step["language"]  # where this process is a language rank: its microbatch, without media
        step["vision"]  # where it is a rank of the vision encoder: an EncoderBatch

With D language ranks and E ranks of an encoder, one of them divides the other. Of k = D / E, encoder rank e serves the
language ranks from e k on, up to the next one's. Where there are more encoder ranks, E / D of them in a row share the
media of one language rank, cut in their order. So do the context-parallel ranks of a replica, with `context_parallel`.

Which samples there are, in which order, packed how, is arithmetic and text, so all ranks know it without a word. The
state of the run is that of the language ranks; encoder ranks begin where it says, on grids of any size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from energon_bridge.core.datasets import get_savable_loader
from energon_bridge.core.errors import ConfigurationError, DecodeError, WrongUseError, check_number
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.loader.ranks import gathered as values_of_ranks
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.worker_config import distributed
from energon_bridge.models.conversations.blank_media import Blank, lacking
from energon_bridge.models.conversations.sequences import join_visual
from energon_bridge.trainers.replica import StageKeys
from energon_bridge.trainers.replica.balanced import FIGURES, Cost
from energon_bridge.trainers.replica.groups import gathered, parallel_place
from energon_bridge.trainers.replica.structure import check_keys, select
from energon_bridge.trainers.roles.dealing import Deal, DealtStream, make_deal
from energon_bridge.trainers.roles.encoding import (
    KINDS,
    EncoderBatch,
    LaneMedia,
    LanguageTaskEncoder,
    MediaTaskEncoder,
)

logger = logging.getLogger(__name__)

LANGUAGE = "language"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The data-parallel ranks of one module, as a process sees them.

    Args:
        size: How many there are.
        rank: That of this process; None: it is none of them.
        group: Their process group, where there is one.
    """

    size: int
    rank: int | None
    group: Any = None

    def times(self, inner: Grid) -> Grid:
        """Return the grid in which each rank of this one is all those of another, in their order."""
        rank = None if self.rank is None or inner.rank is None else self.rank * inner.size + inner.rank
        return Grid(size=self.size * inner.size, rank=rank)


def make_roles(
    grids: Mapping[str, Any],
    *,
    macro: int = 1,
    context_parallel: Any = None,
    blank_media: bool = False,
    stage_keys: StageKeys | None = None,
    pg_collection: Any = None,
) -> Roles:
    """Return what this process loads, where the language model and encoders have data-parallel ranks of their own.

    Examples:
        >>> roles = make_roles(grids={"language": (0, 4), "vision": (None, 2)})  # language rank 0 of 4
        >>> roles.names
        ('language',)

    Args:
        grids: The data-parallel ranks of `language`, and of one or more encoders: `vision` gets images and videos,
            `audio` sounds, `media` all of them. Each is a process group, a `HyperCommGrid` of megatron-core with a
            dimension `dp`, or rank and size, `(rank, size)`. A process that needs no data of a grid, since it is not of
            it or is of a later pipeline stage of an encoder, passes None or `(None, size)`. If one passes None, all
            processes must call this, after torch.distributed is initialised.
        macro: Microbatches whose media an encoder rank gets at once.
        context_parallel: The context-parallel group of this process, or its rank and size, where its ranks divide the
            media of their replica: whole media in their order, cut into runs of level tokens. Encoders then have the
            data-parallel ranks of `language`. None: each context-parallel rank gets all of them.
        blank_media: Whether an encoder rank without media of a kind gets a blank one, so that its encoder runs, as FSDP
            and DDP need it. Its features belong to no token: `part_tokens` leaves them out, `gather_features` drops
            them.
        stage_keys: The fields of a language batch that each pipeline stage of the language model gets; None: all.
        pg_collection: megatron-core's `ProcessGroupCollection` of the language model, whose `pp` tells the stage.

    Raises:
        ConfigurationError: A grid is unknown, missing, or does not fit that of the language model.
    """
    if LANGUAGE not in grids or len(grids) < 2 or grids.keys() - KINDS.keys() - {LANGUAGE}:
        given, known = ", ".join(map(repr, sorted(grids))), ", ".join(sorted(KINDS))
        raise ConfigurationError(f"make_roles: grids must have 'language' and at least one of {known}, got {given}")
    names = sorted(grids, key=lambda name: (name != LANGUAGE, name))
    found = {name: _grid(name, grids[name]) for name in names}
    if any(grid.size == 0 for grid in found.values()):
        if distributed() is None:
            raise ConfigurationError(
                "make_roles: a process that is not of a grid passes (None, size), or torch.distributed is initialised "
                "before, so that the other processes can tell the size"
            )
        sizes = [max(column) for column in zip(*gathered(tuple(g.size for g in found.values())), strict=True)]
        found = {name: replace(grid, size=size) for (name, grid), size in zip(found.items(), sizes, strict=True)}
    kinds = [kind for name in found if name != LANGUAGE for kind in KINDS[name]]
    if len(kinds) > len(set(kinds)):
        raise ConfigurationError(f"make_roles: {', '.join(found)} would give some media to two encoders")
    size = found[LANGUAGE].size
    for name, grid in found.items():
        if grid.size < 1 or (size % grid.size and grid.size % size):
            raise ConfigurationError(
                f"make_roles: {name} has {grid.size} data-parallel ranks and language {size}: one number must divide "
                "the other, so that whole ranks serve whole ranks"
            )
    if context_parallel is not None:
        found = _with_context_parallel(found, _grid("context_parallel", context_parallel))
    keys = None if stage_keys is None else stage_keys.of(*parallel_place("pp", pg_collection))
    macro = check_number("make_roles: macro", macro, 1)
    return Roles(grids=found, macro=macro, blank_media=blank_media, keys=keys)


def _with_context_parallel(grids: Mapping[str, Grid], context: Grid) -> dict[str, Grid]:
    """Return the grids with each rank of an encoder divided between the context-parallel ranks of its replica."""
    size = grids[LANGUAGE].size
    if not context.size or any(grid.size != size for grid in grids.values()):
        sizes = ", ".join(f"{name} {grid.size}" for name, grid in grids.items())
        raise ConfigurationError(
            f"make_roles: context_parallel has {context.size} ranks, and the grids {sizes}: the context-parallel ranks "
            "of a replica encode its own media, so give each encoder the data-parallel ranks of language, and "
            "context_parallel the group that this process is of"
        )
    return {name: grid if name == LANGUAGE else grid.times(context) for name, grid in grids.items()}


def _grid(name: str, group: Any) -> Grid:
    if isinstance(group, tuple):
        rank, size = group
        if rank is not None and not 0 <= rank < size:
            raise ConfigurationError(f"make_roles: {name} has rank {rank} of {size}")
        return Grid(size=size, rank=rank)
    if hasattr(group, "dim_names"):
        return _of_hyper_comm_grid(group)
    world = distributed()
    if group is None or (world is not None and group == world.GroupMember.NON_GROUP_MEMBER):
        return Grid(size=0, rank=None)
    return Grid(size=int(group.size()), rank=int(group.rank()), group=group)


def _of_hyper_comm_grid(grid: Any) -> Grid:
    """Return the data-parallel ranks of a `HyperCommGrid`: `dp`, with the peers of generalised tensor parallelism.

    A grid that has both seldom has a group of both, so the rank is computed: the first dimension is the fastest.
    """
    own = torch.distributed.get_rank() - grid.rank_offset
    inside = 0 <= own < math.prod(grid.shape)
    rank = 0
    size = 1
    dimensions = []
    for name, length in zip(grid.dim_names, grid.shape, strict=True):
        own, place = divmod(own, length)
        if name in ("dp", "gtp_remat") and length > 1:
            rank += size * place
            size *= length
            dimensions.append(name)
    group = grid.get_pg(dimensions[0]) if inside and len(dimensions) == 1 else None
    return Grid(size=size, rank=rank if inside else None, group=group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """What a process loads; `make_roles` makes it.

    Args:
        grids: The grids by name.
        macro: Microbatches whose media an encoder rank gets at once.
        blank_media: Whether an encoder rank without media of a kind gets a blank one.
        keys: The fields of a language batch that this process needs; None: all.
    """

    grids: Mapping[str, Grid]
    macro: int = 1
    blank_media: bool = False
    keys: frozenset[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The grids that this process is of, `language` first."""
        return tuple(name for name, grid in self.grids.items() if grid.rank is not None)

    @property
    def place(self) -> dict[str, Any]:
        """Rank and world size of a configuration for all loaders of this process; each takes its own of the grids."""
        return {"rank": self.served(self.names[0])[0] if self.names else 0, "world_size": self.grids[LANGUAGE].size}

    def served(self, name: str, *, dealt: bool = False) -> range:
        """Return the language ranks that this process serves as a rank of an encoder; as a language rank, itself.

        Where microbatches are dealt, a language rank makes the texts of its block.
        """
        grid = self.grids[name]
        size = self.grids[LANGUAGE].size
        if grid.rank is None:
            return range(0)
        count = self.block if dealt and name == LANGUAGE else max(1, size // grid.size)
        first = grid.rank * size // grid.size // count * count
        return range(first, first + count)

    def part(self, name: str) -> tuple[int, int]:
        """Return which part of the media of these language ranks it gets, of how many."""
        grid = self.grids[name]
        parts = max(1, grid.size // self.grids[LANGUAGE].size)
        return (grid.rank or 0) % parts, parts

    @property
    def block(self) -> int:
        """How many language ranks in a row each encoder serves with one rank."""
        size = self.grids[LANGUAGE].size
        return math.gcd(*(max(1, size // grid.size) for name, grid in self.grids.items() if name != LANGUAGE))

    def task_encoder(self, name: str, task_encoder: Any, cost: Cost | None = None) -> Any:
        """Return the task encoder for a role. Raises ConfigurationError if the encoder cannot be used for roles."""
        if name == LANGUAGE:
            return LanguageTaskEncoder(task_encoder)
        return MediaTaskEncoder(task_encoder, KINDS[name], self.part(name), cost)

    def loader(self, dataset: DatasetSpec, *, balance: Cost | None = None, **options: Any) -> RoleLoader:
        """Return the loader of this process.

        Args:
            dataset: From `get_train_dataset` or `get_val_dataset`, the same on all ranks. Of its `WorkerConfig` all
                counts but ranks and groups, which are those of the grids.
            balance: The cost of a microbatch without its media, such as `BatchCost()`: the language ranks that one
                encoder rank serves then divide their microbatches of each global batch by it. None: they do not.
            options: Those of `get_savable_loader`, such as `on_mismatch`.

        Raises:
            ConfigurationError: The process is of no grid, dataset or encoder cannot be used for roles, or the dataset
                cannot be balanced.
        """
        policy = dataset.settings.error_policy
        if policy.damaged_shards == "skip":
            raise ConfigurationError(
                "roles: damaged_shards='skip' of the ErrorPolicy would leave out samples on those ranks alone that "
                "cannot read them, and others would train on parts of them: leave it at 'raise'"
            )
        if not self.names:
            raise ConfigurationError("roles: this process is of none of the grids, so it loads nothing")
        loaders, blank = {}, {}
        size = self.grids[LANGUAGE].size
        deal = None if balance is None else make_deal(dataset, balance, language=size, block=self.block)
        for name in self.names:
            ranks = self.served(name, dealt=deal is not None)
            own: dict[str, Any] = {"data_parallel_group": None, "serves": len(ranks)}
            if name == LANGUAGE and deal is None:
                own = {"data_parallel_group": self.grids[name].group, "serves": None}
            config = replace(dataset.worker_config, rank=ranks[0], world_size=size, **own)
            encoder = self.task_encoder(name, dataset.settings.task_encoder, balance)
            blank[name] = encoder.blank_media() if self.blank_media and name != LANGUAGE else []
            spec = replace(dataset.with_settings(task_encoder=encoder), worker_config=config)
            loaders[name] = get_savable_loader(spec, worker_config=config, **options)
        return RoleLoader(loaders, self, blank, deal)


class RoleLoader:
    """The loader of one process with its roles: gives a dict in each step, with a batch for each role of the process.

    `language` has a microbatch in every step; encoders have an `EncoderBatch` in the first of `macro` steps.

    Args:
        loaders: The loader of each role.
        roles: Those of the process.
        blank_media: Blank media of each role, for steps without any.
        deal: How global batches are dealt; None: each language rank runs what it loads.

    Attributes:
        blanks: Media that were delivered blank since they could not be decoded.
        spec: The dataset.
        config: Ranks and workers of its first role.
    """

    def __init__(
        self,
        loaders: Mapping[str, SavableDataLoader],
        roles: Roles,
        blank_media: Mapping[str, Sequence[Blank]],
        deal: Deal | None = None,
    ) -> None:
        self.loaders = loaders
        self.roles = roles
        self._blank_media = blank_media
        self.blanks = 0
        self._first: SavableDataLoader = next(iter(loaders.values()))
        self.spec, self.config = self._first.spec, self._first.config
        self._step: dict[str, Any] = {}
        self._dealt: dict[str, DealtStream] = {}
        if deal is not None:
            for name, loader in loaders.items():
                served = roles.served(name)
                own = [served[0] % deal.ranks] if name == LANGUAGE else range(len(served))
                self._dealt[name] = DealtStream(loader, deal, own)
        self._restart()

    @property
    def ownership(self) -> Ownership:
        """Which language rank delivers which lane."""
        return self._first.ownership

    @property
    def microbatches(self) -> int:
        """Microbatches of all language ranks that the run has delivered, as far as this process has taken part."""
        ahead = 0 if LANGUAGE in self.loaders else max(self._left.values())
        ahead += next((dealt.ahead for dealt in self._dealt.values()), 0)
        return self._first.microbatches - ahead * self.roles.grids[LANGUAGE].size

    @property
    def unfinished(self) -> str | None:
        """The reason why no state can be saved now, or None."""
        size = self.config.microbatches_per_global_batch
        if not self._dealt or size is None or not self.microbatches % size:
            return None
        return (
            f"{self.microbatches % size} of the {size} microbatches of this global batch were delivered; with balance "
            "there is a state after whole global batches only: save it after an optimizer step"
        )

    def __len__(self) -> int:
        """Return the steps of a finite stream, or of an epoch of the data."""
        return len(self._first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.spec.ends:
            self._restart()
        streams = {name: iter(loader) for name, loader in self.loaders.items()}
        while all(self._fill(name, stream) for name, stream in streams.items()):
            step, self._step = self._step, {}
            yield step
        self._restart()

    def _restart(self) -> None:
        """Forget what was loaded of a step, since the loaders stand elsewhere."""
        self._step = {}
        for dealt in self._dealt.values():
            dealt.restart()
        self._lanes: dict[str, list[LaneMedia]] = {name: [] for name in self.loaders}
        self._left = dict.fromkeys(self.loaders, 0)

    def _fill(self, name: str, stream: Iterator[Any]) -> bool:
        """Load the batch of a role for the next step, if it has one; return whether there is such a step.

        What is loaded is kept until the step is complete, so that an error in between loses nothing.
        """
        if name in self._step:
            return True
        if name == LANGUAGE:
            batch = self._next(name, stream)
            if batch is not None:
                check_keys(batch, self.roles.keys)
                self._step[name] = select(batch, self.roles.keys)
            return batch is not None
        if self._left[name]:
            self._left[name] -= 1
            return True
        served = len(self.roles.served(name))
        lanes = self._lanes[name]
        while len(lanes) < self.roles.macro * served and (lane := self._next(name, stream)) is not None:
            lanes.append(lane)
            for error in lane.blanks:
                self._note(error)
        if not lanes:
            return False
        self._step[name] = joined(lanes, self._blank_media[name])
        self._left[name] = len(lanes) // served - 1
        self._lanes[name] = []
        return True

    def _next(self, name: str, stream: Iterator[Any]) -> Any:
        """Return the next microbatch of a role, or None."""
        return self._dealt[name].take(stream) if self._dealt else next(stream, None)

    def _note(self, error: str) -> None:
        """Count and name a blank medium; raise where the policy tolerates no failure."""
        policy = self.spec.settings.error_policy
        if policy.on_error == "raise" or (callable(policy.on_error) and not policy.on_error(DecodeError(error))):
            raise DecodeError(f"{error} (the language ranks have its tokens, so the sample cannot be left out)")
        self.blanks += 1
        if self.blanks <= policy.messages or not self.blanks & (self.blanks - 1):
            logger.warning(
                "%s: delivered blank (%d so far on this rank), since its tokens are planned", error, self.blanks
            )

    # State -----------------------------------------------------------------------------------------------------------

    def save_state_rank(self) -> Any:
        """Return the state of this process's language rank; None if it has none, since encoders have no state.

        Raises:
            WrongUseError: With balance, a global batch was delivered in part.
        """
        if self.unfinished is not None:
            raise WrongUseError(self.unfinished)
        if LANGUAGE in self._dealt:
            return self._dealt[LANGUAGE].state()
        return self.loaders[LANGUAGE].save_state_rank() if LANGUAGE in self.loaders else None

    def restore_state_rank(self, state: Any, **options: Any) -> None:
        """Continue from the states of all language ranks, as a list, or from a global one, saved on grids of any size.

        Raises:
            StateError: As `SavableDataLoader.restore_state_rank`.
        """
        for loader in self.loaders.values():
            loader.restore_state_rank(state, **options)
        self._restart()

    def state_dict(self) -> Any:
        """Return the state of the run, gathered over all processes of torch.distributed, which must all call this.

        Without torch.distributed, it is what `save_state_rank` returns.
        """
        own = self.save_state_rank()
        world = distributed()
        if world is None:
            return own
        found = values_of_ranks("", (self.roles.grids[LANGUAGE].rank, own), world.get_world_size(), None)
        states = {rank: state for rank, state in found if state is not None}  # ranks of a replica have the same
        return merge([states[rank] for rank in sorted(states)])

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state of `state_dict`, on any role and on grids of any size."""
        self.restore_state_rank(state)

    def ban(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigurationError: a change while the run goes on would have to reach encoders at the same draw."""
        raise ConfigurationError(
            "roles: neither ban nor set_weights work while a run goes on, since encoder ranks load ahead of language "
            "ranks. Save the state, change the data (exclude in split.yaml) or the weights, and resume with "
            "on_mismatch='adapt'"
        )

    set_weights = ban

    def seek(self, step: int) -> None:
        """Go to a step of the run; all processes must call it alike."""
        for loader in self.loaders.values():
            loader.seek(step)
        self._restart()

    def metrics(self) -> dict[str, float]:
        """Return what this process has loaded, by role, as plain numbers; `blank_media` counts over its encoders.

        With balance also `balance_step` and its like, those of `BalancedLoader.metrics`, of the ranks of a block.
        """
        found = {f"{name}/{key}": value for name, one in self.loaders.items() for key, value in one.metrics().items()}
        for dealt in self._dealt.values():
            means = dealt.figures / max(1, dealt.global_batches)
            found |= {f"balance_{key}": float(mean) for key, mean in zip(FIGURES, means, strict=True)}
        return found | {"blank_media": float(self.blanks)}

    def close(self) -> None:
        """Stop the workers."""
        for loader in self.loaders.values():
            loader.close()


def joined(lanes: Sequence[LaneMedia], blanks: Sequence[Blank] = ()) -> EncoderBatch:
    """Return the media of some microbatches as one batch, in their order, with those of some blank media it lacks."""
    rows = [lane.visual_inputs for lane in lanes]
    visual = join_visual(rows, [0] * len(rows), count=1) if any(rows) else {}
    blank = {name: value for one in lacking(blanks, visual) for name, value in one.media.items()}
    visual |= blank
    has_pixels = any(name.startswith("pixel_values") for name in visual)
    names = ("input_ids", "num_tokens", "num_media", "part_tokens")
    lists: dict[str, Any] = {name: [one for lane in lanes for one in getattr(lane, name)] for name in names}
    return EncoderBatch(
        __key__=[key for lane in lanes for key in lane.__key__],
        __restore_key__=tuple(lane.__restore_key__ for lane in lanes),
        visual_inputs=visual,
        **lists,
        blank_media=sorted(blank),
        pixel_norm=lanes[0].pixel_norm if has_pixels else None,
    )
