"""The names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]

from .base import (
    AugmentTaskEncoder as AugmentTaskEncoder,
    DefaultTaskEncoder as DefaultTaskEncoder,
    TaskEncoder as TaskEncoder,
    default_hook as default_hook,
    stateless as stateless,
)
from .collate import (
    batch_list as batch_list,
    batch_pad_stack as batch_pad_stack,
    batch_samples as batch_samples,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    generic_batch as generic_batch,
)
from .conversation import (
    Conversation as Conversation,
    Document as Document,
    Part as Part,
    Piece as Piece,
    Turn as Turn,
)
from .cooking import (
    Cooker as Cooker,
    basic_sample_keys as basic_sample_keys,
    cooker as cooker,
)
from .costs import (
    BatchCost as BatchCost,
    ColumnCost as ColumnCost,
    attention_pairs as attention_pairs,
    cost_limit as cost_limit,
    num_tokens as num_tokens,
    vision_patches as vision_patches,
)
from .decoder import (
    SampleDecoder as SampleDecoder,
)
from .grouping import (
    LengthGrouper as LengthGrouper,
)
from .images import (
    DeferredImage as DeferredImage,
)
from .inputs import (
    check_packing as check_packing,
    model_inputs as model_inputs,
)
from .joining import (
    generic_concat as generic_concat,
    homogeneous_concat_mix as homogeneous_concat_mix,
)
from .layout import (
    ConversationTemplateConfig as ConversationTemplateConfig,
    ImageToken as ImageToken,
    MultiModalSampleConfig as MultiModalSampleConfig,
    TurnLayout as TurnLayout,
    chatml_template as chatml_template,
    llava_template as llava_template,
)
from .multimodal import (
    MultiModalTaskEncoder as MultiModalTaskEncoder,
)
from .packed_sequences import (
    batch_packs as batch_packs,
    pack_sequences as pack_sequences,
    packed_seq_params as packed_seq_params,
    unpack_batch as unpack_batch,
)
from .packing import (
    OverLong as OverLong,
    Packer as Packer,
)
