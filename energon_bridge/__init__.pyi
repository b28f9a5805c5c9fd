"""The public names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]
__version__: str

from .dataloader import EnergonDataloader as EnergonDataloader, cyclic_iter as cyclic_iter
from .datamodule import EnergonMultiModalDataModule as EnergonMultiModalDataModule
from .datasets import (
    get_loader as get_loader,
    get_savable_loader as get_savable_loader,
    get_train_dataset as get_train_dataset,
    get_val_dataset as get_val_dataset,
    get_val_datasets as get_val_datasets,
)
from .errors import (
    EnergonError as EnergonError,
    SkipSample as SkipSample,
)
from .loader.bans import load_keys as load_keys
from .loader.quarantine import quarantine_excludes as quarantine_excludes, read_quarantine as read_quarantine
from .loader.savable import SavableDataLoader as SavableDataLoader
from .mix import (
    AspectTiers as AspectTiers,
    Blender as Blender,
    WeightSchedule as WeightSchedule,
    register_joiner as register_joiner,
)
from .prepare.shard_writer import ShardWriter as ShardWriter, finish_shards as finish_shards
from .replica import (
    make_balance as make_balance,
    make_replica as make_replica,
)
from .samples import (
    Batch as Batch,
    CaptioningSample as CaptioningSample,
    CrudeSample as CrudeSample,
    ImageClassificationSample as ImageClassificationSample,
    ImageSample as ImageSample,
    InterleavedSample as InterleavedSample,
    MultiChoiceVQASample as MultiChoiceVQASample,
    OCRSample as OCRSample,
    Sample as Sample,
    SimilarityInterleavedSample as SimilarityInterleavedSample,
    SourceInfo as SourceInfo,
    TextSample as TextSample,
    VidQASample as VidQASample,
    VQASample as VQASample,
    edataclass as edataclass,
)
from .samples.devices import normalise_on_device as normalise_on_device
from .storage.node_cache import use_node_cache as use_node_cache
from .stores import (
    CachePool as CachePool,
    DecodeFileStore as DecodeFileStore,
    FileStore as FileStore,
    Lazy as Lazy,
    NoCachePool as NoCachePool,
    PrimaryFileStore as PrimaryFileStore,
    SystemFileStore as SystemFileStore,
)
from .stores.file_cache import FileStoreCachePool as FileStoreCachePool
from .stream.policy import ErrorPolicy as ErrorPolicy
from .task_encoder import (
    AugmentTaskEncoder as AugmentTaskEncoder,
    BatchCost as BatchCost,
    ColumnCost as ColumnCost,
    ConversationTemplateConfig as ConversationTemplateConfig,
    Cooker as Cooker,
    DefaultTaskEncoder as DefaultTaskEncoder,
    ImageToken as ImageToken,
    LengthGrouper as LengthGrouper,
    MultiModalSampleConfig as MultiModalSampleConfig,
    MultiModalTaskEncoder as MultiModalTaskEncoder,
    OverLong as OverLong,
    Packer as Packer,
    SampleDecoder as SampleDecoder,
    TaskEncoder as TaskEncoder,
    basic_sample_keys as basic_sample_keys,
    batch_list as batch_list,
    batch_pad_stack as batch_pad_stack,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    cooker as cooker,
    generic_batch as generic_batch,
    generic_concat as generic_concat,
    homogeneous_concat_mix as homogeneous_concat_mix,
    pack_sequences as pack_sequences,
    stateless as stateless,
)
from .task_encoder.families import (
    ChatConfig as ChatConfig,
    ChatTemplateTaskEncoder as ChatTemplateTaskEncoder,
)
from .verify import verify_resume as verify_resume
from .worker_config import WorkerConfig as WorkerConfig
