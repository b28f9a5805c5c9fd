"""Any processor of transformers that takes text with images, videos or sound.

A sample is planned from the sizes of its media alone: the text that the processor writes for a medium depends on its
size only. Before a sample is delivered, the processor itself is called with its text and media, and what it returns is
what the model gets. Its tokens must be the planned ones, or the sample is refused: nothing differs in silence.

What is written for a medium is learned when the family is made, from blank media of several sizes. Where the processor
counts tokens by itself (`_get_num_multimodal_tokens`) and writes one run of them, with the same text around it for all
of these sizes, the count of a size gives its text; the times of a video's frames are written by the processor's own
function, where its grid says all else. Where a function in `_SHAPES` says on what the text depends, one blank medium
for each value gives it. Else a blank medium of each size does, once in a process: correct, but as expensive as a real
one, so a data set of many sizes takes up to twice the CPU. `ProcessorFamily.counts` says which.
"""

from __future__ import annotations

import dis
import inspect
import pickle
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS
from energon_bridge.models.families.video import frames_shape
from energon_bridge.models.families.vision import Plan, PreparedSample, VideoFrames
from energon_bridge.models.images.pixels import PixelDtype, Profile

Size = tuple[int, ...]
"""Of an image its height and width, of a sound its number of samples."""

_ARGUMENTS: Mapping[Kind, str] = {"image": "images", "video": "videos", "audio": "audio"}
_PARTS: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
_PROBES: Mapping[Kind, Sequence[Size]] = {
    "image": ((480, 640), (640, 480), (224, 224), (300, 901), (1003, 777)),
    "video": ((8, 96, 128), (5, 128, 96), (16, 70, 200)),
    "audio": ((16000,), (24001,), (50333,), (1600,), (5 * 16000 + 79,)),
}
_DROPPED = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"),
        *("text_replacement_offsets", "video_metadata"),
    }
)
"""What the batch has by itself, or no model takes."""
_NONE = "takes none"
_TICKS = 1000  # a second, in the numbers of frames that stand for their times
_MOST_PLANS = 1 << 16
_MOST_MERGED = 16


@dataclass(kw_only=True, slots=True)
class Writing:
    """What a processor writes for media of one kind.

    Attributes:
        how: From what the tokens of a medium follow: nothing but its kind (`constant`), a `count` of them, the `grid`
            of a video, the `shape` that its size leads to, or its `size`.
        counted: With `count`, gives the number of tokens of a size, up to a factor and a constant.
        one: With `count`, the plan of some size: only the number of tokens differs.
        factor: What the count is divided by.
        more: What is added to the quotient.
        plans: The plans that are known, by the size of a medium and the times of frames.
        shapes: With `shape`, those of the shapes that are known.
        lengths: The lengths of the sounds whose plans are known, sorted.
        heard: The longest sound that is known to be heard to its end.
        cut: The shortest that is known to be cut off.
    """

    how: str = "size"
    counted: Callable[[Size], int] | None = None
    one: Plan | None = None
    factor: int = 1
    more: int = 0
    plans: dict[Any, Plan] = field(default_factory=dict)
    shapes: dict[Any, Plan] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    heard: int = 0
    cut: float = float("inf")

    def between(self, length: int) -> Plan | None:
        """Return the plan of a sound if a shorter and a longer one have the same: tokens do not become fewer."""
        place = bisect_left(self.lengths, length)
        near = [self.plans.get((one,)) for one in self.lengths[max(place - 1, 0) : place + 1]]
        return near[0] if len(near) == 2 and near[0] == near[1] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorFamily:
    """A model whose processor of transformers is called for each sample.

    Examples:
        >>> processor = AutoProcessor.from_pretrained("google/gemma-3-4b-it")  # doctest: +SKIP
        >>> encoder = ChatTemplateTaskEncoder.for_processor(processor)  # doctest: +SKIP

    Args:
        processor: A processor of transformers 5.20 or later, that writes tokens for media.
        model_config: The model's configuration. It is needed for packs of models with positions on three axes.
        options: Further arguments of each call of the processor.
        pixels: Only `processor`, or None.
        pixels_dtype: Type of pixels and features: `bfloat16`, `float16`, or `float32`, which leaves the processor's.

    Attributes:
        counts: For each kind of media, from what its tokens are planned; see `Writing.how`.
        refused: For each other kind, why the family does not take it.

    Raises:
        ConfigurationError: The processor takes no media, or none that can be planned; the message has its reason.
    """

    processor: Any
    model_config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    pixels: Profile | None = None
    pixels_dtype: PixelDtype = "float32"
    writings: dict[Kind, Writing] = field(init=False, repr=False, compare=False, default_factory=dict)
    refused: dict[Kind, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    rope: Callable[..., Any] | None = field(init=False, repr=False, compare=False, default=None)
    rope_takes: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    kinds: np.ndarray | None = field(init=False, repr=False, compare=False, default=None)
    nested: bool = field(init=False, repr=False, compare=False, default=True)
    adds_bos: bool = field(init=False, repr=False, compare=False, default=False)
    replays: bool = field(init=False, repr=False, compare=False, default=True)
    merged: dict[bytes, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        name = type(self.processor).__name__
        if getattr(self.processor, "tokenizer", None) is None:
            raise ConfigurationError(f"{name} has no tokenizer, so it writes no text for media")
        if _of_base("replace_image_token") is None:
            raise ConfigurationError(
                f"{name}: encoders of any processor need transformers 5.22 or newer, whose processors write the text "
                "of one image or video"
            )
        if reason := _REFUSED.get(name):
            raise ConfigurationError(f"{name} cannot be used for training on conversations: {reason}")
        if self.pixels not in (None, "processor") or self.pixels_dtype == "uint8":
            raise ConfigurationError(
                f"the pixels of {name} are what it returns itself: leave out pixels, and choose pixels_dtype float32, "
                "bfloat16 or float16"
            )
        if self._part("image") is not None:
            object.__setattr__(self, "nested", self._takes_nested())
        for kind in _ARGUMENTS:
            if reason := _REFUSED_MEDIA.get((name, kind)):
                self.refused[kind] = reason
                continue
            if _placeholder(self.processor, kind) is None or self._part(kind) is None:
                self.refused[kind] = f"{name} {_NONE}"
                continue
            try:
                self.writings[kind] = self._learned(kind)
            except Exception as error:  # whatever a processor raises
                self.refused[kind] = f"{name} could not take a blank one: {type(error).__name__}: {error}"
        self._check_values()
        if not self.writings:
            known = {kind: self.refused[kind] for kind in _ARGUMENTS if not self.refused[kind].endswith(_NONE)}
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in (known or self.refused).items())
            raise ConfigurationError(f"{name} takes no media that could be planned: {reasons}")
        if self.model_config is not None:
            object.__setattr__(self, "rope", rope_index(self.model_config))
            if self.rope is not None:
                object.__setattr__(self, "rope_takes", frozenset(inspect.signature(self.rope).parameters))
        object.__setattr__(self, "kinds", _kinds(self.processor))

    @property
    def counts(self) -> dict[str, str]:
        """Return from what the tokens of each kind of media are planned."""
        return {kind: writing.how for kind, writing in self.writings.items()}

    @property
    def media_tokens(self) -> frozenset[int]:
        """The tokens that are repeated for media, of the plans so far."""
        known = self.writings.values()
        plans = [plan for one in known for plan in (one.one, *one.plans.values(), *one.shapes.values())]
        return frozenset(token for plan in plans if plan is not None for token in plan.token_ids)

    @property
    def image_processor(self) -> Any:
        """The processor's image processor, if it has one."""
        return getattr(self.processor, "image_processor", None)

    @property
    def image_token(self) -> str:
        """What stands for an image in the chat template."""
        return str(_placeholder(self.processor, "image") or "")

    @property
    def video_token(self) -> str | None:
        """What stands for a video."""
        return self.processor.video_token if "video" in self.writings else None

    @property
    def audio_token(self) -> str | None:
        """What stands for a sound."""
        return self.processor.audio_token if "audio" in self.writings else None

    @property
    def image_text(self) -> str:
        """The text for an image if no template writes it."""
        return self._place("image") if "image" in self.writings else ""

    @property
    def video_text(self) -> str:
        """The text for a video if no template writes it."""
        return self.video_token or ""

    @property
    def audio_text(self) -> str:
        """The text for a sound if no template writes it."""
        return self.audio_token or ""

    @property
    def hears_videos(self) -> bool:
        """Whether the model hears the sound of videos, in time with their frames."""
        mixes = hasattr(self.processor, "replace_video_with_audio_token") and "use_audio_in_video" in self.rope_takes
        return mixes and {"video", "audio"} <= self.writings.keys()

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sounds that the processor takes."""
        return int(self._part("audio").sampling_rate)

    # Plans ------------------------------------------------------------------------------------------------------------

    def plan_image(self, width: int, height: int, *, alone: bool = True) -> Plan:
        """Return the plan of an image, the sample's only one or not."""
        if not alone and type(self.processor).__name__ in _SEVERAL_ALIKE and "image" in self.writings:
            plans = self.writings["image"].plans
            if "several" not in plans:
                plans["several"] = self._plan("image", self._written("image", (height, width), count=2))
            return plans["several"]
        return self._known("image", (height, width))

    def plan_sound(self, length: int) -> Plan:
        """Return the plan of a sound of so many samples.

        Raises:
            SampleError: The processor would cut it off, or makes no token of one so short.
        """
        plan = self._known("audio", (length,))
        usual = self._known("audio", _PROBES["audio"][0])
        heard = self.processor.tokenizer.convert_ids_to_tokens(list(usual.token_ids))
        if not plan.tokens or any(token not in plan.text for token in heard):  # perhaps only what goes around a sound
            raise self._too_short(length)
        self._check_heard(length)
        return plan

    def plan_video(self, video: VideoFrames) -> Plan:
        """Return the plan of a video, with its sound if it has one (`video.sound`, a Sound)."""
        count, height, width = frames_shape(video.frames)
        plan = self._known("video", (count, height, width), _times(video, count))
        return plan if video.sound is None else self._with_sound(plan, count, self._step_seconds(video), video.sound)

    def _plan(self, kind: Kind, text: str) -> Plan:
        """Return a plan with each run of the most frequent special token of a text as one token."""
        special = [token for token in self.processor.tokenizer.added_tokens_encoder if token in text]
        token = max(special, key=lambda one: (text.count(one), len(one)), default="")
        return self._with_runs(kind, text, (token,) if token else ())

    def _with_runs(self, kind: Kind, text: str, repeated: Sequence[str]) -> Plan:
        """Return a plan with each run of some special tokens of a text as one token."""
        pattern = re.compile("|".join(f"((?:{re.escape(token)})+)" for token in repeated) or "(?!)")
        known = self.processor.tokenizer.added_tokens_encoder
        return Plan(
            kind=kind,
            placeholder=str(_placeholder(self.processor, kind)),
            text=pattern.sub(lambda run: repeated[(run.lastindex or 0) - 1], text),
            runs=tuple(len(run[0]) // len(repeated[(run.lastindex or 0) - 1]) for run in pattern.finditer(text)),
            token_ids=tuple(known[token] for token in repeated),
        )

    def _check_heard(self, length: int) -> None:
        """Raise SampleError if the last tenth of a second of a sound of this length makes no difference, or all of it.

        Most extractors cut sounds off at some length, without a word. A longer sound is tried first, since all that are
        shorter than one that is heard are heard, too.
        """
        writing = self.writings["audio"]
        for tried in (length + length // 4, length):
            if not writing.heard < length or tried >= writing.cut:
                continue
            silent, ends = (dict(self._blank("audio", (tried,), ends=tone)) for tone in (False, True))
            if any(not torch.equal(value, ends[name]) for name, value in silent.items() if isinstance(value, Tensor)):
                writing.heard = tried
            elif tried < self.sampling_rate // 10:  # of a longer one, more may be heard
                raise self._too_short(length)
            else:
                writing.cut = tried
        if length >= writing.cut:
            raise SampleError(
                f"{type(self.processor).__name__} leaves out the end of a sound of {length / self.sampling_rate:.1f} "
                "s: cut sounds off with max_sound_seconds of the ChatConfig, or leave the sample out"
            )

    def _too_short(self, length: int) -> SampleError:
        name = type(self.processor).__name__
        milliseconds = 1000 * length / self.sampling_rate
        return SampleError(
            f"a sound of {milliseconds:.0f} ms is too short for {name}, which makes no token of it or hears nothing in "
            "it: pad it with silence, or leave the sample out"
        )

    def _step_seconds(self, video: VideoFrames) -> float | None:
        """Return the seconds between temporal patches; None if nothing says them."""
        return int(self.processor.video_processor.temporal_patch_size) / video.rate if video.rate else None

    def _with_sound(self, plan: Plan, count: int, seconds: float | None, sound: Any) -> Plan:
        """Return the plan of a video with the tokens of its sound between those of its frames.

        The processor mixes them; it puts the tokens of one temporal patch in one place, so it is shown one of each.
        """
        if not self.hears_videos:
            raise SampleError(f"a video has sound, but {type(self.processor).__name__} hears none in videos")
        if seconds is None:
            raise SampleError("a video with sound must tell when its frames are shown: give fps or timestamps")
        heard = self.plan_sound(sound.length).tokens
        part = self.processor.video_processor
        steps = -(-count // int(part.temporal_patch_size))
        key = (plan.tokens, steps, seconds, heard)
        plans = self.writings["video"].plans
        if key not in plans:
            text = self.processor.replace_video_with_audio_token(
                {
                    "video_grid_thw": np.array([[steps, int(part.merge_size), int(part.merge_size)]]),
                    "video_second_per_grid": [seconds],
                },
                0,
                {"num_audio_tokens": [heard]},
                0,
                **self.processor._merge_kwargs(tokenizer_init_kwargs={}, **self.options),
            )
            mixed = self._with_runs("video", text, (self.processor.video_token, self.processor.audio_token))
            shown = mixed.text.replace(self.processor.audio_token, "\0").replace(self.processor.video_token, "\1")
            is_shown = [letter == "\1" for letter in shown if letter in "\0\1"]
            per_step = plan.tokens // steps
            runs = [run * per_step if frames else run for run, frames in zip(mixed.runs, is_shown, strict=True)]
            plans[key] = replace(mixed, runs=tuple(runs))
        return plans[key]

    def _known(self, kind: Kind, size: Size, times: Sequence[float] | None = None) -> Plan:
        """Return the plan of a medium of a size. Raises SampleError if the processor takes none."""
        writing = self.writings.get(kind)
        if writing is None:
            raise SampleError(f"the sample has a medium of kind {kind}, but {self.refused[kind]}")
        key: Any = size
        if writing.how == "constant":
            key = None
        elif times is not None and writing.how != "count":
            key = (size, tuple(times))
        if key not in writing.plans:
            if len(writing.plans) >= _MOST_PLANS:
                writing.plans.clear()
                writing.lengths.clear()
            try:
                writing.plans[key] = self._made_plan(kind, writing, size, times)
            except Exception as error:
                what = f"{kind} of size {size}: {type(error).__name__}: {error}"
                raise SampleError(f"{type(self.processor).__name__} cannot take the {what}") from error
        return writing.plans[key]

    def _made_plan(self, kind: Kind, writing: Writing, size: Size, times: Sequence[float] | None) -> Plan:
        if writing.one is not None and writing.counted is not None:
            return replace(writing.one, runs=(writing.counted(size) // writing.factor + writing.more,))
        if writing.how == "grid":
            return self._plan(kind, self._from_grid(size, times or ()))
        if writing.how == "shape":
            shape = _SHAPES[type(self.processor).__name__](self.processor, *size)
            if shape not in writing.shapes:
                writing.shapes[shape] = self._plan(kind, self._of_shape(shape, size))
            return writing.shapes[shape]
        if kind == "audio":
            plan = writing.between(size[0])
            insort(writing.lengths, size[0])
            if plan is not None:
                return plan
        return self._plan(kind, self._written(kind, size, times))

    def _of_shape(self, shape: Any, size: Size) -> str:
        """Return what the processor writes for an image of a shape, which this size leads to."""
        name = _BY_SHAPE.get(type(self.processor).__name__)
        if name is None:
            return self._written("image", size)
        return str(self.processor.replace_image_token({name: [shape]}, 0))

    def _learned(self, kind: Kind) -> Writing:
        """Learn from blank media what the processor writes."""
        replaced = getattr(self.processor, f"replace_{kind}_token")
        if not _reads(replaced):
            return Writing(how="constant", plans={None: self._plan(kind, replaced({}, 0))})
        sizes = _PROBES[kind]
        times = [[number / 2 for number in range(size[0])] if kind == "video" else None for size in sizes]
        texts = [self._written(kind, size, of_size) for size, of_size in zip(sizes, times, strict=True)]
        plans = [self._plan(kind, text) for text in texts]
        if self.options:  # which no count knows
            return Writing()
        for counted in self._counters(kind):
            if (writing := _counting(counted, sizes, plans)) is not None:
                return writing
        if kind == "image" and (shape := _SHAPES.get(type(self.processor).__name__)) is not None:
            shapes = [shape(self.processor, *size) for size in sizes]
            return Writing(how="shape", shapes=dict(zip(shapes, plans, strict=True)))
        if kind == "video":
            return Writing(how="grid" if all(map(self._is_from_grid, sizes, times, texts)) else "size")
        return Writing(
            plans=dict(zip(sizes, plans, strict=True)), lengths=sorted(size[0] for size in sizes if kind == "audio")
        )

    def _counters(self, kind: Kind) -> Sequence[Callable[[Size], int]]:
        """Return the counts that the processor can give from a size: its own, or that of its image processor."""
        own = partial(_count_tokens, self.processor, kind)
        return (own, partial(_count_patches, self.processor)) if kind == "image" else (own,)

    def _takes_nested(self) -> bool:
        """Return whether the images of a sample go in a list of their own, as all processors but few take them."""
        blank = Image.new("RGB", (224, 224))
        try:
            self._called(self._place("image"), images=[blank])
        except Exception:
            return False
        return True

    def _check_values(self) -> None:
        """Learn what the processor puts before a text, whether its tokens may be told to it (see `_Replay`), and refuse
        kinds of media with values that no batch has.
        """
        bos = self.processor.tokenizer.bos_token_id
        for kind in list(self.writings):
            outs = [dict(self._blank(kind, _PROBES[kind][0], before=text)) for text in ("a ", "a few words more ")]
            tokens = [out["input_ids"][0] for out in outs]
            if bos is not None and int(tokens[0][0]) == bos:
                object.__setattr__(self, "adds_bos", True)
            dropped = _DROPPED.union(TOKEN_INPUTS)
            made = [{key: value for key, value in out.items() if key not in dropped} for out in outs]
            if unfit := _unfit(made, [len(of_text) for of_text in tokens]):
                del self.writings[kind]
                self.refused[kind] = f"{type(self.processor).__name__} returns {unfit}"
            elif not self._takes_replay(kind, outs[0]):
                object.__setattr__(self, "replays", False)

    def _takes_replay(self, kind: Kind, real: Mapping[str, Any]) -> bool:
        """Return whether the processor makes the same of a blank medium if it does not tokenise the text."""
        if any(name in real for name in TOKEN_INPUTS):  # which it makes of all tokens
            return False
        told = copy(self.processor)
        told.tokenizer = _Replay(self.processor.tokenizer)
        try:
            for _ in range(2):  # the tokens of the first call are told in the second
                out = dict(self._blank(kind, _PROBES[kind][0], before="a ", processor=told))
        except Exception:  # it asks for more than tokens
            return False
        real = {key: value for key, value in real.items() if key not in _DROPPED}
        return all(isinstance(out.get(key), Tensor) and torch.equal(out[key], value) for key, value in real.items())

    def _from_grid(self, size: Size, times: Sequence[float]) -> str:
        """Return what the processor writes for a video whose frames are patches on a grid."""
        processor = self.processor
        merge = int(processor.video_processor.merge_size)
        steps = -(-size[0] // int(processor.video_processor.temporal_patch_size))
        counted = processor._get_num_multimodal_tokens(video_sizes=[list(size)])
        per_step = int(counted["num_video_tokens"][0]) // steps
        from transformers.video_utils import VideoMetadata

        made = {
            "video_grid_thw": torch.tensor([[steps, merge, per_step * merge]]),
            "video_metadata": [VideoMetadata(**_metadata(size, times, None))],
        }
        return str(processor.replace_video_token(made, 0))

    def _is_from_grid(self, size: Size, times: Sequence[float] | None, text: str) -> bool:
        try:
            return self._from_grid(size, times or ()) == text
        except Exception:  # the processor has no grids
            return False

    def _written(self, kind: Kind, size: Size, times: Sequence[float] | None = None, count: int = 1) -> str:
        """Return what the processor writes for a blank medium, the first of so many."""
        places: list[Mapping[str, Any]] = []
        watched = copy(self.processor)

        def replace(*args: Any, **kwargs: Any) -> Any:
            text, offsets = type(watched).get_text_with_replacements(watched, *args, **kwargs)
            places.extend(offsets[0])
            return text, offsets

        watched.get_text_with_replacements = replace
        self._blank(kind, size, times, processor=watched, count=count)
        if len(places) != count:
            raise SampleError(f"it wrote {len(places)} texts for {count}")
        return str(places[0]["replacement"])

    def _blank(
        self,
        kind: Kind,
        size: Size,
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
        text = before + self._place(kind) * count
        media: dict[str, Any] = {_ARGUMENTS[kind]: [blank] * count}
        return self._called(text, processor=processor, **media)

    def _place(self, kind: Kind) -> str:
        """Return the text that stands for a medium."""
        before, after = _WRAPPED.get(type(self.processor).__name__, ("", ""))
        around = (str(getattr(self.processor, name)) if name else "" for name in (before, after))
        return str(_placeholder(self.processor, kind)).join(around)

    # Values -----------------------------------------------------------------------------------------------------------

    def processed(
        self, sample: PreparedSample, images: Sequence[Any], videos: Sequence[VideoFrames], sounds: Sequence[np.ndarray]
    ) -> dict[str, Tensor]:
        """Return what the processor makes of a sample's media.

        Raises:
            SampleError: The processor cannot take them, or its tokens are not the planned ones.
        """
        name = type(self.processor).__name__
        given = {"images": images, "videos": videos, "audio": sounds, "sources": _sources(sample.plans, videos)}
        out: Mapping[str, Any] | None = None
        if self.replays:
            told = copy(self._timed(videos))
            if not (videos or sounds or self.options):  # else, what is given differs from sample to sample
                told._merge_kwargs = self._merged
            with suppress(Exception):  # the processor itself says what is wrong
                told.tokenizer = _Replay(self.processor.tokenizer, self._written_out(sample), sample.tokens)
                out = self._called(sample.text, processor=told, **given, special=sample.adds_special)
        try:
            out = dict(out or self._called(sample.text, **given, special=sample.adds_special))
        except Exception as error:
            raise SampleError(f"{name} cannot take the sample: {type(error).__name__}: {error}") from error
        tokens = out["input_ids"][0]
        count = len(sample.tokens)
        if not torch.equal(tokens[:count], sample.tokens):
            same = int((tokens[:count] != sample.tokens[: len(tokens)]).int().argmax()) if len(tokens) >= count else 0
            raise SampleError(
                f"{name} makes other tokens of the sample than were planned, from token {same} on, "
                f"{tokens[same : same + 8].tolist()} instead of {sample.tokens[same : same + 8].tolist()}: do not "
                "change the processor after making the encoder, nor the images while decoding"
            )
        visual = {
            key: value[:, :count] if key in TOKEN_INPUTS else value for key, value in out.items() if key not in _DROPPED
        }
        for values, mask in _MASKS.items():
            if values in visual and mask not in visual:
                visual[mask] = torch.ones(visual[values].shape[:2], dtype=torch.bool)
        if unfit := _unfit([visual], [0]):
            raise SampleError(f"{name} returns {unfit}")
        if self.pixels_dtype == "float32":  # the default: what the processor itself makes
            return visual
        dtype = getattr(torch, self.pixels_dtype)
        dense = {key: one.to(dtype) for key, one in visual.items() if one.is_floating_point() and one.ndim > 1}
        return visual | dense

    def _merged(self, *args: Any, **given: Any) -> dict[str, Any]:
        """Return the arguments of each part of the processor, which checks the same ones once, not for each sample."""
        key = pickle.dumps((args, {name: one for name, one in given.items() if name != "tokenizer_init_kwargs"}))
        if key not in self.merged:
            if len(self.merged) >= _MOST_MERGED:
                self.merged.clear()
            self.merged[key] = self.processor._merge_kwargs(*args, **given)
        return {name: copy(value) for name, value in self.merged[key].items()}

    def _written_out(self, sample: PreparedSample) -> str:
        """Return the text of a sample with the tokens of its media."""
        places = "|".join(map(re.escape, sorted({plan.placeholder for plan in sample.plans}, key=len, reverse=True)))
        plans = iter(sample.plans)
        return re.sub(places, lambda _: self._in_full(next(plans)), sample.text)

    def _in_full(self, plan: Plan) -> str:
        """Return the text of a medium, each of its tokens as often as it is there."""
        if not plan.token_ids:
            return plan.text
        repeated = "|".join(map(re.escape, self.processor.tokenizer.convert_ids_to_tokens(plan.token_ids)))
        runs = iter(plan.runs)
        return re.sub(repeated, lambda token: token.group() * next(runs), plan.text)

    def token_types(self, tokens: np.ndarray, planned: np.ndarray) -> np.ndarray:
        """Return the type of each token: 0 text, 1 image, 2 video, 3 sound; the processor's own, where it needs
        no more than tokens.
        """
        if self.kinds is None:
            return np.array(self.processor.create_mm_token_type_ids([tokens.tolist()])[0], np.int64)
        return self.kinds.take(tokens, mode="clip") if self.kinds.size else planned

    def positions(self, tokens: Tensor, types: Tensor, visual: Mapping[str, Tensor]) -> Tensor | None:
        """Return the model's own positions on three axes, int64 (3, tokens); None if it has one axis.

        A model that hears videos takes one word for all of a call: whether they have sound. So the stretches of a
        sample that differ in it are calls of their own, each going on where the one before ended.
        """
        if self.rope is None:
            return None
        given = {"attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types, **visual}
        if "video_second_per_grid" in visual:
            given["second_per_grids"] = visual["video_second_per_grid"]
        if "feature_attention_mask" in visual:
            given["audio_seqlens"] = visual["feature_attention_mask"].sum(-1)
        given = {name: value for name, value in given.items() if name in self.rope_takes}
        parts: list[Tensor] = []
        for stretch, media, hears in self._stretches(tokens):
            part: dict[str, Any] = {"use_audio_in_video": True} if hears else {}
            for name, value in given.items():
                which = stretch if name in ("attention_mask", "mm_token_type_ids") else media.get(name, slice(None))
                if len(value[which]):
                    part[name] = value[which][None] if which is stretch else value[which]
            try:
                made = torch.as_tensor(self.rope(input_ids=tokens[stretch][None], **part)[0])
            except Exception as error:
                raise SampleError(
                    f"the model has no positions for the sample: {type(error).__name__}: {error}"
                ) from error
            if len(made) != 3:
                return None
            parts.append(made[:, 0].long() + (parts[-1].max() + 1 if parts else 0))
        return torch.cat(parts, dim=1)

    def _stretches(self, tokens: Tensor) -> list[tuple[slice, dict[str, slice], bool]]:
        """Return stretches of a sample: their tokens, the media in each, and whether its videos have sound."""
        if "use_audio_in_video" not in self.rope_takes:
            return [(slice(len(tokens)), {}, False)]
        config = getattr(self.model_config, "thinker_config", self.model_config)
        (starts,) = torch.where(tokens[:-1] == config.vision_start_token_id)
        behind = tokens[starts + 1]
        are_images = behind == config.image_token_id
        hear = behind == config.audio_start_token_id
        videos = starts[~are_images]
        heard = hear[~are_images]
        changes = [0, *(torch.where(heard[1:] != heard[:-1])[0] + 1).tolist()]  # numbers of videos
        borders = [0, *videos[changes[1:]].tolist(), len(tokens)]
        stretches = []
        (sounds,) = torch.where(tokens == config.audio_start_token_id)
        for number, (start, end) in enumerate(pairwise(borders)):
            ids = (starts[are_images], videos, sounds)
            of_images, of_videos, of_sounds = (
                slice(*torch.searchsorted(one, torch.tensor([start, end]))) for one in ids
            )
            media = {"image_grid_thw": of_images, "audio_seqlens": of_sounds}
            media |= dict.fromkeys(("video_grid_thw", "second_per_grids"), of_videos)
            stretches.append((slice(start, end), media, bool(len(heard)) and bool(heard[changes[number]])))
        return stretches

    def _called(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[VideoFrames] = (),
        audio: Sequence[np.ndarray] = (),
        sources: Sequence[int | None] = (),
        special: bool = False,
        processor: Any = None,
    ) -> Mapping[str, Any]:
        """Call the processor, or a copy of it; `sources` has the number of the video that each sound is of."""
        arguments: dict[str, Any] = {"add_special_tokens": special, **self.options}
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
            processor = processor or self._timed(videos)
        if any(source is not None for source in sources):
            arguments |= {"load_audio_from_video": True, "audio_from_video_indices": list(sources)}
        out: Mapping[str, Any] = (processor or self.processor)(text=[text], return_tensors="pt", **arguments)
        return out

    def _timed(self, videos: Sequence[VideoFrames]) -> Any:
        """Return the processor; of one that takes a single rate for all videos, a copy that knows the rate of each."""
        if getattr(self.processor, "position_id_per_seconds", None) is None:
            return self.processor
        timed = copy(self.processor)
        seconds = [self._step_seconds(video) for video in videos]

        def replace(made: Any, *args: Any, **kwargs: Any) -> str:
            own = made["video_second_per_grid"]
            made["video_second_per_grid"] = [one or of_all for one, of_all in zip(seconds, own, strict=True)]
            return str(type(timed).replace_video_token(timed, made, *args, **kwargs))

        timed.replace_video_token = replace
        return timed

    def _part(self, kind: Kind) -> Any:
        return next((part for name in _PARTS[kind] if (part := getattr(self.processor, name, None)) is not None), None)


def _sources(plans: Sequence[Plan], videos: Sequence[VideoFrames]) -> list[int | None]:
    """Return for each sound of a sample the number of its video, or None if it stands alone."""
    sources: list[int | None] = []
    numbers = iter(range(len(videos)))
    for plan in plans:
        if plan.kind == "audio":
            sources.append(None)
        elif plan.kind == "video" and videos[number := next(numbers)].sound is not None:
            sources.append(number)
    return sources


def _times(video: VideoFrames, count: int) -> list[float]:
    """Return the times of frames, at 24 a second if nothing says them, as the processors do."""
    times = list(video.timestamps or [number / (video.fps or 24) for number in range(count)])
    if len(times) != count:
        raise SampleError(f"a video has {count} frames but {len(times)} timestamps")
    return times


def _metadata_of(video: VideoFrames) -> dict[str, Any]:
    size = frames_shape(video.frames)
    return _metadata(size, _times(video, size[0]), video.rate)


def _metadata(size: Size, times: Sequence[float], rate: float | None) -> dict[str, Any]:
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


# Positions ------------------------------------------------------------------------------------------------------------


def rope_index(model_config: Any) -> Callable[..., Any] | None:
    """Return a model's own function for positions on three axes, which needs its configuration only; None: one axis."""
    from transformers import AutoModel
    from transformers.models.auto import modeling_auto

    model_config = getattr(model_config, "thinker_config", model_config)  # the part of omni models that reads

    for mapping in (
        AutoModel._model_mapping,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        kind = mapping.get(type(model_config), None)
        if kind is not None and hasattr(kind, "get_rope_index"):
            bare = object.__new__(kind)
            torch.nn.Module.__init__(bare)
            bare.__dict__["config"] = model_config
            if (vision := getattr(model_config, "vision_config", None)) is not None:
                bare.__dict__["spatial_merge_size"] = getattr(vision, "spatial_merge_size", None)
            function: Callable[..., Any] = bare.get_rope_index
            return function
    return None


# Tokens that are known ------------------------------------------------------------------------------------------------


class _Replay:
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
        if self._tokens is not None and list(text) == [self._text]:  # a tensor is read far faster than a list
            is_tensor = options.get("return_tensors") == "pt"
            return {"input_ids": self._tokens[None].clone() if is_tensor else [self._tokens.tolist()]}
        made = self._tokenizer(text, **options)
        if self._text is None:
            self._text = text[0]
            self._tokens = torch.as_tensor(made["input_ids"])[0]
        return made


# Processors that need a word ------------------------------------------------------------------------------------------


def _placeholder(processor: Any, kind: Kind) -> str | None:
    """Return what stands for a medium in the texts of a processor."""
    of_template: str | None = getattr(processor, f"{kind}_placeholder_token", None)
    return of_template or getattr(processor, f"{kind}_token", None)


def _counting(counted: Callable[[Size], int], sizes: Sequence[Size], plans: Sequence[Plan]) -> Writing | None:
    """Return how to plan by a count, if it says all that differs between the plans of some sizes."""
    one = plans[0]
    if not one.token_ids or any((plan.text, len(plan.runs)) != (one.text, 1) for plan in plans):
        return None
    try:
        counts = [counted(size) for size in sizes]
    except Exception:  # there is no such count, or not for this kind
        return None
    factor = max(1, round(counts[0] / one.tokens))
    more = {plan.tokens - count // factor for plan, count in zip(plans, counts, strict=True)}
    if len(more) > 1:
        return None
    return Writing(how="count", counted=counted, one=one, factor=factor, more=more.pop())


def _unfit(made: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> str | None:
    """Return what cannot be part of a batch, of the values of a processor for texts of so many tokens."""
    for key, value in made[0].items():
        if not isinstance(value, Tensor):
            return f"{key!r} as {type(value).__name__}, which cannot be joined in a batch"
        if all(of_text[key].shape[:2] == (1, count) for of_text, count in zip(made, tokens, strict=True)):
            return f"a value for each token, {key!r}, which a batch does not have"
    return None


def _kinds(processor: Any) -> np.ndarray | None:
    """Return the types of all tokens up to a text's behind media's; empty: the plans say more; None: only it knows."""
    create = processor.create_mm_token_type_ids
    if len(inspect.signature(create).parameters) > 1:
        return np.zeros(0, np.uint8)
    if getattr(create, "__func__", None) is not _of_base("create_mm_token_type_ids"):
        return None
    of_kinds = [getattr(processor, f"{kind}_token_ids") for kind in _ARGUMENTS]
    known = {token: number for number, tokens in enumerate(of_kinds, 1) for token in tokens}
    types = np.zeros(max(filter(None, known), default=0) + 2 if known else 0, np.uint8)
    for token, number in known.items():
        if token is not None:
            types[token] = number
    return types


def _of_base(name: str) -> Any:
    from transformers.processing_utils import ProcessorMixin

    return getattr(ProcessorMixin, name, None)


def _reads(replace: Callable[..., Any]) -> bool:
    """Return whether a function that writes the text of a medium looks at the medium at all."""
    code = inspect.unwrap(replace).__code__
    return any(step.argval == code.co_varnames[1] for step in dis.get_instructions(code) if "LOAD" in step.opname)


def _count_tokens(processor: Any, kind: Kind, size: Size) -> int:
    name = {"image": "image_sizes", "video": "video_sizes", "audio": "audio_lengths"}[kind]
    counted = processor._get_num_multimodal_tokens(**{name: [size[0] if kind == "audio" else list(size)]})
    return int(counted[f"num_{kind}_tokens"][0])


def _count_patches(processor: Any, size: Size) -> int:
    patches = _patches(processor, *size)
    return int(patches[0] if isinstance(patches, tuple) else patches)


def _settings(processor: Any) -> dict[str, Any]:
    settings: dict[str, Any] = processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]
    return settings


def _patches(processor: Any, height: int, width: int) -> Any:
    return processor.image_processor.get_number_of_image_patches(height, width, _settings(processor))


def _tiles(processor: Any, height: int, width: int) -> Any:
    return processor.image_processor.get_tile_grid(height, width, _settings(processor))


def _resized(processor: Any, height: int, width: int) -> Any:
    part = processor.image_processor
    size = part.size
    patch = processor.patch_size * processor.spatial_merge_size
    return inspect.getmodule(type(part)).get_resize_output_image_size(  # type: ignore[union-attr]
        np.broadcast_to(np.uint8(0), (3, height, width)),
        size=(size["longest_edge"], size["longest_edge"]),
        patch_size=(patch, patch),
        input_data_format="channels_first",
    )


_SHAPES: Mapping[str, Callable[..., Any]] = {
    "AyaVisionProcessor": _patches,
    "Cohere2VisionProcessor": _patches,
    "GraniteDoclingProcessor": _tiles,
    "Idefics3Processor": _patches,
    "PixtralProcessor": _resized,
    "SmolVLMProcessor": _patches,
}
"""On what the text of an image depends, for processors whose tokens are in several runs."""

_BY_SHAPE: Mapping[str, str] = {"PixtralProcessor": "image_sizes"}
"""The name by which a processor writes the text of an image from its shape alone, without a blank one."""

_MASKS: Mapping[str, str] = {"audio_input_features": "audio_attention_mask"}
"""Masks of values that are padded in a batch, which a processor leaves out of a call with a single one (Phi 4)."""

_WRAPPED: Mapping[str, tuple[str, str]] = {"HunYuanVLProcessor": ("image_start_token", "image_end_token")}
"""Attributes with the text that a processor wants around the token of an image."""

_SEVERAL_ALIKE = frozenset({"LlavaOnevisionProcessor"})
"""Processors that write one text for images of any size, where a sample has several."""

_RETRIEVAL = "its model compares texts with images, and takes one of the two at a time"
_JOINED = "its pixels are joined along their width, and images are numbered in the text, so samples cannot be joined"
_REFUSED: Mapping[str, str] = {
    "ColModernVBertProcessor": _RETRIEVAL,
    "ColPaliProcessor": _RETRIEVAL,
    "ColQwen2Processor": _RETRIEVAL,
    "Florence2Processor": "its text is a task, not a conversation",
    "FuyuProcessor": "it puts the image before the text and writes the end of the prompt by itself",
    "GlmImageProcessor": "its model makes images, of a size that the processor adds to the text",
    "MiniCPMOcrProcessor": _JOINED,
    "MiniCPMV4_6Processor": _JOINED,
    "MiniCPMV4_7Processor": _JOINED,
    "PaliGemmaProcessor": "it puts images before all text, and takes the answer as a suffix",
    "PocketTTSProcessor": "its model speaks: the sound is a voice, and its prompts come from the processor alone",
    "ShieldGemma2Processor": "its model judges images, by a template of its own",
}
"""Processors that do not read media among the turns of a conversation, with the reason."""

_REFUSED_MEDIA: Mapping[tuple[str, Kind], str] = {
    ("VideoLlama3Processor", "video"): "how many tokens a video takes depends on what its frames show",
}
"""Kinds of media whose tokens do not follow from a size, with the reason."""
