"""The task encoder of a run, and the control that shows whether the model reads its images."""

from __future__ import annotations

from collections.abc import Sequence

from energon_bridge.task_encoder.multimodal import MultiModalBatch, MultiModalSample, MultiModalTaskEncoder
from energon_bridge.task_encoder.packed_sequences import MultiModalPack
from energon_bridge.task_encoder.packing import SAMPLES, Packer
from energon_bridge.training.config import DataConfig
from energon_bridge.training.presets import ModelBundle


class ShuffledImagesTaskEncoder(MultiModalTaskEncoder):
    """Give each sample of a microbatch the image of the one before it.

    The order of the stream is random, so these images say nothing about the texts; a model that still gets the texts
    right does not need its images. A microbatch of one sample keeps its image.
    """

    def batch(self, samples: Sequence[MultiModalSample | MultiModalPack]) -> MultiModalBatch:
        """Rotate the images by one row, then batch as usual."""
        images = [sample.visual for sample in samples]
        for sample, visual in zip(samples, images[-1:] + images[:-1], strict=True):
            sample.visual = visual
        return super().batch(samples)


ENCODER_SETTINGS = ("shuffle_images", "packing_max_samples", "packing_max_images")
"""Settings of the data that are the encoder's, and not the data module's."""


def training_task_encoder(config: DataConfig, bundle: ModelBundle) -> MultiModalTaskEncoder:
    """Return the task encoder for a model."""
    kind = ShuffledImagesTaskEncoder if config.shuffle_images else MultiModalTaskEncoder
    return kind(
        bundle.tokenizer,
        bundle.image_processor,
        bundle.sample_config,
        config.seq_length,
        image_tokens_per_image=bundle.image_tokens,
        packer=_packer(config),
    )


def _packer(config: DataConfig) -> Packer[MultiModalSample]:
    limits = {"tokens": config.seq_length, SAMPLES: config.packing_max_samples, "images": config.packing_max_images}
    return Packer(limits={name: limit for name, limit in limits.items() if limit is not None}, size_of=_sizes)


def _sizes(sample: MultiModalSample) -> dict[str, int]:
    return {"tokens": len(sample.tokens), "images": sample.num_images}
