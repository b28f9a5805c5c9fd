"""The public names of megatron-energon 7.4.1, module by module: what an import of `megatron.energon` may ask for.

One module a line, relative to `megatron.energon` (`.` is that package itself), then its public names: classes,
functions and constants that are defined in it, and for a package what it gives on from its modules.
"""

from __future__ import annotations

VERSION = "7.4.1"

_NAMES = """
.: AugmentTaskEncoder BaseCoreDatasetFactory BaseWebdatasetFactory Batch BatchDataset BlendDataset CachePool
    CaptioningSample CaptioningWebdataset ConcatDataset Cooker CrudeJsonlDatasetFactory CrudeSample CrudeWebdataset
    DatasetLoader DatasetLoaderInterface DecodeFileStore DefaultCrudeJsonlDatasetFactory
    DefaultDecoderWebdatasetFactory DefaultGenericWebdatasetFactory DefaultTaskEncoder DirectLazy EpochizeDataset
    FileCacheLazy FileStore FileStoreCachePool FileStoreDecoder FilterDataset GcDataset GroupBatchDataset
    ImageClassificationSample ImageClassificationWebdataset ImageSample ImageWebdataset InterleavedSample
    InterleavedWebdataset IterMapDataset JoinedWebdatasetFactory Lazy LimitDataset LogSampleDataset MapDataset
    Metadataset MetadatasetV2 MixBatchDataset MockLazy MultiChoiceVQASample MultiChoiceVQAWebdataset NoCachePool
    OCRSample OCRWebdataset PackingDataset PrimaryFileStore RepeatDataset Sample SampleDecoder SavableDataLoader
    SavableDataset ShuffleBufferDataset SimilarityInterleavedSample SimilarityInterleavedWebdataset SkipSample
    SourceInfo StandardWebdatasetFactory SystemFileStore TaskEncoder TextSample TextWebdataset VQAOCRWebdataset
    VQASample VQAWebdataset VidQASample VidQAWebdataset WorkerConfig __version__ basic_sample_keys batch_list
    batch_pad_stack batch_stack concat_pad cooker edataclass generic_batch generic_concat get_loader
    get_savable_loader get_train_dataset get_val_dataset get_val_datasets homogeneous_concat_mix load_dataset
    log_exception prepare_metadataset reraise_exception stateless traverse_metadataset
av: AVData AVDecoder AVWebdatasetDecoder get_clips_uniform get_single_frames_uniform
av.av_data: AVData
av.av_decoder: AVDecoder AVIndexMode AVWebdatasetDecoder AV_DECODE_AVAILABLE MISSING_DEPENDENCY
av.av_init: av_open initialize_av_container
av.av_reader: AVProbeIndex AVProbeIndexEntry AVReader AVReaderByFrames AVReaderByPts
av.utils: get_clips_uniform get_single_frames_uniform
bracecollapse: collapse
cache: CachePool DecodeFileStore DirectLazy FileCacheLazy FileStore FileStoreCachePool FileStoreDecoder Lazy MockLazy
    NoCachePool PrimaryFileStore SystemFileStore
cache.base: CachePool FileStore FileStoreDecoder FileStoreWrapper Lazy MockLazy PrimaryFileStore T
cache.file_cache_pool: CacheFileLazy FileCacheLazy FileStoreCachePool T
cache.file_store: DecodeFileStore JsonlFileStore SystemFileStore WebdatasetFileStore
cache.no_cache: DirectLazy NoCachePool T
cli:
cli.main: main print_version
dataset_config: T T_sample get_dataset_from_config load_config
deprecation: deprecated warn_deprecated
edataclass: edataclass
epathlib: DEFAULT_PROFILE_NAME EPath
epathlib.epath: DEFAULT_PROFILE_NAME EPath NVDATASET_CACHE_DIR
epathlib.rclone_config: ConfigEntry find_executable_path get_rclone_config_path read_rclone_config
    read_rclone_config_at_path
errors: ErrorContext FatalSampleError SYSTEM_EXCEPTIONS SampleException SkipSample T handle_restore_errors
    log_exception reraise_exception
eyaml: load_yaml load_yaml_json
flavors: AVData AVDecoder AVDecoderType BaseCoreDatasetFactory BaseWebdatasetFactory CaptioningSample
    CaptioningWebdataset CrudeJsonlDatasetFactory CrudeSample CrudeWebdataset DefaultCrudeJsonlDatasetFactory
    DefaultDecoderWebdatasetFactory DefaultGenericWebdatasetFactory EmptyDatasetError ImageClassificationSample
    ImageClassificationWebdataset ImageDecoderType ImageSample ImageWebdataset InterleavedSample InterleavedWebdataset
    JoinedWebdatasetFactory MultiChoiceVQASample MultiChoiceVQAWebdataset OCRSample OCRWebdataset PinMemoryMixin
    Sample SampleDecoder SavableDataset SimilarityInterleavedSample SimilarityInterleavedWebdataset
    StandardWebdatasetFactory TextSample TextWebdataset VQAOCRWebdataset VQASample VQAWebdataset VidQASample
    VidQAWebdataset WebdatasetMeta
flavors.base_dataset: BaseCoreDatasetFactory ExtendableDataclassMixin PinMemoryMixin Sample SavableDataset State T
    T_sample add_sample_restore_key legacy_handler set_sample_restore_key
flavors.captioning: CaptioningSample CaptioningWebdataset
flavors.crude: CrudeSample CrudeWebdataset
flavors.image: ImageSample ImageWebdataset
flavors.image_classification: ImageClassificationSample ImageClassificationWebdataset
flavors.interleaved: InterleavedSample InterleavedWebdataset
flavors.jsonl: CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory
flavors.jsonl.crude_jsonl_dataset: CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory
flavors.jsonl.ijsonl: CacheEntry CachedIJsonlOffsetReader IJSONL_SUFFIX IJsonlFile IJsonlIndexReader IJsonlIndexWriter
    IJsonlSamplePointer
flavors.jsonl.ijsonl_reader: IJsonlReader T_index
flavors.jsonl.jsonl_prepare: JsonlPreparator T
flavors.multichoice_vqa: MultiChoiceVQASample MultiChoiceVQAWebdataset
flavors.ocr: OCRSample OCRWebdataset
flavors.similarity_interleaved: SimilarityInterleavedSample SimilarityInterleavedWebdataset
flavors.text: TextSample TextWebdataset
flavors.vid_qa: VidQASample VidQAWebdataset
flavors.vqa: VQASample VQAWebdataset
flavors.vqa_and_ocr: VQAOCRSample VQAOCRWebdataset
flavors.webdataset: AVData AVDecoder AVDecoderType BaseWebdatasetFactory DefaultDecoderWebdatasetFactory
    DefaultGenericWebdatasetFactory EmptyDatasetError ImageDecoderType JoinedWebdatasetFactory SampleDecoder
    StandardWebdatasetFactory WebdatasetMeta
flavors.webdataset.aggregator_pool: AggregatorPool BaseAggregator T_aggregation_data T_input_data T_result
flavors.webdataset.base_webdataset: BaseWebdatasetFactory DEBUG_SHARD_PRINT T T_sample
flavors.webdataset.config: INDEX_BATCH_SIZE INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME
    INFO_YAML_FILENAME JOIN_INDEX_FILENAME MAIN_FOLDER_NAME SPLIT_YAML_FILENAME skip_meta_re split_name_re
flavors.webdataset.default_decoder_webdataset: DefaultDecoderWebdatasetFactory T_sample
flavors.webdataset.default_generic_webdataset: DefaultGenericWebdatasetFactory T_sample
flavors.webdataset.empty_dataset_error: EmptyDatasetError
flavors.webdataset.field_access: FieldAccessError field_access split_field_access
flavors.webdataset.indexing: DuplicateSampleKeyError JoinIndexReader JoinIndexWriter SqliteIndexReader
    SqliteIndexWriter
flavors.webdataset.itar: CacheEntry CachedItarOffsetReader ITAR_SUFFIX ITarFile ITarRawSamplePartPointer
    ITarSamplePointer SubFileReader TarIndexReader TarIndexWriter get_itar_byte_offset open_itar
flavors.webdataset.itar_reader: ITarReader JoinIndexFileITarReader ShardInfosITarReader SqliteITarEntryReader T_index
flavors.webdataset.joined_webdataset: DEBUG_SHARD_PRINT JoinedWebdatasetFactory T_sample
flavors.webdataset.metadata: EnergonDatasetType WebdatasetMeta check_dataset_info_present get_dataset_info
    get_dataset_type get_info_shard_files
flavors.webdataset.prepare: IndexAggregatable IndexMediaMetadata IndexSample IndexSamplePart IndexShardInfo
    SqliteIndexWriterAggregator T WebdatasetPreparator
flavors.webdataset.sample_decoder: AVDecoderType DEFAULT_DECODER GuessingHandlerWrapper ImageDecoderType SampleDecoder
flavors.webdataset.sample_loader: RawSampleData SliceState WebdatasetSampleLoaderDataset
flavors.webdataset.sharder: Sharder
flavors.webdataset.standard_webdataset: StandardWebdatasetFactory T_sample
flavors.webdataset.structs: DatasetSubset FilteredSample ShardInfo WebdatasetInfo WebdatasetSplits
flavors.webdataset.tar_patcher: B1 BLOCK_SIZE DatasetScanResult HAS_NUMBA INT64 NUM_WORKERS PAX_PATH_KEYS TarPatcher
    TarPatcherError TarScanResult U8C U8C_RO VOID cli pax_parse run_dataset run_file split_name_re_bytes
    split_ustar_path update_header
flavors.webdataset.thread_local_sqlite: ThreadLocalSqlite ThreadLocalStorage main
fork_hook: DataclassForkMixin ForkMixin WeakCallbacks after_in_child_fork_hook after_in_parent_fork_hook
    before_fork_hook
loader: T get_loader get_savable_loader
local_copy: LOCAL_COPY_TMP_DIR ensure_local_copy
media: AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType deserialize_media_metadata
    serialize_media_metadata
media.extractor: MediaFilterConfig MediaFilterStrategy SourceData
media.filesystem_prepare: prepare_filesystem_dataset
media.metadata: AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType TMetadata deserialize_media_metadata
    serialize_media_metadata
metadataset: DatasetLoader DatasetLoaderInterface Metadataset MetadatasetV2 load_dataset prepare_metadataset
    traverse_metadataset
metadataset.dataset_loader: DatasetLoader
metadataset.join_dataset_loader: JoinDatasetLoader JoinedDatasetInfo JoinedDatasetMetaInfo
    filter_samples_with_excludes join_multiple_indices
metadataset.loader: MockJsonParser load_dataset prepare_metadataset traverse_metadataset
metadataset.loader_interface: DatasetBlendMode DatasetLoaderInterface LoadedDataset LoadedDatasetList
    TraversedDatasetReference
metadataset.metadataset: DatasetReference Metadataset MetadatasetBlender
metadataset.metadataset_v2: AuxDatasetReference AuxFilesystemReference BlendDatasetReference
    BlendEpochizedDatasetReference BlendEpochizedJoinDatasetReference BlendJoinDatasetReference BlendRepetitionsMixin
    BlendWeightMixin DatasetReference JoinDatasetReference MetadatasetBlend MetadatasetBlendEpochized MetadatasetJoin
    MetadatasetV2 Subset SubsetRatioMixin url_regex
module_loader: ModuleLoader
retry_stream: RetryReadStream
rng: SystemRng SystemRngState T WorkerRng
sample_utils: default_get_batch_keys format_sample_compact format_sample_detailed
savable: Savable
savable_loader: BasicDataLoader SavableCheckpoint SavableDataLoader SavableDataLoaderState SavableDatasetCheckpoint
    SavableDatasetState SavableDatasetWrapper SimpleSavableDatasetWrapper T
source_info: SourceInfo add_source_info get_source_info
state: FlexState
task_encoder: AugmentTaskEncoder Batch Cooker DefaultTaskEncoder TaskEncoder basic_sample_keys batch_list
    batch_pad_stack batch_stack cooker generic_batch get_train_dataset get_val_dataset get_val_datasets stateless
task_encoder.base: AugmentTaskEncoder Batch DefaultTaskEncoder FeatureBatcher P T T_batch T_encoded_sample T_raw_batch
    T_sample TaskEncoder V batch_list batch_pad_stack batch_stack generic_batch get_failure_tolerance get_stateless
    stateless
task_encoder.cooking: Cooker F T_sample basic_sample_keys cooker get_cooker_need_cache get_cooker_need_primary
task_encoder.loader: T get_train_dataset get_val_dataset get_val_datasets
tools:
tools.analyze_debug: AutosizingHeatmapWriter LOADER_LOG_LINE_TYPES_T LoaderInfo LoaderInitLogLine LoaderIterLogLine
    LoaderLines LoaderLogIter LoaderStopLogLine LoaderYieldLogLine SampleLoaderYieldLogLine YieldBatchLogLine command
    cpal
tools.checkpoint: RankStateIterable command command_info command_redist detect_and_replicate_pattern natural_sort_key
tools.info: command fmt fmt_size split_fmt
tools.lint: check_index command
tools.mount: EnergonFS MULTI_WARN command
tools.prepare: command printify_json sample_loader_template type_str
tools.prepare_media: command
tools.preview: command pprint to_str
transforms: CenterCropMapper CustomTransform MergeTransform RandomCropMapper RandomHorizontalFlipMapper
    RandomPerspectiveMapper RandomResizedCropMapper RandomRotationMapper RandomVerticalFlipMapper ResizeMapper
    TransformMapper
transforms.common: Sampling TTransform
transforms.custom: CustomTransform
transforms.mappers: CenterCropMapper RandomCropMapper RandomHorizontalFlipMapper RandomPerspectiveMapper
    RandomResizedCropMapper RandomRotationMapper RandomVerticalFlipMapper ResizeMapper TransformMapper
transforms.merge: MergeTransform
typed_converter: JsonParser JsonValueError TType float_pattern to_json_object
watchdog: PRINT_LOCAL_MAX_LENGTH T Watchdog repr_short
worker: WorkerConfig
wrappers: BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset GroupBatchDataset
    IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset PackingDataset RepeatDataset
    ShuffleBufferDataset SkipSample concat_pad generic_concat homogeneous_concat_mix
wrappers.base: BaseWrapperDataset SampleIndex T T_sample T_sample_in T_sample_out get_sample_restore_key
wrappers.batch_dataset: BatchDataset T_batch T_batch_sample
wrappers.blend_dataset: BlendDataset T_sample
wrappers.buffer: SavableSampleBuffer T_sample
wrappers.concat_dataset: ConcatDataset T_sample
wrappers.epochize_dataset: EpochizeDataset T_sample
wrappers.filter_dataset: FilterDataset T_sample
wrappers.gc_dataset: GC_DEFAULT_EVERY_N_ITER GcDataset GcFreezeError T_sample gc_init_worker
wrappers.group_batch_dataset: Bucket GroupBatchDataset T_batch T_batch_sample
wrappers.iter_map_dataset: IterMapDataset T_sample T_sample_out
wrappers.limit_dataset: LimitDataset T_sample
wrappers.log_sample_dataset: LogSampleDataset T_sample
wrappers.map_dataset: MapDataset T_sample T_sample_out
wrappers.mix_batch_dataset: MixBatchDataset T_batch T_batch_in concat_pad generic_concat homogeneous_concat_mix
wrappers.packing_dataset: PackingDataset T_batch_sample T_encoded_sample T_sample
wrappers.repeat_dataset: RepeatDataset T_sample
wrappers.shuffle_buffer_dataset: ShuffleBufferDataset T_sample
wrappers.skip: SkipSample
wrappers.watchdog_dataset: T_sample WatchdogDataset
"""


def modules() -> dict[str, tuple[str, ...]]:
    """Return the public names of each module; the key of `megatron.energon` itself is the empty string."""
    names_by_module: dict[str, tuple[str, ...]] = {}
    for line in _NAMES.strip().replace("\n    ", " ").splitlines():
        module, _, names = line.partition(":")
        names_by_module[module.strip(".")] = tuple(names.split())
    return names_by_module
