"""Megatron's indexed datasets as datasets: the tokens that megatron-core reads, in our order."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clouds import s3
from commands import energon
from engine import check_resumes, text_dataset
from forked import run_forked
from keyed import write_mix
from made import made_once
from test_tables import run, trained, validated

from benchmarks.indexes import write_sparse
from energon_bridge import Cooker, DefaultTaskEncoder, ErrorPolicy, TextSample, get_savable_loader
from energon_bridge.core.errors import (
    ConfigurationError,
    CorruptShardError,
    DatasetMismatchError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FatalSampleError,
    SourceError,
)
from energon_bridge.core.storage.local import LocalStore
from energon_bridge.tools.convert.megatron_index import is_index, open_index

pytest.importorskip("megatron.core")
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

COUNT = 60


def write(folder: Path, dtype: Any = np.int32, name: str = "corpus", modes: bool = False, count: int = COUNT) -> Path:
    """Write documents of one to three sequences, of up to 9 tokens together, with megatron-core's builder."""
    folder.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype, multimodal=modes)
    for number in range(count):
        sizes = [1 + (number + part) % 3 for part in range(1 + number % 3)]
        first = number * 2 % 110
        tokens = np.arange(first, first + sum(sizes)).astype(dtype)
        builder.add_document(tokens, sizes, [number % 2] * len(sizes) if modes else None)
    builder.finalize(str(folder / f"{name}.idx"))
    return folder / f"{name}.idx"


def documents_of(path: Path, modes: bool = False) -> list[tuple[np.ndarray, Any]]:
    """Return tokens and modes of each document, as megatron-core's reader gives them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

    theirs = Theirs(str(path.with_suffix("")), multimodal=modes)
    borders = theirs.document_indices
    found = []
    for first, last in itertools.pairwise(borders):
        each = [theirs[int(number)] for number in range(first, last)]
        tokens, kinds = ([one[0] for one in each], [one[1] for one in each]) if modes else (each, None)
        found.append((np.concatenate(tokens), kinds))
    return found


def tokens_of(path: Any, **settings: Any) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in validated(path, batch_size=None, **settings)]


corpus = made_once(write)


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [kind.name for kind in DType])
@pytest.mark.parametrize("modes", [False, True])
def test_documents_are_those_of_megatron_core(dtype: str, modes: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "data", DType.dtype_from_code(DType[dtype].value), modes=modes)
    found = validated(path, batch_size=None)
    expected = documents_of(path, modes)
    assert len(found) == len(expected) == COUNT
    for number, (sample, (tokens, kinds)) in enumerate(zip(found, expected, strict=True)):
        assert np.array_equal(sample["tokens"].numpy(), tokens)
        assert sample["tokens"].dtype == (torch.int64 if tokens.dtype.kind in "iu" else torch.from_numpy(tokens).dtype)
        assert (sample["document"], int(sample["lengths"].sum())) == (number, tokens.size)
        assert sample["__key__"] == f"{number:09d}"
        assert ("modes" in sample) == modes
        assert not modes or sample["modes"].tolist() == kinds


def test_the_prefix_names_both_files(corpus: Path) -> None:
    whole = tokens_of(corpus)
    assert tokens_of(corpus.with_suffix("")) == tokens_of(corpus.with_suffix(".bin")) == whole
    assert tokens_of(f"{corpus.with_suffix('')}?window=8") == tokens_of(f"{corpus}?window=8")


@pytest.mark.parametrize(
    ("options", "more", "keeps"), [("8", 0, 0), ("8+1", 1, 0), ("8&last=keep", 0, 1), ("7+1&last=keep", 1, 1)]
)
def test_windows_cut_all_documents_in_a_row(options: str, more: int, keeps: int, corpus: Path) -> None:
    tokens = np.concatenate([tokens for tokens, _ in documents_of(corpus)]).tolist()
    size = int(options[0])
    expected = [tokens[first : first + size + more] for first in range(0, len(tokens) - more, size)]
    if not keeps:
        expected = [window for window in expected if len(window) == size + more]
    assert tokens_of(f"{corpus}?window={options}") == expected
    left = 0 if keeps else len(tokens) - more - size * len(expected)
    assert f"the last {left} are left out" in run("info", f"{corpus}?window={options}")


def test_filters_and_columns(corpus: Path) -> None:
    expected = [tokens.tolist() for tokens, _ in documents_of(corpus)]
    assert tokens_of(corpus, filter="tokens >= 5") == [one for one in expected if len(one) >= 5]
    assert tokens_of(corpus, filter="document == 7 or tokens == 1") == [
        one for number, one in enumerate(expected) if number == 7 or len(one) == 1
    ]
    windows = open_index(f"{corpus}?window=8&last=keep", split_part="train")
    assert windows.read_values("tokens").tolist() == [len(one) for one in tokens_of(f"{corpus}?window=8&last=keep")]


def test_info_and_lint_know_indexes(corpus: Path, tmp_path: Path) -> None:
    for path in (corpus, corpus.with_suffix("")):
        assert "60 samples in 1 shard" in run("info", path)
        assert "60 documents" in run("info", path)
        assert "All 60 samples load" in run("lint", path)
        assert "000000000" in run("preview", path)


# Order and state ------------------------------------------------------------------------------------------------------


class Texts(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Makes texts of tokens and packs them, up to 20 characters."""

    cookers = (
        Cooker(lambda sample: TextSample.derive_from(sample, text=" ".join(map(str, sample["tokens"].tolist())))),
    )


class Packs(Texts):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = [[]]
        for sample in samples:
            if packs[-1] and sum(len(one.text) for one in packs[-1]) + len(sample.text) > 60:
                packs.append([])
            packs[-1].append(sample)
        return packs

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return TextSample.derive_from(samples[0], text=" | ".join(sample.text for sample in samples))


@pytest.mark.parametrize(("options", "encoder", "settings"), [
    ("", Texts, {}),
    ("?window=5+1", Texts, {"filter": None}),
    ("", Packs, {"packing_buffer_size": 6}),
])  # fmt: skip
def test_a_mix_is_the_same_on_every_topology_and_resumes(
    options: str, encoder: Any, settings: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    source = [(f"{corpus}{options}", 2.0), (str(text_dataset(tmp_path / "texts", train=[30, 20])), 1.0)]
    dataset = trained(source, task_encoder=encoder(), **{key: value for key, value in settings.items() if value})
    check_resumes(dataset)


def test_a_mix_weighs_tokens_and_filters(corpus: Path, tmp_path: Path) -> None:
    """Documents of few tokens beside long windows, half of the tokens each."""
    write(tmp_path / "data", name="long", count=200)
    short = {"path": str(corpus), "weight": 1, "filter": "tokens < 4"}
    windows = {"path": "data/long.idx?window=32", "weight": 1}
    mix = write_mix(tmp_path / "mix.yaml", train={"unit": "tokens", "blend": [short, windows]})
    batches = iter(get_savable_loader(trained(mix, batch_size=None)))
    counts = [next(batches)["tokens"].numel() for _ in range(6000)]
    short = sum(count for count in counts if count < 4)
    assert {count for count in counts if count >= 4} == {32}
    assert abs(short / sum(counts) - 0.5) < 0.02


def test_forks_read_at_once(corpus: Path) -> None:
    rows = open_index(corpus, split_part="train").open_rows()

    def tokens(_: int) -> list[list[int]]:
        return [row.parts["tokens"].tolist() for row in rows.read(np.arange(COUNT)[::-1])]

    assert run_forked(4, tokens) == [[one.tolist() for one, _ in documents_of(corpus)[::-1]]] * 4


def test_a_bucket_gives_the_same_tokens(corpus: Path, tmp_path: Path) -> None:
    with s3(tmp_path / "s3") as bucket:
        bucket.upload(corpus.parent, "far")
        for name in ("corpus.idx", "corpus.idx?window=8"):
            assert tokens_of(bucket.url(f"far/{name}")) == tokens_of(corpus.parent / name)


def test_another_corpus_is_not_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    loader = get_savable_loader(trained(path))
    next(iter(loader))
    state = loader.save_state_rank()
    for changed in (f"{path}?window=8", write(tmp_path / "data", count=COUNT + 1)):
        with pytest.raises(DatasetMismatchError):
            get_savable_loader(trained(changed)).restore_state_rank(state)


# Scale ----------------------------------------------------------------------------------------------------------------


def test_a_billion_documents_are_sought_by_their_own_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1_000_000_000
    chosen = [1, 123_456_789, 999_999_998]
    path = write_sparse(tmp_path, count, 1, chosen)
    read: list[int] = []
    ranges = LocalStore.read_ranges

    def counted(store: Any, name: str, offsets: Any, lengths: Any) -> Any:
        read.extend(lengths)
        return ranges(store, name, offsets, lengths)

    monkeypatch.setattr(LocalStore, "read_ranges", counted)
    dataset = open_index(path, split_part="train")
    assert dataset.num_samples == count
    assert sum(read) < 100
    read.clear()
    rows = dataset.open_rows().read(np.array(chosen))
    assert [row.parts["tokens"].tolist() for row in rows] == [[number % 65_521] for number in chosen]
    assert sum(read) == len(chosen) * (16 + 4 + 8 + 2)


# Mistakes -------------------------------------------------------------------------------------------------------------


def patched(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[Any, type[Exception], str]] = {
    "idx cut": (lambda idx, _: cut(idx, 300), SourceError, r"corpus\.idx: has 300 bytes, but .* Copy or write both"),
    "idx head cut": (lambda idx, _: cut(idx, 20), SourceError, r"corpus\.idx"),
    "bin cut": (lambda _, data: cut(data, 100), SourceError, r"corpus\.bin: has 100 bytes, but its index says \d+: .*"),
    "magic": (lambda idx, _: patched(idx, 0, b"X"), SourceError, r"corpus\.idx: is not an index of Megatron"),
    "version": (lambda idx, _: patched(idx, 9, b"\2"), SourceError, r"corpus\.idx: is not an index of Megatron"),
    "type": (lambda idx, _: patched(idx, 17, b"\x2a"), SourceError, r"corpus\.idx: is not an index of Megatron"),
    "last border": (lambda idx, _: patched(idx, idx.stat().st_size - 8, b"\1"), SourceError, "end_document"),
    "no bin": (lambda _, data: data.unlink(), DatasetNotFoundError, r"corpus\.bin: no such file"),
}


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    change, error, text = DAMAGE[damage]
    change(path, path.with_suffix(".bin"))
    with pytest.raises(error, match=text):
        trained(path)


def test_a_wrong_entry_costs_its_document_only(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    sequences = open_index(path, split_part="train").index.sequences
    patched(path, 34 + 4 * sequences + 8 * 10, struct.pack("<q", 1 << 40))  # of document 5
    rows = open_index(path, split_part="train").open_rows().read(np.arange(COUNT))
    (wrong,) = (row for row in rows if isinstance(row, Exception))
    assert "corpus.idx, document 5: points outside" in str(wrong)
    assert "corpus.idx, document 5: points outside" in energon("lint", path).output
    with pytest.raises(FatalSampleError, match=r"corpus\.idx, document 5: .*Copy or write both files again"):
        validated(path, error_policy=ErrorPolicy(on_error="raise"))


def test_files_that_change_after_opening_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    dataset = open_index(path, split_part="train")
    data = path.with_suffix(".bin")
    data.write_bytes(data.read_bytes() + b"more")
    with pytest.raises(CorruptShardError, match=r"corpus\.bin: has other bytes than when it was opened"):
        dataset.open_rows().read(np.array([0]))


def test_what_cannot_be_is_refused(corpus: Path, tmp_path: Path) -> None:
    for options in ("window=0", "window=eight", "windows=8", "window=8+2", "window=8&last=drop"):
        with pytest.raises(ConfigurationError, match=r"corpus\.idx\?.*expected \?window=TOKENS"):
            trained(f"{corpus}?{options}")
    with pytest.raises(EmptyDatasetError, match="less than one window"):
        trained(f"{corpus}?window=100000")
    with pytest.raises(ConfigurationError, match="windows would lose the modes"):
        trained(f"{write(tmp_path / 'data', modes=True)}?window=8")
    with pytest.raises(ConfigurationError, match="yaer"):
        trained(corpus, filter="yaer > 3")
    builder = IndexedDatasetBuilder(str(tmp_path / "open.bin"))
    builder.add_item(torch.arange(3))
    builder.finalize(str(tmp_path / "open.idx"))
    with pytest.raises(SourceError, match=r"open\.idx: has 1 sequences.* end_document"):
        trained(tmp_path / "open.idx")
    assert not is_index("shard_000.tar.idx")
    assert not is_index("lines.jsonl.idx")


def test_what_follows_the_last_sequence_is_not_read_as_by_megatron_core(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "data")
    before = [tokens_of(f"{path}{options}") for options in ("", "?window=8&last=keep")]
    with path.with_suffix(".bin").open("ab") as file:
        file.write(b"\1\2\3\4\5")
    assert tokens_of(path) == [tokens.tolist() for tokens, _ in documents_of(path)]
    assert [tokens_of(f"{path}{options}") for options in ("", "?window=8&last=keep")] == before
    assert "5 bytes after the last sequence of its index are not read" in caplog.text
