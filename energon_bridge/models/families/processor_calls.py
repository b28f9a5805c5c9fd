"""Calls of a processor of transformers: with the media of a sample, with blank ones, and with tokens that are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import SampleError
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.families.known_processors import WRAPPED
from energon_bridge.models.families.video import frames_shape
from energon_bridge.models.families.vision import Plan, VideoFrames

MediumSize = tuple[int, ...]
"""Size of a medium: height and width of an image or frame, or the number of samples of a sound."""

ARGUMENTS: Mapping[Kind, str] = {"image": "images", "video": "videos", "audio": "audio"}
_PARTS: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
_TICKS = 1000  # a second, in the numbers of frames that stand for their times


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorCalls:
    """How a processor is called.

    Args:
        processor: A processor of transformers.
        options: Further arguments of each call.
        nested: Whether the images of a sample go in a list of their own, as all processors but few take them.
    """

    processor: Any
    options: Mapping[str, Any]
    nested: bool = True

    @classmethod
    def of(cls, processor: Any, options: Mapping[str, Any]) -> ProcessorCalls:
        """Try how the processor takes images."""
        calls = cls(processor=processor, options=options)
        return calls if calls.part("image") is None or calls._takes_nested() else replace(calls, nested=False)

    @property
    def name(self) -> str:
        """The name of the processor's class."""
        return type(self.processor).__name__

    def part(self, kind: Kind) -> Any:
        return next((part for name in _PARTS[kind] if (part := getattr(self.processor, name, None)) is not None), None)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sounds that the processor takes."""
        return int(self.part("audio").sampling_rate)

    def place(self, kind: Kind) -> str:
        """Return the text that stands for a medium."""
        before, after = WRAPPED.get(self.name, ("", ""))
        around = (str(getattr(self.processor, name)) if name else "" for name in (before, after))
        return str(placeholder(self.processor, kind)).join(around)

    def called(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[VideoFrames] = (),
        audio: Sequence[np.ndarray] = (),
        sources: Sequence[int | None] = (),
        special: bool = False,
        suffix: str | None = None,
        processor: Any = None,
    ) -> Mapping[str, Any]:
        """Call the processor, or a copy of it; `sources` has the number of the video that each sound is of."""
        arguments: dict[str, Any] = {"add_special_tokens": special, **self.options}
        if suffix is not None:
            arguments["suffix"] = [suffix]
        if images:
            arguments["images"] = [list(images)] if self.nested else list(images)
        if audio:
            arguments["audio"] = list(audio)
            arguments["audio_kwargs"] = {"sampling_rate": self.sampling_rate, **arguments.pop("audio_kwargs", {})}
        if videos:
            arguments["videos"] = [_frames(video) for video in videos]
            arguments["videos_kwargs"] = {
                **arguments.pop("videos_kwargs", {}),
                "do_sample_frames": False,
                "video_metadata": [_metadata_of(video) for video in videos],
                "return_metadata": True,
            }
            processor = processor or self.timed(videos)
        if any(source is not None for source in sources):
            arguments |= {"load_audio_from_video": True, "audio_from_video_indices": list(sources)}
        out: Mapping[str, Any] = (processor or self.processor)(text=[text], return_tensors="pt", **arguments)
        return out

    def timed(self, videos: Sequence[VideoFrames]) -> Any:
        """Return the processor; of one that takes a single rate for all videos, a copy that knows the rate of each."""
        if getattr(self.processor, "position_id_per_seconds", None) is None:
            return self.processor
        timed = copy(self.processor)
        seconds = [self.step_seconds(video) for video in videos]

        def replace(made: Any, *args: Any, **kwargs: Any) -> str:
            own = made["video_second_per_grid"]
            made["video_second_per_grid"] = [one or of_all for one, of_all in zip(seconds, own, strict=True)]
            return str(type(timed).replace_video_token(timed, made, *args, **kwargs))

        timed.replace_video_token = replace
        return timed

    def step_seconds(self, video: VideoFrames) -> float | None:
        """Return the seconds between temporal patches; None if they are unknown."""
        return int(self.processor.video_processor.temporal_patch_size) / video.rate if video.rate else None

    def _takes_nested(self) -> bool:
        """Return whether the images of a sample go in a list of their own, as all processors but few take them."""
        blank = Image.new("RGB", (224, 224))
        try:
            self.called(self.place("image"), images=[blank])
        except Exception:
            return False
        return True

    def blank(
        self,
        kind: Kind,
        size: MediumSize,
        times: Sequence[float] | None = None,
        *,
        before: str = "",
        processor: Any = None,
        count: int = 1,
        ends: bool = False,
    ) -> Mapping[str, Any]:
        """Return what the processor makes of blank media after a text; `ends`: a sound ends in a tone."""
        blank: Any
        if kind == "image":
            blank = Image.new("RGB", (size[1], size[0]))
        elif kind == "audio":
            blank = np.zeros(size, np.float32)
            if ends:
                blank[-(self.sampling_rate // 10) :] = np.sin(1 + np.arange(min(size[0], self.sampling_rate // 10)))
        else:
            frames = torch.zeros(size[0], 3, *size[1:], dtype=torch.uint8)
            blank = VideoFrames(frames=frames, timestamps=tuple(times or [number / 2 for number in range(size[0])]))
        text = before + self.place(kind) * count
        media: dict[str, Any] = {ARGUMENTS[kind]: [blank] * count}
        return self.called(text, processor=processor, **media)

    def written(self, kind: Kind, size: MediumSize, times: Sequence[float] | None = None, count: int = 1) -> str:
        """Return the text that the processor writes for a blank medium, the first of `count`."""
        places: list[Mapping[str, Any]] = []
        watched = copy(self.processor)

        def replace(*args: Any, **kwargs: Any) -> Any:
            text, offsets = type(watched).get_text_with_replacements(watched, *args, **kwargs)
            places.extend(offsets[0])
            return text, offsets

        watched.get_text_with_replacements = replace
        self.blank(kind, size, times, processor=watched, count=count)
        if len(places) != count:
            raise SampleError(f"it wrote {len(places)} texts for {count}")
        return str(places[0]["replacement"])


def placeholder(processor: Any, kind: Kind) -> str | None:
    """Return what stands for a medium in the texts of a processor."""
    of_template: str | None = getattr(processor, f"{kind}_placeholder_token", None)
    return of_template or getattr(processor, f"{kind}_token", None)


def sources_of(plans: Sequence[Plan], videos: Sequence[VideoFrames]) -> list[int | None]:
    """Return for each sound of a sample the number of its video, or None if it stands alone."""
    sources: list[int | None] = []
    numbers = iter(range(len(videos)))
    for plan in plans:
        if plan.kind == "audio":
            sources.append(None)
        elif plan.kind == "video" and videos[number := next(numbers)].sound is not None:
            sources.append(number)
    return sources


def times_of(video: VideoFrames, count: int) -> list[float]:
    """Return the times of frames in seconds; if unknown, at 24 frames a second, as processors of transformers do."""
    times = list(video.timestamps or [number / (video.fps or 24) for number in range(count)])
    if len(times) != count:
        raise SampleError(f"a video has {count} frames but {len(times)} timestamps")
    return times


def _metadata_of(video: VideoFrames) -> dict[str, Any]:
    size = frames_shape(video.frames)
    return metadata(size, times_of(video, size[0]), video.rate)


def metadata(size: MediumSize, times: Sequence[float], rate: float | None) -> dict[str, Any]:
    """Return what a processor knows of a video: numbers of frames that stand for its times."""
    count, height, width = size
    rate = rate or VideoFrames(frames=None, timestamps=tuple(times)).rate or 24.0
    return {
        "fps": _TICKS,
        "frames_indices": [round(time * _TICKS) for time in times],
        "total_num_frames": round(count * _TICKS / rate),
        "duration": count / rate,
        "height": height,
        "width": width,
    }


def _frames(video: VideoFrames) -> Any:
    frames = video.frames
    return frames if isinstance(frames, Tensor) else [np.asarray(frame) for frame in frames]


# Tokens that are known ------------------------------------------------------------------------------------------------


class _Told(dict[str, Any]):
    """Known tokens, in place of what a tokenizer returns."""

    def char_to_token(self, row: int, place: int) -> int:
        """Return the place in the text. Idefics 3 measures media by it, but only for `mm_token_type_ids`, which are
        dropped (`_DROPPED`).
        """
        return place


class Replay:
    """The tokenizer of a copy of a processor: of a text whose tokens are known, it returns these.

    A processor's text is as long as all tokens of its media, so that tokenising it again costs as much as pixels. Any
    other text than the planned one is tokenised, and its tokens are compared.
    """

    def __init__(self, tokenizer: Any, text: str | None = None, tokens: Tensor | None = None) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        said = ["".join(parts) for parts in zip(text, options.get("text_pair") or [""], strict=False)]
        if self._tokens is not None and said == [self._text]:  # a tensor is read far faster than a list
            is_tensor = options.get("return_tensors") == "pt"
            return _Told(input_ids=self._tokens[None].clone() if is_tensor else [self._tokens.tolist()])
        made = self._tokenizer(text, **options)
        if self._text is None:
            (self._text,) = said
            self._tokens = torch.as_tensor(made["input_ids"])[0]
        return made
