"""The names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]

from .collate import (
    batch_list as batch_list,
    batch_pad_stack as batch_pad_stack,
    batch_samples as batch_samples,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    generic_batch as generic_batch,
)
from .cooking import (
    Cooker as Cooker,
    basic_sample_keys as basic_sample_keys,
    cooker as cooker,
)
from .decoder import (
    SampleDecoder as SampleDecoder,
)
from .task_encoder import (
    AugmentTaskEncoder as AugmentTaskEncoder,
    DefaultTaskEncoder as DefaultTaskEncoder,
    TaskEncoder as TaskEncoder,
    default_hook as default_hook,
    stateless as stateless,
)
