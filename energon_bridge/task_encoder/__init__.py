"""Task encoders: what becomes of raw samples on their way to a batch.

`base` has the hooks, `augment` wraps an encoder, `current` says what a hook is working on, `decoder`, `images` and
`deferred` turn bytes into values, `collate`, `convert` and `concat` turn samples into batches, records of one kind into
another, and batches into one. `packing` (with `bins`) and `grouping` are ready-made choices of what shares a pack or a
batch, and `costs` says what a batch costs. The `multimodal` encoder makes tokens, labels and pixel values of images and
texts: `sample_encoders` say what a sample has to say, `conversation` how that is written, `sequences` and
`packed_sequences` what the model is given.
"""

from __future__ import annotations

from energon_bridge.task_encoder.base import (
    AugmentTaskEncoder,
    DefaultTaskEncoder,
    TaskEncoder,
    default_hook,
    stateless,
)
from energon_bridge.task_encoder.collate import (
    batch_list,
    batch_pad_stack,
    batch_samples,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)
from energon_bridge.task_encoder.conversation import (
    Conversation,
    ConversationTemplateConfig,
    Document,
    ImageToken,
    MultiModalSampleConfig,
    Piece,
    Turn,
    TurnLayout,
    chatml_template,
    llava_template,
)
from energon_bridge.task_encoder.cooking import Cooker, basic_sample_keys, cooker
from energon_bridge.task_encoder.costs import BatchCost, attention_pairs, num_tokens, vision_patches
from energon_bridge.task_encoder.decoder import SampleDecoder
from energon_bridge.task_encoder.deferred import DeferredImage
from energon_bridge.task_encoder.grouping import LengthGrouper
from energon_bridge.task_encoder.multimodal import MultiModalTaskEncoder
from energon_bridge.task_encoder.packed_sequences import batch_packs, pack_sequences, packed_seq_params, unpack_batch
from energon_bridge.task_encoder.packing import OverLong, Packer, cost_limit

__all__ = [
    "AugmentTaskEncoder",
    "BatchCost",
    "Conversation",
    "ConversationTemplateConfig",
    "Cooker",
    "DefaultTaskEncoder",
    "DeferredImage",
    "Document",
    "ImageToken",
    "LengthGrouper",
    "MultiModalSampleConfig",
    "MultiModalTaskEncoder",
    "OverLong",
    "Packer",
    "Piece",
    "SampleDecoder",
    "TaskEncoder",
    "Turn",
    "TurnLayout",
    "attention_pairs",
    "basic_sample_keys",
    "batch_list",
    "batch_packs",
    "batch_pad_stack",
    "batch_samples",
    "batch_stack",
    "chatml_template",
    "concat_pad",
    "cooker",
    "cost_limit",
    "default_hook",
    "generic_batch",
    "generic_concat",
    "homogeneous_concat_mix",
    "llava_template",
    "num_tokens",
    "pack_sequences",
    "packed_seq_params",
    "stateless",
    "unpack_batch",
    "vision_patches",
]
