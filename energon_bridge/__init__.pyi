"""The public names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]
__version__: str

from .cloud.file_cache import (
    FileStoreCachePool as FileStoreCachePool,
)
from .cloud.node_cache import (
    use_node_cache as use_node_cache,
)
from .core.dataloader import (
    EnergonDataloader as EnergonDataloader,
    cyclic_iter as cyclic_iter,
)
from .core.datasets import (
    get_loader as get_loader,
    get_savable_loader as get_savable_loader,
    get_train_dataset as get_train_dataset,
    get_val_dataset as get_val_dataset,
    get_val_datasets as get_val_datasets,
)
from .core.encoder.collate import (
    batch_list as batch_list,
    batch_pad_stack as batch_pad_stack,
    batch_stack as batch_stack,
    concat_pad as concat_pad,
    generic_batch as generic_batch,
)
from .core.encoder.cooking import (
    Cooker as Cooker,
    basic_sample_keys as basic_sample_keys,
    cooker as cooker,
)
from .core.encoder.decoder import (
    SampleDecoder as SampleDecoder,
)
from .core.encoder.task_encoder import (
    AugmentTaskEncoder as AugmentTaskEncoder,
    DefaultTaskEncoder as DefaultTaskEncoder,
    TaskEncoder as TaskEncoder,
    stateless as stateless,
)
from .core.errors import (
    BalanceError as BalanceError,
    BarredSampleError as BarredSampleError,
    BatchSizeMismatchError as BatchSizeMismatchError,
    BroadcastError as BroadcastError,
    ConfigurationError as ConfigurationError,
    CorruptShardError as CorruptShardError,
    DataParallelError as DataParallelError,
    DatasetError as DatasetError,
    DatasetMismatchError as DatasetMismatchError,
    DatasetNotFoundError as DatasetNotFoundError,
    DecodeError as DecodeError,
    DuplicateKeyError as DuplicateKeyError,
    EmptyDatasetError as EmptyDatasetError,
    EnergonError as EnergonError,
    ErrorRateError as ErrorRateError,
    FatalSampleError as FatalSampleError,
    FieldAccessError as FieldAccessError,
    FieldMapError as FieldMapError,
    FileNotInStoreError as FileNotInStoreError,
    ForkedLoaderError as ForkedLoaderError,
    HookTimeoutError as HookTimeoutError,
    KeyIndexError as KeyIndexError,
    LoaderError as LoaderError,
    MaskedMicrobatchesError as MaskedMicrobatchesError,
    MediaMetadataError as MediaMetadataError,
    MetadataError as MetadataError,
    MissingCodecError as MissingCodecError,
    MissingPackageError as MissingPackageError,
    MissingRankError as MissingRankError,
    NoCookerError as NoCookerError,
    NoShardsError as NoShardsError,
    NotPreparedError as NotPreparedError,
    NotProvidedError as NotProvidedError,
    OrderVersionError as OrderVersionError,
    OverLongSampleError as OverLongSampleError,
    ResumeMismatchError as ResumeMismatchError,
    SampleError as SampleError,
    SeedMismatchError as SeedMismatchError,
    SettingMismatchError as SettingMismatchError,
    ShardMissingError as ShardMissingError,
    ShortReadError as ShortReadError,
    SkipSample as SkipSample,
    SliceSizeMismatchError as SliceSizeMismatchError,
    SourceError as SourceError,
    SplitMismatchError as SplitMismatchError,
    StateError as StateError,
    StateFormatError as StateFormatError,
    StateVersionError as StateVersionError,
    StepMismatchError as StepMismatchError,
    StoppedByPolicyError as StoppedByPolicyError,
    StorageError as StorageError,
    TooManyRanksError as TooManyRanksError,
    UnfitSampleError as UnfitSampleError,
    UnknownArgumentError as UnknownArgumentError,
    UnknownSplitError as UnknownSplitError,
    UnmatchedKeyError as UnmatchedKeyError,
    UnsupportedShardError as UnsupportedShardError,
    UntrustedCodeError as UntrustedCodeError,
    WorkerDiedError as WorkerDiedError,
    WrongUseError as WrongUseError,
)
from .core.format.media import (
    AVMetadata as AVMetadata,
    ImageMetadata as ImageMetadata,
)
from .core.loader.bans import (
    load_keys as load_keys,
)
from .core.loader.savable import (
    SavableDataLoader as SavableDataLoader,
)
from .core.mix.joins import (
    register_joiner as register_joiner,
)
from .core.mix.load import (
    Blender as Blender,
)
from .core.mix.schedule import (
    WeightSchedule as WeightSchedule,
)
from .core.prepare.indexing import (
    prepare_dataset as prepare_dataset,
)
from .core.prepare.split import (
    SplitRule as SplitRule,
    parse_patterns as parse_patterns,
    parse_ratio as parse_ratio,
)
from .core.samples import (
    Batch as Batch,
    CaptioningSample as CaptioningSample,
    CrudeSample as CrudeSample,
    ImageClassificationSample as ImageClassificationSample,
    ImageSample as ImageSample,
    InterleavedSample as InterleavedSample,
    MultiChoiceVQASample as MultiChoiceVQASample,
    OCRSample as OCRSample,
    Sample as Sample,
    Segment as Segment,
    SimilarityInterleavedSample as SimilarityInterleavedSample,
    SourceInfo as SourceInfo,
    TextSample as TextSample,
    VidQASample as VidQASample,
    VQAOCRSample as VQAOCRSample,
    VQASample as VQASample,
    edataclass as edataclass,
    segments_of as segments_of,
)
from .core.stores.cache import (
    CachePool as CachePool,
    Lazy as Lazy,
    NoCachePool as NoCachePool,
)
from .core.stores.file_store import (
    DecodeFileStore as DecodeFileStore,
    FileStore as FileStore,
    JsonlFileStore as JsonlFileStore,
    PrimaryFileStore as PrimaryFileStore,
    SystemFileStore as SystemFileStore,
    WebdatasetFileStore as WebdatasetFileStore,
)
from .core.stream.policy import (
    ErrorPolicy as ErrorPolicy,
)
from .core.worker_config import (
    WorkerConfig as WorkerConfig,
)
from .models.av import (
    AVData as AVData,
    AVDecoder as AVDecoder,
    get_clips_uniform as get_clips_uniform,
    get_single_frames_uniform as get_single_frames_uniform,
)
from .models.conversations.conversation import (
    Conversation as Conversation,
    Document as Document,
    Part as Part,
    Piece as Piece,
    Turn as Turn,
)
from .models.conversations.inputs import (
    check_packing as check_packing,
    model_inputs as model_inputs,
)
from .models.conversations.layout import (
    ConversationTemplateConfig as ConversationTemplateConfig,
    ImageToken as ImageToken,
    MultiModalSampleConfig as MultiModalSampleConfig,
    TurnLayout as TurnLayout,
    chatml_template as chatml_template,
    llava_template as llava_template,
)
from .models.conversations.multimodal import (
    MultiModalTaskEncoder as MultiModalTaskEncoder,
)
from .models.families import (
    QWEN_VL_TEMPLATE as QWEN_VL_TEMPLATE,
    ChatConfig as ChatConfig,
    ChatSample as ChatSample,
    ChatTemplateTaskEncoder as ChatTemplateTaskEncoder,
    FixedTokenFamily as FixedTokenFamily,
    ProcessorFamily as ProcessorFamily,
    QwenFamily as QwenFamily,
    VideoFrames as VideoFrames,
    llava_next_family as llava_next_family,
    qwen_family as qwen_family,
)
from .models.images.devices import (
    normalise_on_device as normalise_on_device,
)
from .models.images.images import (
    DeferredImage as DeferredImage,
)
from .models.packing.future import (
    FutureTargets as FutureTargets,
    future_targets as future_targets,
)
from .models.packing.grouping import (
    LengthGrouper as LengthGrouper,
)
from .models.packing.joining import (
    generic_concat as generic_concat,
    homogeneous_concat_mix as homogeneous_concat_mix,
)
from .models.packing.packed_sequences import (
    batch_packs as batch_packs,
    pack_sequences as pack_sequences,
    packed_seq_params as packed_seq_params,
    unpack_batch as unpack_batch,
)
from .models.packing.packing import (
    OverLong as OverLong,
    Packer as Packer,
)
from .tools.check.dataset_yaml import (
    render_dataset_yaml as render_dataset_yaml,
)
from .tools.check.quarantine import (
    QuarantinedSample as QuarantinedSample,
    quarantine_excludes as quarantine_excludes,
    read_quarantine as read_quarantine,
)
from .tools.columns.functions import (
    AspectTiers as AspectTiers,
)
from .tools.columns.making import (
    add_column as add_column,
    image_size as image_size,
)
from .tools.convert.shard_writer import (
    ShardWriter as ShardWriter,
    finish_shards as finish_shards,
)
from .tools.verify import (
    ResumeReport as ResumeReport,
    verify_resume as verify_resume,
)
from .trainers.datamodule import (
    EnergonMultiModalDataModule as EnergonMultiModalDataModule,
)
from .trainers.replica import (
    Balance as Balance,
    Replica as Replica,
    StageKeys as StageKeys,
    make_balance as make_balance,
    make_replica as make_replica,
)
from .trainers.replica.costs import (
    BatchCost as BatchCost,
    attention_pairs as attention_pairs,
    cost_limit as cost_limit,
    num_tokens as num_tokens,
    vision_patches as vision_patches,
)
from .trainers.replica.warmup import (
    CostWarmup as CostWarmup,
)
from .trainers.roles import (
    EncoderBatch as EncoderBatch,
    Roles as Roles,
    make_roles as make_roles,
)
