"""Task encoders: turn raw samples into batches.

`base` has the hooks, `current` what a hook can ask the engine, `cooking` the cookers of crude datasets. `decoder`,
`images` and `deferred` turn bytes into values; `collate` turns samples into batches. `packing` (and `LengthGrouper` in
`collate`) are ready-made choices of which samples share a pack or a batch, and `costs` computes what a batch costs. The
`multimodal` encoder turns images and texts into tokens, labels and pixel values: `conversation` and `sample_encoders`
read the conversation of a sample, `layout` renders it as text, `sequences` and `packed_sequences` build the model's
input.
`families` has encoders for models of Hugging Face.
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
    LengthGrouper,
    batch_list,
    batch_pad_stack,
    batch_samples,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)
from energon_bridge.task_encoder.conversation import Conversation, Document, Part, Piece, Turn
from energon_bridge.task_encoder.cooking import Cooker, basic_sample_keys, cooker
from energon_bridge.task_encoder.costs import BatchCost, ColumnCost, attention_pairs, num_tokens, vision_patches
from energon_bridge.task_encoder.decoder import SampleDecoder
from energon_bridge.task_encoder.deferred import DeferredImage
from energon_bridge.task_encoder.inputs import check_packing, model_inputs
from energon_bridge.task_encoder.layout import (
    ConversationTemplateConfig,
    ImageToken,
    MultiModalSampleConfig,
    TurnLayout,
    chatml_template,
    llava_template,
)
from energon_bridge.task_encoder.multimodal import MultiModalTaskEncoder
from energon_bridge.task_encoder.packed_sequences import batch_packs, pack_sequences, packed_seq_params, unpack_batch
from energon_bridge.task_encoder.packing import OverLong, Packer, cost_limit

__all__ = [
    "AugmentTaskEncoder",
    "BatchCost",
    "ColumnCost",
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
    "Part",
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
    "check_packing",
    "concat_pad",
    "cooker",
    "cost_limit",
    "default_hook",
    "generic_batch",
    "generic_concat",
    "homogeneous_concat_mix",
    "llava_template",
    "model_inputs",
    "num_tokens",
    "pack_sequences",
    "packed_seq_params",
    "stateless",
    "unpack_batch",
    "vision_patches",
]
