"""Multimodal training data with one order on any number of ranks and workers, resumable anywhere.

The public names below are looked up on first use (PEP 562): importing the package imports none of its modules, so that
the command line starts at once and a program that only reads metadata never pays for torch.

`_EXPORTS` is what happens at run time; the block under TYPE_CHECKING says the same to type checkers, and a test holds
the two together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from energon_bridge.av import (
        AVData as AVData,
        AVDecoder as AVDecoder,
        get_clips_uniform as get_clips_uniform,
        get_single_frames_uniform as get_single_frames_uniform,
    )
    from energon_bridge.dataloader import EnergonDataloader as EnergonDataloader, cyclic_iter as cyclic_iter
    from energon_bridge.datamodule import EnergonMultiModalDataModule as EnergonMultiModalDataModule
    from energon_bridge.datasets import (
        get_loader as get_loader,
        get_savable_loader as get_savable_loader,
        get_train_dataset as get_train_dataset,
        get_val_dataset as get_val_dataset,
        get_val_datasets as get_val_datasets,
    )
    from energon_bridge.errors import (
        BalanceError as BalanceError,
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
        MissingRankError as MissingRankError,
        NoCookerError as NoCookerError,
        NoShardsError as NoShardsError,
        NotPreparedError as NotPreparedError,
        NotProvidedError as NotProvidedError,
        OrderVersionError as OrderVersionError,
        OverLongSampleError as OverLongSampleError,
        QuarantinedSampleError as QuarantinedSampleError,
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
    from energon_bridge.format.media import AVMetadata as AVMetadata, ImageMetadata as ImageMetadata
    from energon_bridge.loader.bans import load_keys as load_keys
    from energon_bridge.loader.savable import SavableDataLoader as SavableDataLoader
    from energon_bridge.mix import (
        Blender as Blender,
        WeightSchedule as WeightSchedule,
        register_joiner as register_joiner,
    )
    from energon_bridge.prepare.shard_writer import ShardWriter as ShardWriter, finish_shards as finish_shards
    from energon_bridge.replica import (
        Balance as Balance,
        Replica as Replica,
        StageKeys as StageKeys,
        make_balance as make_balance,
        make_replica as make_replica,
    )
    from energon_bridge.samples import (
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
    from energon_bridge.samples.devices import normalise_on_device as normalise_on_device
    from energon_bridge.storage.node_cache import use_node_cache as use_node_cache
    from energon_bridge.stores import (
        CachePool as CachePool,
        DecodeFileStore as DecodeFileStore,
        FileStore as FileStore,
        FileStoreCachePool as FileStoreCachePool,
        JsonlFileStore as JsonlFileStore,
        Lazy as Lazy,
        NoCachePool as NoCachePool,
        PrimaryFileStore as PrimaryFileStore,
        SystemFileStore as SystemFileStore,
        WebdatasetFileStore as WebdatasetFileStore,
    )
    from energon_bridge.stream.failure_log import (
        QuarantinedSample as QuarantinedSample,
        quarantine_excludes as quarantine_excludes,
        read_quarantine as read_quarantine,
    )
    from energon_bridge.stream.policy import ErrorPolicy as ErrorPolicy
    from energon_bridge.task_encoder import (
        AugmentTaskEncoder as AugmentTaskEncoder,
        BatchCost as BatchCost,
        Conversation as Conversation,
        ConversationTemplateConfig as ConversationTemplateConfig,
        Cooker as Cooker,
        DefaultTaskEncoder as DefaultTaskEncoder,
        DeferredImage as DeferredImage,
        Document as Document,
        ImageToken as ImageToken,
        LengthGrouper as LengthGrouper,
        MultiModalSampleConfig as MultiModalSampleConfig,
        MultiModalTaskEncoder as MultiModalTaskEncoder,
        OverLong as OverLong,
        Packer as Packer,
        Piece as Piece,
        SampleDecoder as SampleDecoder,
        TaskEncoder as TaskEncoder,
        Turn as Turn,
        TurnLayout as TurnLayout,
        attention_pairs as attention_pairs,
        basic_sample_keys as basic_sample_keys,
        batch_list as batch_list,
        batch_packs as batch_packs,
        batch_pad_stack as batch_pad_stack,
        batch_stack as batch_stack,
        chatml_template as chatml_template,
        concat_pad as concat_pad,
        cooker as cooker,
        generic_batch as generic_batch,
        generic_concat as generic_concat,
        homogeneous_concat_mix as homogeneous_concat_mix,
        llava_template as llava_template,
        num_tokens as num_tokens,
        pack_sequences as pack_sequences,
        packed_seq_params as packed_seq_params,
        stateless as stateless,
        unpack_batch as unpack_batch,
        vision_patches as vision_patches,
    )
    from energon_bridge.task_encoder.families import (
        ChatConfig as ChatConfig,
        ChatSample as ChatSample,
        ChatTemplateTaskEncoder as ChatTemplateTaskEncoder,
        FixedTokenFamily as FixedTokenFamily,
        QwenFamily as QwenFamily,
        VideoFrames as VideoFrames,
    )
    from energon_bridge.topology import WorkerConfig as WorkerConfig
    from energon_bridge.verify import ResumeReport as ResumeReport, verify_resume as verify_resume

_EXPORTS: dict[str, tuple[str, ...]] = {
    "av": ("AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"),
    "dataloader": ("EnergonDataloader", "cyclic_iter"),
    "datamodule": ("EnergonMultiModalDataModule",),
    "datasets": ("get_loader", "get_savable_loader", "get_train_dataset", "get_val_dataset", "get_val_datasets"),
    "errors": (
        "BalanceError",
        "BatchSizeMismatchError",
        "BroadcastError",
        "ConfigurationError",
        "CorruptShardError",
        "DataParallelError",
        "DatasetError",
        "DatasetMismatchError",
        "DatasetNotFoundError",
        "DecodeError",
        "DuplicateKeyError",
        "EmptyDatasetError",
        "EnergonError",
        "ErrorRateError",
        "FatalSampleError",
        "FieldAccessError",
        "FieldMapError",
        "FileNotInStoreError",
        "ForkedLoaderError",
        "HookTimeoutError",
        "KeyIndexError",
        "LoaderError",
        "MaskedMicrobatchesError",
        "MediaMetadataError",
        "MetadataError",
        "MissingRankError",
        "NoCookerError",
        "NoShardsError",
        "NotPreparedError",
        "NotProvidedError",
        "OrderVersionError",
        "ResumeMismatchError",
        "OverLongSampleError",
        "QuarantinedSampleError",
        "SampleError",
        "SeedMismatchError",
        "SettingMismatchError",
        "ShardMissingError",
        "ShortReadError",
        "SkipSample",
        "SliceSizeMismatchError",
        "SourceError",
        "SplitMismatchError",
        "StateError",
        "StateFormatError",
        "StateVersionError",
        "StepMismatchError",
        "StorageError",
        "TooManyRanksError",
        "UnfitSampleError",
        "UnknownArgumentError",
        "UnknownSplitError",
        "UnmatchedKeyError",
        "UnsupportedShardError",
        "UntrustedCodeError",
        "WorkerDiedError",
        "WrongUseError",
    ),
    "format.media": ("AVMetadata", "ImageMetadata"),
    "loader.bans": ("load_keys",),
    "loader.savable": ("SavableDataLoader",),
    "mix": ("Blender", "WeightSchedule", "register_joiner"),
    "prepare.shard_writer": ("ShardWriter", "finish_shards"),
    "replica": ("Balance", "Replica", "StageKeys", "make_balance", "make_replica"),
    "samples": (
        "Batch",
        "CaptioningSample",
        "CrudeSample",
        "ImageClassificationSample",
        "ImageSample",
        "InterleavedSample",
        "MultiChoiceVQASample",
        "OCRSample",
        "Sample",
        "Segment",
        "SimilarityInterleavedSample",
        "SourceInfo",
        "TextSample",
        "VQAOCRSample",
        "VQASample",
        "VidQASample",
        "edataclass",
        "segments_of",
    ),
    "samples.devices": ("normalise_on_device",),
    "storage.node_cache": ("use_node_cache",),
    "stores": (
        "CachePool",
        "DecodeFileStore",
        "FileStore",
        "FileStoreCachePool",
        "JsonlFileStore",
        "Lazy",
        "NoCachePool",
        "PrimaryFileStore",
        "SystemFileStore",
        "WebdatasetFileStore",
    ),
    "stream.policy": ("ErrorPolicy",),
    "stream.failure_log": ("QuarantinedSample", "quarantine_excludes", "read_quarantine"),
    "task_encoder": (
        "Cooker",
        "Conversation",
        "ConversationTemplateConfig",
        "AugmentTaskEncoder",
        "BatchCost",
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
        "attention_pairs",
        "basic_sample_keys",
        "Turn",
        "TurnLayout",
        "batch_list",
        "batch_packs",
        "batch_pad_stack",
        "batch_stack",
        "cooker",
        "chatml_template",
        "concat_pad",
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
    ),
    "task_encoder.families": (
        "ChatConfig",
        "ChatSample",
        "ChatTemplateTaskEncoder",
        "FixedTokenFamily",
        "QwenFamily",
        "VideoFrames",
    ),
    "topology": ("WorkerConfig",),
    "verify": ("ResumeReport", "verify_resume"),
}

_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

# `from energon_bridge import *` asks for each of these; the data module would bring Lightning along, for many seconds.
__all__ = ["__version__", *sorted(_MODULE_OF.keys() - {"EnergonMultiModalDataModule"})]


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name, once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names as well, whether or not they have been used."""
    return sorted({*globals(), *_MODULE_OF})
