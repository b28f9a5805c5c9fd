"""Every public name has a docstring with an example, and the examples run."""

import dataclasses
import doctest
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import energon_bridge
from energon_bridge import WorkerConfig
from energon_bridge.tools.testing import create_captioning_test_dataset

NAMES = sorted({*energon_bridge.__all__, "EnergonMultiModalDataModule"} - {"__version__"})
NO_EXAMPLE = {
    "AVData",
    "AVDecoder",
    "AVMetadata",
    "Balance",
    "ChatSample",
    "Conversation",
    "DeferredImage",
    "Document",
    "EncoderBatch",
    "FixedTokenFamily",
    "FutureTargets",
    "ImageMetadata",
    "JsonlFileStore",
    "Part",
    "Piece",
    "QWEN_VL_TEMPLATE",
    "QuarantinedSample",
    "QwenFamily",
    "Replica",
    "ResumeReport",
    "Roles",
    "Segment",
    "SplitRule",
    "StageKeys",
    "Turn",
    "TurnLayout",
    "VQAOCRSample",
    "VideoFrames",
    "WebdatasetFileStore",
    "add_column",
    "attention_pairs",
    "batch_packs",
    "chatml_template",
    "check_packing",
    "cost_limit",
    "future_targets",
    "get_clips_uniform",
    "get_single_frames_uniform",
    "image_size",
    "llava_next_family",
    "llava_template",
    "num_tokens",
    "pack_sequences",
    "packed_seq_params",
    "parse_patterns",
    "parse_ratio",
    "prepare_dataset",
    "qwen_family",
    "render_dataset_yaml",
    "segments_of",
    "unpack_batch",
    "vision_patches",
}
"""Records that other names return or take, and functions that need a model or files; the pages of docs/ show them.
Errors need none either."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data that the examples speak of."""
    folder = tmp_path_factory.mktemp("docstrings")
    create_captioning_test_dataset(folder / "data" / "captions")
    create_captioning_test_dataset(folder / "data" / "more", num_val=0)
    (folder / "data" / "words.txt").write_text("red green blue")
    bad = {"dataset": "data/captions", "shard": "train/shard_000.tar", "index": 3, "key": "train-00003"}
    bad |= {"parts": ["png", "txt"], "hook": "decode", "error": "DecodeError", "message": "truncated"}
    (folder / "bad.jsonl").write_text(json.dumps(bad) + "\n")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_the_docstring_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    value = getattr(energon_bridge, name)
    text = inspect.getdoc(value)
    assert text
    is_error = isinstance(value, type) and issubclass(value, Exception)
    if name in NO_EXAMPLE or (is_error and ">>>" not in text):
        assert ">>>" not in text
        return
    given = {public: getattr(energon_bridge, public) for public in NAMES}
    given |= {"torch": torch, "np": np, "Path": Path, "dataclasses": dataclasses}
    if "(tokenizer" in text:
        from families import image_processor_of, tokenizer_of  # they import transformers, which takes seconds

        given |= {"tokenizer": tokenizer_of("llava"), "image_processor": image_processor_of("llava")}
    # Loaders of the examples work in this process: starting four workers for each takes longer than the rest.
    here = WorkerConfig(rank=0, world_size=1, num_workers=0)
    monkeypatch.setattr(WorkerConfig, "default_worker_config", lambda *args, **kwargs: here)
    example = doctest.DocTestParser().get_doctest(text, given, name, None, 0)
    assert example.examples, "no example"
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(example, out=report.append, clear_globs=True)
    assert not report, "".join(report)
