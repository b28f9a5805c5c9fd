"""The formats on disk: tar members, `.tar.idx`, the files of `.nv-meta`, the field map, JSONL files, join indexes.

Training reads by index and never walks a tar. The formats are those of Megatron Energon 7.4, so both packages can share
a dataset.
"""
