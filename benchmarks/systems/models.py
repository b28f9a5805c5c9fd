"""What both systems of `benchmarks.models` share: sizes, and how a batch is counted."""

from __future__ import annotations

from typing import Any

SEQ_LENGTH = 8192
PACKING_BUFFER = 64
CAPTION_TOKENS = 64
LLAVA_IMAGE_TOKENS = 576
CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
VIDEO_FPS = 2.0
SIGLIP = {"size": {"height": 384, "width": 384}}


def touch(batch: Any) -> list[str]:
    """Return an entry for each image or video of a batch, whose pixels are there."""

    def entry(name: str) -> Any:
        if isinstance(batch, dict):
            return batch.get(name)
        found = getattr(batch, name, None)
        return (getattr(batch, "visual_inputs", None) or {}).get(name) if found is None else found

    grids, pixels = entry("image_grid_thw"), entry("pixel_values")
    if grids is None and entry("video_grid_thw") is not None:
        grids, pixels = entry("video_grid_thw"), entry("pixel_values_videos")
    count = len(pixels) if grids is None else len(grids)
    if grids is not None:
        assert int(grids.prod(-1).sum()) == len(pixels)
    assert len(entry("tokens"))
    return [""] * count
