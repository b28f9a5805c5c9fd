"""Megatron-Bridge's task encoder configurations, with its names and fields, and batches as its steps read them.

They build this package's chat encoders for Qwen-VL and LLaVA, and Megatron-Bridge's own for Nemotron Omni. A step of
Megatron-Bridge reads a dict: `input_ids`, `labels` (already shifted), `loss_mask`, `position_ids` and `attention_mask`;
the media as one object, `visual_inputs`; and for packed rows `cu_seqlens_q` and the like.

*Packing inside a batch* concatenates the samples of a microbatch into one row. Packing from a buffer
(`packing_buffer_size`) fills rows better, and its rows have the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.encoder.task_encoder import TaskEncoder
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.sequences import MultiModalBatch, MultiModalSample
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.families.known_families import load_pretrained
from energon_bridge.models.packing.packed_sequences import MultiModalPack, ends_of_packs, pack_sequences
from energon_bridge.trainers.task_encoders import TaskEncoderContext, load_processor

__all__ = [
    "BridgeTaskEncoder",
    "HFEnergonTaskEncoderConfig",
    "NemotronOmniEnergonTaskEncoderConfig",
    "QwenVLEnergonTaskEncoderConfig",
    "VisualInputs",
]


@dataclass(kw_only=True)
class VisualInputs:
    """The media of a microbatch, as Megatron-Bridge's steps expect them: each field is a tensor or None."""

    pixel_values: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    image_grid_thw: Tensor | None = None
    video_grid_thw: Tensor | None = None
    second_per_grid_ts: Tensor | None = None
    image_sizes: Tensor | None = None
    image_position_ids: Tensor | None = None
    mm_token_type_ids: Tensor | None = None

    def as_model_kwargs(self) -> dict[str, Tensor]:
        """Return the fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def normalized_for_model(self) -> dict[str, Tensor]:
        """Return the model's keyword arguments; all media are already concatenated."""
        return self.as_model_kwargs()


class BridgeTaskEncoder(ChatTemplateTaskEncoder):
    """A `ChatTemplateTaskEncoder` whose batches are the dicts that Megatron-Bridge's steps read.

    Args:
        tokenizer: As of `ChatTemplateTaskEncoder`.
        family: As of `ChatTemplateTaskEncoder`.
        config: As of `ChatTemplateTaskEncoder`.
        pack_batches_to_multiple_of: Pack the samples of each microbatch into one row, each padded to a multiple of
            this; None: one row per sample.
        visual_keys: Media fields to keep; None: all.
        mtp: As of `packed_seq_params`, for models with `mtp_num_layers`.
    """

    def __init__(
        self,
        tokenizer: Any,
        family: Any,
        config: ChatConfig | None = None,
        *,
        pack_batches_to_multiple_of: int | None = None,
        visual_keys: Sequence[str] | None = None,
        mtp: bool = False,
    ) -> None:
        super().__init__(tokenizer, family, config)
        self.pack_batches_to_multiple_of = pack_batches_to_multiple_of
        self.visual_keys = None if visual_keys is None else frozenset(visual_keys)
        self.mtp = mtp

    def batch(self, samples: Sequence[MultiModalSample | MultiModalPack]) -> MultiModalBatch:
        """Pad the sequences to a common length, or concatenate them into one row."""
        if self.pack_batches_to_multiple_of is None or isinstance(samples[0], MultiModalPack):
            return super().batch(samples)
        length = self._row_length if self.config.pad_to_max_length else None
        unpacked = [sample for sample in samples if isinstance(sample, MultiModalSample)]
        row = pack_sequences(unpacked, self._filling, multiple_of=self.pack_batches_to_multiple_of, length=length)
        # Whose samples it has is said sample by sample, as of every other batch.
        made = self._batch_packs([row])
        return MultiModalBatch.from_samples(unpacked, **{name: getattr(made, name) for name in _OF_ROWS})

    def encode_batch(self, batch: MultiModalBatch) -> dict[str, Any]:  # type: ignore[override]
        """Return the dict that a step reads.

        Megatron-Bridge's models make positions on three axes themselves; for others there are `mrope_position_ids`.

        Raises:
            ConfigurationError: `visual_keys` leaves out media that the batch has.
        """
        visual = {name: value for name, value in batch.visual_inputs.items() if isinstance(value, Tensor)}
        visual |= {} if batch.pixel_values is None else {"pixel_values": batch.pixel_values}
        visual |= {} if batch.mm_token_type_ids is None else {"mm_token_type_ids": batch.mm_token_type_ids}
        if self.visual_keys is not None:
            if dropped := sorted(visual.keys() - self.visual_keys - {"mm_token_type_ids"}):
                raise ConfigurationError(
                    f"the batch has {', '.join(dropped)}, which visual_keys={tuple(sorted(self.visual_keys))} leaves "
                    "out: the model would train on placeholders without media, or read them wrongly. Add them"
                )
            visual = {name: value for name, value in visual.items() if name in self.visual_keys}
        packed = batch.cu_seqlens is not None
        made: dict[str, Any] = {
            "__key__": batch.__key__,
            "__restore_key__": batch.__restore_key__,
            "__sources__": batch.__sources__,
            "input_ids": batch.tokens,
            "labels": batch.labels,
            "loss_mask": batch.loss_mask,
            "position_ids": batch.position_ids,
            "attention_mask": None if packed else batch.attention_mask,
            "visual_inputs": VisualInputs(**visual) if visual else None,
        }
        for name in ("mrope_position_ids", "pixel_norm"):
            made |= {} if getattr(batch, name) is None else {name: getattr(batch, name)}
        if packed:
            ends = ends_of_packs(batch, mtp=self.mtp) | {"total_tokens": int(batch.tokens.numel())}
            longest = torch.tensor(batch.max_seqlen, dtype=torch.int32)
            made |= ends | {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        return made  # the rest, `__valid__` among it, the loader adds


_OF_ROWS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "pixel_values", "visual_inputs", "answers"),
    *("num_images", "sample_keys", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"),
    *("mm_token_type_ids", "mrope_position_ids", "pixel_norm", "segments", "blank_media"),
)


# Not frozen, unlike other configurations: Megatron-Bridge changes fields after they were made.
@dataclass(kw_only=True, slots=True)
class HFEnergonTaskEncoderConfig:
    """Declares the encoder of a model of Hugging Face: LLaVA or Qwen-VL, whichever the folder holds.

    Args:
        hf_processor_path: Folder or hub name of the model, with tokenizer, image processor and `config.json`.
        hf_processor_revision: Must be None: give the folder of a snapshot.
        visual_keys: Media fields that batches keep; what the model needs to read them must be among them.
        min_pixels: Fewest pixels of an image; Qwen-VL only.
        max_pixels: The same for the most.
        blank_media: A microbatch without images, or without videos, gets a blank one; a choice of ours.
        trust_remote_code: Of no use: nothing that is loaded runs code.
        mtp: As of `packed_seq_params`, for models with `mtp_num_layers`.
    """

    hf_processor_path: str
    hf_processor_revision: str | None = None
    visual_keys: tuple[str, ...] = ("pixel_values",)
    min_pixels: int | None = None
    max_pixels: int | None = None
    blank_media: bool = False
    trust_remote_code: bool | None = None
    mtp: bool = False

    def build(self, context: TaskEncoderContext) -> BridgeTaskEncoder:
        """Load what it needs and make the encoder.

        Raises:
            ConfigurationError: Something cannot be loaded, the family is not known, or a setting is not available.
        """
        return _build(self, context, {}, visual_keys=self.visual_keys)


@dataclass(kw_only=True, slots=True)
class QwenVLEnergonTaskEncoderConfig:
    """Declares the encoder of a Qwen-VL model.

    Patch sizes are those of the model's image processor.

    Args:
        hf_processor_path: Folder or hub name of the model, with tokenizer, image processor and `config.json`.
        hf_processor_revision: Must be None: give the folder of a snapshot.
        temporal_patch_size: That of the image processor counts.
        spatial_merge_size: The same.
        patch_size: The same.
        min_pixels: Fewest pixels of an image.
        max_pixels: Most pixels of an image.
        max_num_images: A sample with more images or videos is left out.
        max_num_frames: Most frames of a video, evenly spaced.
        max_visual_tokens: A sample with more image and video tokens is left out.
        blank_media: As of `HFEnergonTaskEncoderConfig`.
        trust_remote_code: Of no use: nothing that is loaded runs code.
        mtp: As of `packed_seq_params`, for models with `mtp_num_layers`.
    """

    hf_processor_path: str
    hf_processor_revision: str | None = None
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    patch_size: int = 14
    min_pixels: int = 200704
    max_pixels: int = 1003520
    max_num_images: int | None = 10
    max_num_frames: int | None = 60
    max_visual_tokens: int | None = 16384
    blank_media: bool = False
    trust_remote_code: bool | None = None
    mtp: bool = False

    def build(self, context: TaskEncoderContext) -> BridgeTaskEncoder:
        """Load what it needs and make the encoder.

        Raises:
            ConfigurationError: Something cannot be loaded, it is no Qwen-VL model, or a setting is not available.
        """
        limits = {name: getattr(self, name) for name in ("max_num_images", "max_num_frames", "max_visual_tokens")}
        return _build(self, context, limits, visual_keys=None)


@dataclass(kw_only=True, slots=True)
class NemotronOmniEnergonTaskEncoderConfig:
    """Declares Megatron-Bridge's own encoder of Nemotron Omni; Megatron-Bridge must be installed.

    That encoder imports `megatron.energon`: the program calls `energon_bridge.compat.install()` first.

    Args:
        hf_processor_path: Folder or hub name of the model's processor.
        max_audio_duration: Longest sound, in seconds.
        num_mel_bins: Frequencies of a spectrogram.
        visual_keys: Must be `("pixel_values",)`.
        temporal_patch_size: Frames of a patch.
        video_fps: Frames a second that are taken from a video.
        video_nframes: Most frames of a video.
        use_temporal_video_embedder: Encode videos; without it, a sample with a video is an error.
        patch_dim: Edge of a patch, in pixels.
        collapse_image_tokens: Return one token per image, as older versions of the model read them.
        trust_remote_code: Run code that comes with the processor; None: the run's setting.
    """

    hf_processor_path: str
    max_audio_duration: float
    num_mel_bins: int
    visual_keys: tuple[str, ...]
    temporal_patch_size: int
    video_fps: float
    video_nframes: int
    use_temporal_video_embedder: bool
    patch_dim: int
    collapse_image_tokens: bool = False
    trust_remote_code: bool | None = None

    def build(self, context: TaskEncoderContext) -> Any:
        """Load the processor and make the encoder.

        Raises:
            ConfigurationError: Megatron-Bridge cannot be imported, or not over this package's `megatron.energon`; the
                processor cannot be loaded; or Megatron-Bridge refuses a value.
        """
        name = type(self).__name__
        try:
            from megatron.bridge.data.energon.nemotron_omni_task_encoder import NemotronOmniTaskEncoder
        except ImportError as error:
            raise ConfigurationError(
                f"{name}: cannot import Megatron-Bridge's NemotronOmniTaskEncoder, which encodes Nemotron Omni "
                f"({error}). Install Megatron-Bridge, and call energon_bridge.compat.install() before anything imports "
                "megatron.energon"
            ) from error
        if not issubclass(NemotronOmniTaskEncoder, TaskEncoder):
            raise ConfigurationError(
                f"{name}: Megatron-Bridge's NemotronOmniTaskEncoder was imported over the real megatron-energon: call "
                "energon_bridge.compat.install() before anything imports megatron.energon"
            )
        trust = context.trust_remote_code if self.trust_remote_code is None else self.trust_remote_code
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        for key in ("hf_processor_path", "trust_remote_code"):
            del settings[key]
        try:
            return NemotronOmniTaskEncoder(
                processor=load_processor(self.hf_processor_path, trust_remote_code=trust),
                seq_length=context.seq_length,
                pad_to_max_length=context.pad_to_max_length,
                pad_to_multiple_of=context.pad_to_multiple_of,
                enable_in_batch_packing=context.pack_batches_to_multiple_of is not None,
                in_batch_packing_pad_to_multiple_of=context.pack_batches_to_multiple_of or 1,
                **settings,
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name}: {error}") from error


def declared_by_bridge(config: Any) -> Any:
    """Return this package's declaration for one of Megatron-Bridge's own classes; others are returned unchanged."""
    kind = _BY_NAME.get(type(config).__name__)
    if kind is None or isinstance(config, kind):
        return config
    return kind(**{name: getattr(config, name) for name in kind.__dataclass_fields__ if hasattr(config, name)})


_BY_NAME: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (HFEnergonTaskEncoderConfig, QwenVLEnergonTaskEncoderConfig, NemotronOmniEnergonTaskEncoderConfig)
}


def _build(
    config: HFEnergonTaskEncoderConfig | QwenVLEnergonTaskEncoderConfig,
    context: TaskEncoderContext,
    limits: Mapping[str, Any],
    *,
    visual_keys: Sequence[str] | None,
) -> BridgeTaskEncoder:
    name = type(config).__name__
    if config.hf_processor_revision is not None:
        raise ConfigurationError(
            f"{name}: hf_processor_revision={config.hf_processor_revision!r} is not available: download the snapshot "
            "and pass its folder as hf_processor_path"
        )
    loaded = load_pretrained(config.hf_processor_path)
    family: Any = loaded.family
    qwen = hasattr(family, "min_pixels")
    if not qwen and (isinstance(config, QwenVLEnergonTaskEncoderConfig) or config.min_pixels or config.max_pixels):
        raise ConfigurationError(
            f"{name}: hf_processor_path={config.hf_processor_path!r} is not a Qwen-VL model, but min_pixels and "
            "max_pixels are bounds of Qwen-VL images: use HFEnergonTaskEncoderConfig without them"
        )
    if qwen:
        bounds = {key: getattr(config, key) for key in ("min_pixels", "max_pixels")}
        family = replace(family, **{key: value for key, value in bounds.items() if value is not None})
        if visual_keys is not None and "image_grid_thw" not in visual_keys:
            raise ConfigurationError(
                f"{name}: visual_keys={tuple(visual_keys)!r} leaves out image_grid_thw, without which a Qwen-VL model "
                "cannot read its images: use QwenVLEnergonTaskEncoderConfig, or add it"
            )
    chat = ChatConfig(
        seq_length=context.seq_length,
        pad_to_multiple_of=context.pad_to_multiple_of,
        pad_to_max_length=context.pad_to_max_length,
        chat_template=loaded.chat_template,
        blank_media=config.blank_media,
        **limits,
    )
    return BridgeTaskEncoder(
        loaded.tokenizer,
        family,
        chat,
        pack_batches_to_multiple_of=context.pack_batches_to_multiple_of,
        visual_keys=visual_keys,
        mtp=config.mtp,
    )
