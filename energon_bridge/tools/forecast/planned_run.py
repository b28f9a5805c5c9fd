"""The run to forecast: its leaves and their order, and the positions of its lanes in a saved state.

A state has everything that an order depends on but these: names of metadata files other than the usual ones, how
datasets are joined, the order of a concatenation, and weights that share or move (groups by size, schedules). Where
one of them is needed, the mix has to be given, and is checked against the state as on a resume. Packing and grouping
go by the content of samples, so runs that do either are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from energon_bridge.core.datasets import get_train_dataset, get_val_dataset
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.task_encoder import DefaultTaskEncoder, TaskEncoder
from energon_bridge.core.errors import ConfigurationError, NoCookerError
from energon_bridge.core.format.join import JOIN_OF
from energon_bridge.core.format.jsonl import is_jsonl
from energon_bridge.core.loader.bans import banned_of
from energon_bridge.core.loader.dataset_spec import DatasetSpec
from energon_bridge.core.loader.fits import check_fits
from energon_bridge.core.loader.run_plan import ORDER_SETTINGS, RunPlan, plan_run
from energon_bridge.core.loader.saved_run import SavedRun, State, read
from energon_bridge.core.mix import BlendNode, Concat, DatasetOpener, LeafRef, Mix, MixLike, TreeNode, WeightSchedule
from energon_bridge.core.mix.flatten import flatten
from energon_bridge.core.mix.leaves import OpenLeaf
from energon_bridge.core.mix.tree import EpochizedNode as MixedEpochs
from energon_bridge.core.order.topology import Ownership
from energon_bridge.core.stream.lane_state import LaneState
from energon_bridge.core.stream.settings import RunSettings
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.tools.columns.amounts import counting
from energon_bridge.tools.columns.expression import kept_samples

_STREAM = (
    *("batch_size", "shuffle_buffer_size", "max_samples_per_sequence", "parallel_shard_iters", "batch_drop_last"),
    *("packing_buffer_size", "max_tokens_per_microbatch"),
)
_GIVE_MIX = "give the mix that the run was started with (--mix)"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on a number of ranks.

    Attributes:
        spec: What it reads.
        plan: The leaves and their order, and the ranks.
        state: The saved state that it was described by; None if it is a run from the beginning.
        lanes: The lanes in the state, by number.
        per_step: Microbatches of each rank in a step of the optimizer; 1 in passes, which have no such steps.
        samples_per_batch: Samples that a microbatch takes: on average, where rows are packs.
    """

    spec: DatasetSpec
    plan: RunPlan
    state: State | None = None
    lanes: Mapping[int, LaneState] = field(default_factory=dict)
    per_step: int = 1
    samples_per_batch: float = 1.0

    @property
    def microbatches(self) -> int:
        """Microbatches that the run had delivered when the state was saved."""
        return 0 if self.state is None else int(self.state["microbatches"])

    @property
    def world_size(self) -> int:
        return self.plan.config.dp_size

    @property
    def num_lanes(self) -> int:
        return self.plan.num_lanes


def run_of_mix(spec: DatasetSpec, samples_per_batch: float | None = None) -> Run:
    """Return a run from its beginning, on the ranks and lanes of the dataset's worker configuration.

    `samples_per_batch` are those that a microbatch takes, if rows are packs.
    """
    plan = plan_run(spec, spec.worker_config)
    ranks = plan.config.dp_size
    group = plan.config.microbatches_per_global_batch
    Ownership(plan.num_lanes, ranks, 0)  # refuses more ranks than lanes
    if spec.buckets is not None:
        raise _of_buckets()
    per_step = 1 if group is None or spec.ends else group // ranks
    return Run(spec=spec, plan=plan, per_step=per_step, samples_per_batch=samples_per_batch or spec.rows)


def run_of_state(
    state: State,
    *,
    world_size: int,
    mix: MixLike | None = None,
    global_batch_size: int | None = None,
    split_part: str | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_remote_code: bool = False,
) -> Run:
    """Return the run that a state belongs to.

    Args:
        state: The state, merged from those of several ranks.
        world_size: Data-parallel ranks; a state knows none.
        global_batch_size: Samples, or packs, of a step of the optimizer; None: one microbatch on each rank.
        mix: What the run was started with; needed if the state does not contain it, or its datasets have moved.
        split_part: Of `mix`; default: that of the state's leaves.
        dataset_config, split_config: Names of the files in `.nv-meta`.
        trust_remote_code: Allow the dataset's `sample_loader.py` to be loaded.

    Raises:
        DatasetError: A dataset cannot be opened.
        DatasetMismatchError: A dataset is not the one of the state any more.
        ConfigurationError: The mix has to be given, or the content of samples decides the order.
    """
    saved = read(state)
    settings = saved.settings
    lanes = saved.lanes
    held = saved.held
    if any(name in settings for name in ("packing_buffer_size", "grouped", "max_tokens_per_microbatch")) or held:
        raise ConfigurationError(
            "cannot name the samples of a step without reading data: the task encoder packs, groups or yields "
            "several batches, so the content of samples decides which share a microbatch"
            + ". `energon preview` with --config or --encoder lets the run deliver it"
            + (f" (drawn and not delivered yet: {held} samples)" if held else "")
        )
    spec = spec_of_state(
        saved,
        world_size=world_size,
        mix=mix,
        split_part=split_part,
        dataset_config=dataset_config,
        split_config=split_config,
        trust_remote_code=trust_remote_code,
    )
    blocks = {row["identity"]: row["block"] for row in saved.leaves if not row["parked"]}
    plan = plan_run(spec, spec.worker_config, saved.num_lanes if spec.kind == "train" else None, saved.changes, blocks)
    # What samples become, as pixels or texts, is the same however little this knows of the run's task encoder.
    content = {name: value for name, value in settings.items() if name not in ORDER_SETTINGS}
    check_fits(saved, spec.kind, content | plan.settings, plan.table)
    plan = plan.with_banned(banned_of(saved, saved.bans, spec.leaves))
    if spec.kind == "train":
        Ownership(plan.num_lanes, world_size, 0)
        # Retired leaves are at the end, and nothing is drawn from them.
        count = len(plan.leaves)
        lanes = {lane: replace(s, leaf_draws=s.leaf_draws[:count], sums=s.sums[:count]) for lane, s in lanes.items()}
    per_step = microbatches_of_step(spec, world_size, global_batch_size)
    samples = spec.rows
    return Run(spec=spec, plan=plan, state=state, lanes=lanes, per_step=per_step, samples_per_batch=samples)


def spec_of_state(
    saved: SavedRun,
    *,
    world_size: int,
    mix: MixLike | None = None,
    split_part: str | None = None,
    task_encoder: TaskEncoder[Any, Any, Any, Any] | None = None,
    **names: Any,
) -> DatasetSpec:
    """Return what the run of a state reads, at the paths in it, with the state's settings.

    Args:
        saved: The state.
        world_size, mix, split_part: As of `run_of_state`; `names` are its other arguments.
        task_encoder: Default: one that decodes images as the state says.

    Raises:
        DatasetError: A dataset cannot be opened.
        ConfigurationError: The mix has to be given.
    """
    settings = saved.settings
    if "buckets" in settings:
        raise _of_buckets()
    if "dp_size" in settings:
        raise ConfigurationError(
            "this is the state of a validation pass of a program written for megatron-energon, whose order depends on "
            "its workers: only that program can continue it. Give a state of its training data"
        )
    kind = saved.kind
    num_lanes = saved.num_lanes if kind == "train" else None
    config = WorkerConfig(rank=0, world_size=world_size, num_workers=0, seed=settings["seed"], num_lanes=num_lanes)
    rows = [row for row in saved.leaves if not row["parked"]]
    stream = {name: settings[name] for name in _STREAM if name in settings}
    encoder = _Decoding(settings) if task_encoder is None else task_encoder
    if mix is None:
        combined = _mix(kind, settings, rows)  # first: paths of joins are no folders
        try:
            return DatasetSpec(
                leaves=_leaves_of_state(settings, rows, **names),
                mix=combined,
                settings=RunSettings(kind=kind, task_encoder=encoder, **stream),
                worker_config=config,
            )
        except NoCookerError as error:
            raise NoCookerError(f"{error}. A state does not contain subflavors of a mix: {_GIVE_MIX}") from error
    parts = {row["split_part"] for row in rows}
    names["split_part"] = split_part or (parts.pop() if len(parts) == 1 else "train")
    of_all = {"worker_config": config, "task_encoder": encoder, **stream, **names}
    if kind == "finite":
        return get_val_dataset(mix, **of_all)
    return _shuffled_as_before(get_train_dataset(mix, repeat=kind == "train", **of_all), settings)


class _Decoding(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Turns images if the settings of a state say so; of transparency they say nothing: it becomes white."""

    def __init__(self, settings: State) -> None:
        super().__init__()
        turned = settings.get("autorotate", False) or settings.get("image_backend") == "torchcodec"
        self.decoder = SampleDecoder(autorotate=bool(turned))

    @property
    def image_alpha(self) -> str:
        return "white"


def microbatches_of_step(spec: DatasetSpec, world_size: int, global_batch_size: int | None) -> int:
    """Return the microbatches of a rank in a step of the optimizer; without a size, or in passes, it is one.

    Raises:
        ConfigurationError: The ranks cannot deliver so many samples together.
    """
    if spec.kind != "train" or global_batch_size is None:
        return 1
    per_step, rest = divmod(global_batch_size, spec.rows * world_size)
    if rest or not per_step:
        raise ConfigurationError(
            f"--global-batch-size {global_batch_size} is not a multiple of {spec.rows * world_size}, the samples "
            f"that {world_size} ranks with microbatches of {spec.rows} deliver at once"
        )
    return per_step


def _of_buckets() -> ConfigurationError:
    return ConfigurationError(
        "the microbatches of this run come from buckets (group_by), which forecasts do not know: `energon preview` "
        "with --config lets the run deliver them"
    )


def _shuffled_as_before(spec: DatasetSpec, settings: State) -> DatasetSpec:
    """Return a given mix with the epochs that a state's leaves are shuffled over."""
    epochs = dict(
        zip((leaf.identity for leaf in spec.ordered), _shuffle_epochs(settings, len(spec.leaves)), strict=True)
    )
    leaves = tuple(replace(leaf, shuffle_epochs=epochs[leaf.identity]) for leaf in spec.leaves)
    return replace(spec, leaves=leaves)


def _leaves_of_state(
    settings: State, rows: Sequence[State], *, trust_remote_code: bool, **names: str
) -> tuple[OpenLeaf, ...]:
    """Open the leaves of a state at the paths in it."""
    leaves = []
    epochs = _shuffle_epochs(settings, len(rows))
    opener = DatasetOpener(trust_remote_code=trust_remote_code)
    for row, weight, shuffle in zip(rows, _weights(rows), epochs, strict=True):
        ref = _reference(row, **names)
        dataset = opener.open(ref)
        lines, _, text = row["subset"].partition(" where ")
        first, _, last = lines.partition(":")
        start = int(first or 0)
        stop = int(last or dataset.num_samples)
        leaf = OpenLeaf(
            dataset=dataset,
            start=start,
            stop=stop,
            filter=text,
            kept=kept_samples(dataset, text, start, stop, where=row["path"]) if text else None,
            weight=weight,
            shuffle_epochs=shuffle,
        )
        # Leaves of the same content differ in their occurrence, which only the identity tells.
        alike = (replace(leaf, occurrence=number) for number in range(len(rows)))
        leaf = next((one for one in alike if one.identity == row["identity"]), leaf)
        leaves.append(counting(leaf, settings["unit"], where=row["path"]) if "unit" in settings else leaf)
    return tuple(leaves)


def _mix(kind: str, settings: State, rows: Sequence[State]) -> Mix:
    """Return how the leaves of a state are combined.

    Raises:
        ConfigurationError: The state does not say it.
    """
    if any(row["path"].startswith(JOIN_OF) for row in rows):
        raise ConfigurationError(f"a state does not contain how datasets are joined: {_GIVE_MIX}")
    children = tuple(_reference(row) for row in rows)
    mode = settings.get("mode", "concat")  # validation has no mode: it takes its leaves in the order of the state
    given = _weights(rows)
    if len(rows) == 1:
        return flatten(children[0])
    root: TreeNode
    if kind == "finite":
        root = Concat(children=children)
    elif mode == "repetitions":
        root = MixedEpochs(children=children, repetitions=given)
    elif mode == "weights" and "schedule" not in settings and sum(given) == 1:
        weights = tuple(WeightSchedule(kind="constant", points=((0, weight),)) for weight in given)
        root = BlendNode(children=children, weights=weights, unit=settings.get("unit"))
    else:
        what = "weights that several datasets share by their sizes"
        if "schedule" in settings:
            what = "weights that follow a schedule"
        elif mode == "concat":
            what = "the order in which datasets are concatenated"
        raise ConfigurationError(f"a state does not contain {what}: {_GIVE_MIX}")
    return flatten(root)


def _reference(row: State, **names: Any) -> LeafRef:
    path = row["path"]
    return LeafRef(path=path, split_part=row["split_part"], is_jsonl=is_jsonl(path), where="the state", **names)


def _weights(rows: Sequence[State]) -> tuple[Fraction, ...]:
    return tuple(Fraction(row["share"] or 1) for row in rows)


def _shuffle_epochs(settings: State, leaves: int) -> list[int | None]:
    """Return for each leaf the epochs that are shuffled as one, None for the dataset's own order."""
    setting = settings.get("shuffle", False)
    each = setting if isinstance(setting, list) else [setting] * leaves
    if len(each) != leaves:
        each = [True] * leaves  # another mix: refused when it is compared with the state
    return [(1 if value else None) if isinstance(value, bool) else value for value in each]
