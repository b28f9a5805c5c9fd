"""The configuration of a training run: the settings and their meaning.

A run is described by one YAML file of nested sections plus `section.key=value` overrides; `load_config` reads both (see
`config_file`). Each section is a frozen dataclass, so a run cannot change its own configuration; the resolved one is
written to the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from energon_bridge.core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share one replica of the model; more than one needs `trainer: megatron`.

    `tp * pp * cp` processes are one replica and train on the same batches; the replicas are data-parallel.

    Args:
        tp: Tensor-parallel ranks, which split the heads and columns of every layer.
        pp: Pipeline stages, which split the language model's layers.
        cp: Context-parallel ranks, which split the tokens of every sequence.
        replica_loading: `every_rank` of a replica loads its batches, or `one_rank` does and sends them to the others.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    replica_loading: str = "every_rank"

    @property
    def replica_size(self) -> int:
        """Return the number of processes of one replica of the model."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas in `world_size` processes.

        Raises:
            ConfigurationError: Some processes would be left over.
        """
        replica = self.replica_size
        if world_size % replica:
            lower = world_size // replica * replica
            usable = f"{lower} or {lower + replica}" if lower else str(replica)
            raise ConfigurationError(
                f"cannot divide {world_size} processes: one replica of the model takes parallel.tp={self.tp} * "
                f"parallel.pp={self.pp} * parallel.cp={self.cp} = {replica} processes, so their number must be a "
                f"multiple of {replica}. Start {usable}, or change parallel"
            )
        return world_size // replica


def _wrong_parallel(config: RunConfig) -> Iterator[str]:
    """Yield why the model or its sequences cannot be split like that, on any number of processes."""
    parallel = config.parallel
    model = config.model
    data = config.data
    if min(parallel.tp, parallel.pp, parallel.cp) < 1:
        return
    if config.trainer != "megatron":
        if parallel != ParallelConfig():
            yield (
                f"parallel.tp={parallel.tp} parallel.pp={parallel.pp} parallel.cp={parallel.cp} "
                f"parallel.replica_loading={parallel.replica_loading} split a model over processes, which "
                f"trainer={config.trainer} cannot do: set trainer=megatron, or leave out parallel"
            )
        return
    if model.name_or_path is not None:
        yield (
            f"trainer=megatron builds the presets in megatron-core and does not load model.name_or_path="
            f"{model.name_or_path}: set it to null and choose model.preset, or set trainer=lightning"
        )
    for name, value in (
        ("model.freeze", model.freeze),
        ("model.attn_implementation", model.attn_implementation),
        ("train.gradient_checkpointing", config.train.gradient_checkpointing),
        ("checkpoint.export", config.checkpoint.export),
    ):
        if value:
            yield f"trainer=megatron does not support {name}={value}: leave it out, or set trainer=lightning"
    if config.train.precision not in PRECISIONS:
        yield (
            f"trainer=megatron does not support train.precision={config.train.precision}; use {', '.join(PRECISIONS)}"
        )
    for total, count, words in (
        ("num_heads", parallel.tp, "tensor-parallel ranks (parallel.tp)"),
        ("hidden_size", parallel.tp, "tensor-parallel ranks (parallel.tp)"),
        ("num_layers", parallel.pp, "pipeline stages (parallel.pp)"),
    ):
        if getattr(model, total) % count:
            yield (
                f"model.{total}={getattr(model, total)} cannot be divided between {count} {words}: it must be a "
                f"multiple of {count}"
            )
    if parallel.cp > 1 and data.seq_length % (2 * parallel.cp):
        yield (
            f"data.seq_length={data.seq_length} cannot be divided between parallel.cp={parallel.cp} context-parallel "
            f"ranks: each takes two pieces of every sequence, so it must be a multiple of {2 * parallel.cp}"
        )


PRECISIONS = ("32-true", "bf16-mixed")
"""Values of `train.precision` with `trainer: megatron`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the data is and how it is loaded; names are those of `EnergonMultiModalDataModule`.

    Listed are those that training itself reads or has another default for. A file may also have any other setting of
    the data module that is a plain value (`config_file.data_settings`); these are in `settings`.

    Args:
        path: A prepared dataset, a `.jsonl` file, or the `.yaml` file of a mix.
        micro_batch_size: Samples per forward pass and rank; packs, if samples are packed.
        global_batch_size: Samples per optimizer step over all ranks; gradients are accumulated to reach it.
        seq_length: Longest token sequence, image tokens included; also the most tokens of a pack.
        num_workers: Worker processes per rank for training; 0 loads in the training process.
        balance: `global_batch`: ranks exchange the microbatches of each global batch, so that all have the same work.
            `none`: each rank runs what it loads.
        balance_attention: Cost of a pair of tokens that attend to each other, where a token costs 1; null: by the
            model's configuration (`BatchCost.of_model`).
        balance_patches: Cost of an image patch, where a token costs 1; null: by the model's configuration.
        balance_warmup: Optimizer steps, after the first five, that are timed on all ranks to fit the costs to them
            (`CostWarmup`). 0: none. Needs trainer=lightning.
        packing_buffer_size: Samples per lane from which packs are chosen; null: no packing. Applies to training and
            validation.
        max_tokens_per_microbatch: Make microbatches of as many samples of similar length as fit into this number,
            padding included; chosen from `packing_buffer_size` samples (null: 256). Batch sizes then count
            microbatches, and `micro_batch_size` must be 1. null: no.
        packing_max_samples: Maximum samples per pack; null: as many as fit into `seq_length`.
        packing_max_images: Maximum images per pack; null: no limit. A sample with more images stops the run.
        trust_remote_code: Run the `sample_loader` and `part_filter` that come with the dataset.
        shuffle_images: Give each sample of a microbatch the image of another one: a control experiment.
        chat_template: Template that renders conversations: a Jinja file, or `llava`, `chatml` or `qwen-vl`; null: the
            tokenizer's own template.
        autorotate: Turn images as EXIF says, and videos as their headers say, as viewers do.
        today: The date that a chat template writes, such as '2026-01-31'; null: the day on which the run began.
        system: System prompt for conversations without one of their own.
        min_pixels: Smaller images are enlarged to this area, if image tokens depend on the image; null: as the image
            processor does.
        max_pixels: Larger images are shrunk to this area, in the same way. Both hold for the frames of videos, too.
        max_num_images: Maximum images and videos per sample; samples with more are skipped and counted. null: no limit.
        max_num_frames: Maximum frames of a video, which has two for each second otherwise; null: 768.
        max_video_tokens: Maximum tokens of all videos of a sample, which get fewer frames to fit; null: no limit.
        video_sound: true: omni models hear the sound tracks of videos, in time with their frames.
        max_sound_seconds: Sounds are cut off after so many seconds; null: longer than the model takes is an error.
        blank_media: Microbatches without images (videos, sounds) get a blank one that changes no loss, so that all
            ranks run the whole model, as FSDP and ZeRO need it.
        error_policy: Fields of `ErrorPolicy`, such as `{quarantine: failed.jsonl}` (in the working directory).
        ban: A file of keys, one a line: these training samples are withdrawn from where the run begins or goes on.
        ban_dataset: Path of the only dataset of the mix in which `ban` withdraws them; null: all that have the keys.
        settings: Further settings of the data module, by name.
    """

    path: str = "data/digits"
    micro_batch_size: int = 32
    global_batch_size: int = 32
    seq_length: int = 64
    num_workers: int = 0
    balance: str = "none"
    balance_attention: float | None = None
    balance_patches: float | None = None
    balance_warmup: int = 0
    packing_buffer_size: int | None = None
    max_tokens_per_microbatch: int | None = None
    packing_max_samples: int | None = None
    packing_max_images: int | None = None
    trust_remote_code: bool = False
    shuffle_images: bool = False
    chat_template: str | None = None
    autorotate: bool = False
    today: str | None = None
    system: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_num_images: int | None = None
    max_num_frames: int | None = None
    max_video_tokens: int | None = None
    video_sound: bool | None = None
    max_sound_seconds: float | None = None
    blank_media: bool = False
    error_policy: dict[str, Any] | None = None
    ban: str | None = None
    ban_dataset: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def opening(self) -> dict[str, Any]:
        """The arguments with which the data is opened, only to look at it."""
        names = ("dataset_config", "split_config", "filter")
        chosen = {name: one for name, one in self.settings.items() if name in names}
        return {"trust_remote_code": self.trust_remote_code, **chosen}

    @property
    def packs(self) -> bool:
        """Whether samples are packed."""
        return self.packing_buffer_size is not None and self.max_tokens_per_microbatch is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is trained: a preset, or a local folder or hub name.

    Args:
        preset: A small model built from a configuration, with a tokenizer trained on the captions; used if
            `name_or_path` is null.
        name_or_path: A local folder in the layout of transformers, or a name on the Hugging Face hub.
        init: `pretrained` loads weights, `random` initialises them from the configuration alone. Presets are random.
        image_tokens_per_image: Tokens per image in the sequence; null: derived from the model.
        hidden_size: Presets: width of the vision tower and the language model.
        num_layers: Presets: layers of each.
        num_heads: Presets: attention heads of each.
        image_size: Presets: side of the square that images are resized to, in pixels.
        patch_size: Presets: side of a patch, in pixels.
        vocab_size: Presets: largest vocabulary of the trained tokenizer.
        tokenizer_samples: Presets: captions that the tokenizer is trained on.
        freeze: Parts that are not trained, by their names in the model, with `*` as a wildcard:
            `[model.vision_tower, lm_head]`.
        attn_implementation: `sdpa`, `eager`, `flash_attention_2`, …; null: as transformers chooses. Long packs need
            `flash_attention_2` on a GPU: the others materialise a mask over all pairs of tokens.
    """

    preset: str = "tiny-llava"
    name_or_path: str | None = None
    init: str = "pretrained"
    image_tokens_per_image: int | None = None
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    image_size: int = 32
    patch_size: int = 8
    vocab_size: int = 512
    tokenizer_samples: int = 5_000
    freeze: tuple[str, ...] = ()
    attn_implementation: str | None = None


SIZES = ("preset", "hidden_size", "num_layers", "num_heads", "image_size", "patch_size", "vocab_size")
"""The fields of `ModelConfig` by which a preset is built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay.

    Args:
        lr: Peak learning rate, above 0.
        min_lr: Learning rate at the last step, from 0 to `lr`.
        warmup_steps: Steps until the peak.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        clip_norm: Gradients are scaled down to this norm; 0 leaves them as they are.
    """

    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 100
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Duration, device and precision of training.

    Args:
        max_steps: Optimizer steps.
        log_interval: Optimizer steps between two log lines.
        accelerator: `auto`, `cpu` or `cuda`.
        precision: A precision of Lightning: `32-true`, `bf16-mixed`, …
        deterministic: Use only deterministic algorithms, so that a resumed run repeats the losses bit for bit.
        threads: Torch threads per process; 0: torch's default.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        time_microbatches: Microbatches of the first rank, after ten, whose times are written to `microbatches.jsonl` in
            the run folder, for `energon bench --fit-cost`.
    """

    max_steps: int = 1000
    log_interval: int = 50
    accelerator: str = "auto"
    precision: str = "32-true"
    deterministic: bool = True
    threads: int = 0
    gradient_checkpointing: bool = False
    time_microbatches: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """How the model is evaluated on the validation split.

    Args:
        interval: Optimizer steps between two validations; 0 validates once, at the end.
        limit_batches: Microbatches per rank and validation; null: all; 0: no validation, and no validation split is
            needed.
        generate: Let the model generate answers, and compare them with the expected ones.
        max_new_tokens: Longest answer.
        name: Name of the samples in the last line of a run: `validation NAME read: 97.2 %`.
        each_dataset: Also report the loss on each dataset of a mix.
    """

    interval: int = 0
    limit_batches: int | None = None
    generate: bool = True
    max_new_tokens: int = 16
    name: str = "samples"
    each_dataset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved.

    Args:
        interval: Optimizer steps between two checkpoints; 0 saves only at the end and on SIGTERM.
        keep: How many of the latest checkpoints stay; 0 keeps all.
        export: At the end, write the model with its tokenizer and image processor to the run folder, for the
            `model.name_or_path` of another run.
    """

    interval: int = 200
    keep: int = 2
    export: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    """Weights of a mix that follow the losses of its datasets, as in DoReMi.

    Args:
        reference: A JSON file with the loss per token of a reference model for each dataset of the mix, by its path;
            null: the weights stay those of the mix.
        every: Optimizer steps between two changes of the weights.
        step_size: How far one change goes.
        smoothing: How much of the result is equal weights, from 0 to 1.
    """

    reference: str | None = None
    every: int = 100
    step_size: float = 1.0
    smoothing: float = 1e-3


_POSITIVE = """
    data.micro_batch_size data.global_batch_size data.seq_length data.packing_buffer_size data.packing_max_samples
    data.packing_max_images data.max_tokens_per_microbatch data.min_pixels data.max_pixels data.max_num_images
    data.max_num_frames data.max_video_tokens train.max_steps train.log_interval
    validation.max_new_tokens parallel.tp parallel.pp parallel.cp
"""
_NOT_NEGATIVE = {
    "validation.limit_batches": " (null: all)",
    "train.time_microbatches": " (0: none)",
    **dict.fromkeys(("data.balance_attention", "data.balance_patches", "data.balance_warmup"), ""),
    **dict.fromkeys(("optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm"), ""),
}
"""Settings that are numbers of at least 0, with the text on the meaning of 0 or null for messages."""
_CHOICES = {
    "trainer": ("lightning", "megatron"),
    "model.init": ("pretrained", "random"),
    "data.balance": ("none", "global_batch"),
    "parallel.replica_loading": ("every_rank", "one_rank"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run.

    Args:
        run_dir: The folder of the run: resolved configuration, model, checkpoints, metrics, predictions.
        trainer: `lightning` trains any model of transformers, `megatron` the presets as models of megatron-core.
        seed: Seed of the data order, of the initial weights and of everything random in the model.
    """

    run_dir: str = "runs/default"
    trainer: str = "lightning"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)

    def __post_init__(self) -> None:
        if wrong := "\n".join(self._wrong()):
            raise ConfigurationError(wrong)

    def _wrong(self) -> Iterator[str]:
        """Yield all that is wrong, a line for each."""
        if "://" in self.run_dir:
            yield f"run_dir={self.run_dir}: a run is written to a folder; name one that lasts, such as a mounted bucket"
        values = {name: attrgetter(name)(self) for name in (*_POSITIVE.split(), *_NOT_NEGATIVE, *_CHOICES)}
        wrong = [name for name in _POSITIVE.split() if values[name] is not None and values[name] < 1]
        for name in wrong:
            yield f"{name} must be at least 1, got {values[name]}"
        for name, more in _NOT_NEGATIVE.items():
            if not 0 <= (values[name] or 0) < math.inf:
                yield f"{name} must be at least 0, got {values[name]}{more}"
        for name, choices in _CHOICES.items():
            if values[name] not in choices:
                yield f"{name} must be {' or '.join(map(repr, choices))}, got {values[name]!r}"
        yield from self._wrong_optimizer()
        yield from self._wrong_feedback()
        yield from self._wrong_balance()
        if not wrong:
            yield from self._wrong_data()
        yield from _wrong_parallel(self)

    def _wrong_data(self) -> Iterator[str]:
        if self.data.global_batch_size % self.data.micro_batch_size:
            yield (
                f"data.global_batch_size={self.data.global_batch_size} is not a multiple of "
                f"data.micro_batch_size={self.data.micro_batch_size}"
            )
        yield from self._wrong_packing()
        yield from self._wrong_max_tokens()
        if (self.data.min_pixels or 0) > (self.data.max_pixels or math.inf):
            yield f"data.min_pixels={self.data.min_pixels} is more than data.max_pixels={self.data.max_pixels}"
        if self.data.ban_dataset is not None and self.data.ban is None:
            yield f"data.ban_dataset={self.data.ban_dataset} limits data.ban, which is not set: name a file of keys"
        if self.data.shuffle_images and self.data.micro_batch_size < 2:
            yield "data.shuffle_images=true needs data.micro_batch_size of at least 2"

    def _wrong_optimizer(self) -> Iterator[str]:
        settings = self.optimizer
        if not 0 < settings.lr < math.inf:
            yield f"optimizer.lr must be a number above 0, got {settings.lr}"
        elif not 0 <= settings.min_lr <= settings.lr:
            yield f"optimizer.min_lr must be between 0 and optimizer.lr={settings.lr}, got {settings.min_lr}"
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(settings, name)) < 1:
                yield f"optimizer.{name} must be at least 0 and below 1, got {value}"

    def _wrong_balance(self) -> Iterator[str]:
        data = self.data
        for name in ("balance_attention", "balance_patches"):
            if (value := getattr(data, name)) is not None and data.balance == "none":
                yield (
                    f"data.{name}={value} is a cost of batches, but nothing is balanced: set data.balance=global_batch"
                )
        if data.balance == "none" and data.balance_warmup:
            yield "data.balance_warmup is set, but nothing is balanced: set data.balance=global_batch"
        if data.balance_warmup > 0 and self.trainer == "megatron":
            yield (
                f"data.balance_warmup={data.balance_warmup} does not go with trainer=megatron, whose schedule runs the "
                "microbatches of a step together: set balance_attention and balance_patches to what `energon bench "
                "--fit-cost` prints"
            )

    def _wrong_packing(self) -> Iterator[str]:
        data = self.data
        if not data.packs:
            for name in ("packing_max_samples", "packing_max_images"):
                if (value := getattr(data, name)) is not None:
                    yield (
                        f"data.{name}={value} limits packs, but nothing is packed: set data.packing_buffer_size, to "
                        "some hundred samples for example"
                    )
        elif data.shuffle_images:
            yield (
                "data.shuffle_images=true cannot exchange the images of packs: run the control with "
                "data.packing_buffer_size=null"
            )

    def _wrong_feedback(self) -> Iterator[str]:
        settings = self.feedback
        parallel = self.parallel
        if settings.every < 1 or not 0 < settings.step_size < math.inf or not 0 <= settings.smoothing <= 1:
            yield (
                "feedback needs every of at least 1, step_size above 0 and smoothing from 0 to 1, got "
                f"{settings.every}, {settings.step_size} and {settings.smoothing}"
            )
        if settings.reference is not None and (parallel.pp > 1 or parallel.cp > 1):
            yield (
                f"feedback.reference={settings.reference} with parallel.pp={parallel.pp}, parallel.cp={parallel.cp}: "
                "every rank needs the losses of whole samples. Set both to 1, or leave out the reference"
            )

    def _wrong_max_tokens(self) -> Iterator[str]:
        data = self.data
        if (most := data.max_tokens_per_microbatch) is None:
            return
        if data.micro_batch_size != 1:
            yield (
                f"data.max_tokens_per_microbatch={most} with data.micro_batch_size={data.micro_batch_size}: a "
                "microbatch has as many samples as fit into the tokens. Set data.micro_batch_size=1, and "
                "data.global_batch_size to the microbatches of a step"
            )
        if most < data.seq_length:
            yield (
                f"data.max_tokens_per_microbatch={most} has no room for a sample of data.seq_length={data.seq_length}: "
                "raise it"
            )

    def accumulate(self, world_size: int) -> int:
        """Return the number of microbatches that each of `world_size` ranks runs per optimizer step.

        Raises:
            ConfigurationError: The ranks cannot share the global batch evenly.
        """
        per_step = self.data.micro_batch_size * world_size
        if self.data.global_batch_size % per_step:
            raise ConfigurationError(
                f"data.global_batch_size={self.data.global_batch_size} cannot be divided between {world_size} "
                f"data-parallel ranks of data.micro_batch_size={self.data.micro_batch_size}: it must be a multiple of "
                f"{per_step}"
            )
        return self.data.global_batch_size // per_step


def learning_rate_factor(settings: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of an optimizer step, counted from 0, as a fraction of the peak.

    A linear warm-up and a cosine decay: a function of the step, so there is no state to save.
    """
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    decay_steps = max(1, max_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    floor = settings.min_lr / settings.lr
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
