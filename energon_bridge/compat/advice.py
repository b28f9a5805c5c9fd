"""What takes the place of the names of megatron-energon that have no counterpart here.

Each text ends the sentence "NAME of megatron-energon has no counterpart in energon_bridge: …". A name has its own
text, or that of the innermost module it stands in.
"""

from __future__ import annotations

_WRAPPERS = "there are no dataset wrappers to put together; "

ADVICE = {
    # Dataset wrappers
    "BaseWrapperDataset": _WRAPPERS + "say what becomes of samples by the hooks of a task encoder",
    "BatchDataset": _WRAPPERS + "batch by get_train_dataset(batch_size=…) and the task encoder's `batch`",
    "BlendDataset": _WRAPPERS + "mix by a metadataset, energon_bridge.Blender or a list of (path, weight) pairs",
    "ConcatDataset": _WRAPPERS + "list datasets under `concat` of a metadataset; validation of a mix does so by itself",
    "FilterDataset": _WRAPPERS + "raise SkipSample in a hook of the task encoder",
    "GcDataset": "garbage is collected as Python does it, and nothing needs to be frozen",
    "GcFreezeError": "garbage is collected as Python does it, and nothing is frozen that could be missing",
    "GroupBatchDataset": _WRAPPERS + "override batch_group_criterion of the task encoder",
    "IterMapDataset": _WRAPPERS + "let encode_sample be a generator, or pack samples by packing_buffer_size",
    "LogSampleDataset": "ask `energon which`, which names the samples of any step",
    "MapDataset": _WRAPPERS + "override encode_sample of the task encoder",
    "MixBatchDataset": _WRAPPERS + "blend before batching; homogeneous_concat_mix joins batches",
    "PackingDataset": _WRAPPERS + "pass packing_buffer_size and override select_samples_to_pack, pack_selected_samples",
    "SavableSampleBuffer": "what waits to be packed or batched is in the loader's state as references",
    "ShuffleBufferDataset": _WRAPPERS + "pass get_train_dataset(shuffle_buffer_size=…)",
    "WatchdogDataset": "pass get_savable_loader(watchdog_timeout_seconds=…)",
    "SampleIndex": "ask the task encoder's current_sample_index",
    "get_sample_restore_key": "read sample.__restore_key__",
    "gc_init_worker": "garbage is collected as Python does it",
    # Mixes
    "DatasetLoader": "pass the path to get_train_dataset or get_val_dataset",
    "DatasetLoaderInterface": "pass the path to get_train_dataset or get_val_dataset",
    "Metadataset": "pass the path of the YAML file, or the same as a dict, to get_train_dataset",
    "MetadatasetV2": "pass the path of the YAML file, or the same as a dict, to get_train_dataset",
    "load_dataset": "pass the path to get_train_dataset; energon_bridge.mix.load_mix describes a mix",
    "traverse_metadataset": "energon_bridge.mix.load_mix(path, split_part=…).leaves are its datasets",
    # Loading
    "CacheFileLazy": "a FileStoreCachePool makes its own lazies: get_lazy and to_cache return them",
    "FileCacheLazy": "a FileStoreCachePool makes its own lazies: get_lazy and to_cache return them",
    "FileStoreWrapper": "derive from energon_bridge.FileStore and give it `read` and `get_path`",
    "SavableDatasetWrapper": "loaders keep their state themselves: save_state_rank",
    "SimpleSavableDatasetWrapper": "loaders keep their state themselves: save_state_rank",
    "WebdatasetMeta": "energon_bridge.format.open_dataset reads the metadata of a dataset",
    "ImageDecoderType": "annotate with str; SampleDecoder refuses a form that does not exist",
    "AVDecoderType": "annotate with str; SampleDecoder refuses a form that does not exist",
    "FeatureBatcher": "annotate with Callable[[list], Any]",
    "MediaMetadataType": "a store's get_media_metadata returns an ImageMetadata or an AVMetadata",
    "State": "states are plain dicts: save_state_rank",
    "add_sample_restore_key": "restore keys are made where samples are drawn; leave __restore_key__ as it is",
    "set_sample_restore_key": "restore keys are made where samples are drawn; leave __restore_key__ as it is",
    "legacy_handler": "pass handler= or error_policy= of energon_bridge.get_train_dataset",
    "ErrorContext": "pass error_policy= of energon_bridge.get_train_dataset; failures are judged there",
    "handle_restore_errors": "restoring reads no sample, so none can fail",
    "deserialize_media_metadata": "a store's get_media_metadata reads it",
    "serialize_media_metadata": "`energon prepare-media` writes it",
}

MODULE_ADVICE = {
    "av": "use energon_bridge.av.AVDecoder, which SampleDecoder makes of videos and sound",
    "cli": "run the command `energon`",
    "dataset_config": "get_train_dataset reads dataset.yaml",
    "deprecation": "use the standard warnings module",
    "epathlib": "URLs are opened by fsspec, which has its own configuration",
    "eyaml": "use the yaml package",
    "flavors.jsonl": "open the .jsonl file with get_train_dataset; `energon prepare FILE.jsonl` writes its index",
    "flavors.webdataset": "energon_bridge.format reads datasets and `energon prepare` writes them",
    "flavors.webdataset.aggregator_pool": "use concurrent.futures",
    "flavors.webdataset.tar_patcher": "rename the keys where the tars are made; `energon prepare` names duplicates",
    "fork_hook": "use before_fork_hook and its kin, or os.register_at_fork",
    "local_copy": "data is read by ranges from where it lies, and no copy is made",
    "media": "energon_bridge.prepare.prepare_media and `energon prepare-media` write media metadata",
    "metadataset": "pass the path of the YAML file, or the same as a dict, to get_train_dataset",
    "module_loader": "a dataset's own code runs with trust_remote_code=True",
    "retry_stream": "reads are retried where the storage says so",
    "rng": "Python's, numpy's and torch's generators are seeded for each sample before a hook runs: draw from them",
    "sample_utils": "print the sample",
    "savable": "loaders keep their state themselves: save_state_rank",
    "state": "states are plain dicts: save_state_rank",
    "tools": "run the command `energon`",
    "tools.analyze_debug": "no debug files are written, and `energon which` names the samples of any step",
    "tools.checkpoint": "states fit any number of ranks as they are, and `energon checkpoint` shows what they say",
    "tools.mount": "datasets are read from where they lie, and nothing is mounted",
    "transforms": "transform images in encode_sample, with any library; its random numbers are seeded for each sample",
    "typed_converter": "read your own configuration with a library for it",
    "wrappers": _WRAPPERS + "say what becomes of samples by the hooks of a task encoder",
    "watchdog": "pass get_savable_loader(watchdog_timeout_seconds=…)",
}
