"""How a source is converted, and the texts by which a shard or a whole conversion is recognised in a later run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.prepare.split import SplitRule
from energon_bridge.tools.convert.rows import Layout, Source, check_layout

_FORMAT = 1  # of the shards: after a raise, everything is written again


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a source is converted.

    `split` is for sources without splits of their own, and with `split_by` keeps rows with one value of that column in
    one part; sizes of shards as in `ShardWriter`. Images of more than
    `max_pixels` are scaled down; `quality` (1 to 100) encodes all JPEGs and WebPs again. With `checksums`, those of all
    samples and parts are kept.
    """

    layout: Layout
    split: SplitRule | None = None
    split_by: str | None = None
    shuffle: int | None = None
    samples_per_shard: int | None = None
    bytes_per_shard: int | None = None
    media: bool = True
    checksums: bool = False
    skip_errors: bool = False
    max_pixels: int | None = None
    quality: int | None = None

    @property
    def reencodes(self) -> bool:
        """Whether images may change."""
        return self.max_pixels is not None or self.quality is not None


def check_options(options: ConvertOptions) -> None:
    """Raise ConfigurationError for options that contradict each other."""
    check_layout(options.layout)
    if options.reencodes and options.bytes_per_shard is not None:
        raise ConfigurationError(
            "--bytes-per-shard needs all sizes in advance, but --max-pixels and --quality change them while writing: "
            "use --samples-per-shard instead."
        )


def key_of_options(options: ConvertOptions) -> bytes:
    """Return the options that a shard depends on, apart from its samples."""
    images = (options.max_pixels, options.quality) if options.reencodes else ()
    kept = ("checksums",) * options.checksums
    return repr((_FORMAT, _plain_layout(options.layout), options.media, *images, *kept)).encode()


def _plain_layout(layout: Layout) -> list[Any]:
    questions: dict[str, Any] = {"ignored": sorted(layout.ignored)} if layout.ignored else {}
    questions |= {
        name: value for name in ("question", "answers_as", "key") if (value := getattr(layout, name)) is not None
    }
    questions |= {"templates": dict(layout.templates)} if layout.templates else {}
    kept = [*["preferred"] * layout.preferred, *[questions] * bool(questions)]
    return [layout.sample_type, dict(layout.fields), sorted(layout.bare), *kept]


def type_name(layout: Layout) -> str:
    """Return the sample type of a dataset of this layout, as its dataset.yaml names it."""
    return "CrudeWebdataset" if layout.is_crude else layout.sample_type


def describe_conversion(source: Source, options: ConvertOptions, runs: Sequence[Mapping[str, int]]) -> bytes:
    """Return the source, options and `runs` of a conversion as JSON, to compare with those of another run."""
    plain = {
        "source": os.path.abspath(source.where),
        "layout": _plain_layout(options.layout),
        "split": str(asdict(options.split)["ratios"]) if options.split is not None else None,
        **{
            name: getattr(options, name)
            for name in ("shuffle", "samples_per_shard", "bytes_per_shard", "media", "skip_errors")
        },
        **({"max_pixels": options.max_pixels, "quality": options.quality} if options.reencodes else {}),
        **({"checksums": True} if options.checksums else {}),
        **({"split_by": options.split_by} if options.split_by is not None else {}),
        **({"prompt": prompt} if (prompt := getattr(source, "prompt", None)) is not None else {}),
        "runs": list(runs),
    }
    return json.dumps(plain, indent=2).encode()


def changed_options(before: bytes, now: bytes) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two descriptions, each name with its values before and now."""
    old, new = json.loads(before), json.loads(now)
    names = sorted({*old, *new} - {"skip_errors", "runs"})
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
