"""What a processor of transformers writes for media, learned from blank ones, and the plans that follow from it.

Where the processor counts tokens by itself (`_get_num_multimodal_tokens`) and writes one run of them, with the same
text around it for all of the sizes tried, the count of a size gives its text; the times of a video's frames are written
by the processor's own function, where its grid says all else. Where a function in `SHAPES` says on what the text
depends, one blank medium for each value gives it. Else a blank medium of each size does, once in a process: correct,
but as expensive as a real one, so a data set of many sizes takes up to twice the CPU.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.errors import SampleError, called
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.families.known_processors import BY_SHAPE, SEVERAL_ALIKE, SHAPES, patches, refused_medium
from energon_bridge.models.families.processor_calls import MediumSize, ProcessorCalls, metadata, placeholder, times_of
from energon_bridge.models.families.video import frames_shape
from energon_bridge.models.families.vision import Plan, VideoFrames

PROBES: Mapping[Kind, Sequence[MediumSize]] = {
    "image": ((480, 640), (640, 480), (224, 224), (300, 901), (1003, 777)),
    "video": ((8, 96, 128), (5, 128, 96), (16, 70, 200)),
    "audio": ((16000,), (24001,), (50333,), (1600,), (5 * 16000 + 79,)),
}
NONE = "takes none"
_MOST_PLANS = 1 << 16


@dataclass(kw_only=True, slots=True)
class Writing:
    """The rule by which the tokens of media of one kind are planned, learned from calls with blank media.

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
    counted: Callable[[MediumSize], int] | None = None
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
class ProcessorPlans:
    """The plans of media of one processor.

    Attributes:
        calls: How it is called.
        writings: What it writes for each kind of media that it takes.
        refused: Why it does not take the others.
    """

    calls: ProcessorCalls
    writings: dict[Kind, Writing] = field(default_factory=dict)
    refused: dict[Kind, str] = field(default_factory=dict)

    @property
    def media_tokens(self) -> frozenset[int]:
        """The tokens that are repeated for media, of the plans so far."""
        known = self.writings.values()
        plans = [plan for one in known for plan in (one.one, *one.plans.values(), *one.shapes.values())]
        return frozenset(token for plan in plans if plan is not None for token in plan.token_ids)

    def learn(self, kind: Kind) -> None:
        """Call the processor with blank media, and keep the rule for its tokens, or the reason why it takes none."""
        calls = self.calls
        if reason := refused_medium(calls.processor, kind):
            self.refused[kind] = reason
        elif placeholder(calls.processor, kind) is None or calls.part(kind) is None:
            self.refused[kind] = f"{calls.name} {NONE}"
        else:
            try:
                self.writings[kind] = self._learned(kind)
            except Exception as error:  # whatever a processor raises
                self.refused[kind] = f"{calls.name} could not take a blank one: {type(error).__name__}: {error}"

    def of_image(self, width: int, height: int, *, alone: bool = True) -> Plan:
        """Return the plan of an image, the sample's only one or not."""
        if not alone and self.calls.name in SEVERAL_ALIKE and "image" in self.writings:
            plans = self.writings["image"].plans
            if "several" not in plans:
                plans["several"] = self._plan("image", self.calls.written("image", (height, width), count=2))
            return plans["several"]
        return self._known("image", (height, width))

    def numbered(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans of media of one kind, with the number of each in its text, if the processor writes it."""
        around = [getattr(self.calls.processor, f"image_id_{side}_token", "") for side in ("start", "end")]
        first = "0".join(around)  # as of one that stands alone
        if not all(around) or not any(plan.text.startswith(first) for plan in plans):
            return list(plans)
        numbers = (str(number).join(around) for number in range(len(plans)))
        return [
            replace(plan, text=number + plan.text.removeprefix(first))
            for number, plan in zip(numbers, plans, strict=True)
        ]

    def of_sound(self, length: int) -> Plan:
        """Return the plan of a sound of so many samples.

        Raises:
            SampleError: The processor would cut it off, or makes no token of one so short.
        """
        plan = self._known("audio", (length,))
        usual = self._known("audio", PROBES["audio"][0])
        heard = self.calls.processor.tokenizer.convert_ids_to_tokens(list(usual.token_ids))
        if not plan.tokens or any(token not in plan.text for token in heard):  # perhaps only what goes around a sound
            raise self._too_short(length)
        self._check_heard(length)
        return plan

    def of_video(self, video: VideoFrames, *, hears: bool) -> Plan:
        """Return the plan of a video, with its sound if it has one (`video.sound`, a Sound)."""
        count, height, width = frames_shape(video.frames)
        plan = self._known("video", (count, height, width), times_of(video, count))
        if video.sound is None:
            return plan
        if not hears:
            raise SampleError(f"a video has sound, but {self.calls.name} hears none in videos")
        return self._with_sound(plan, count, video)

    def _plan(self, kind: Kind, text: str) -> Plan:
        """Return a plan with each run of the most frequent special token of a text as one token."""
        special = [token for token in self.calls.processor.tokenizer.added_tokens_encoder if token in text]
        token = max(special, key=lambda one: (text.count(one), len(one)), default="")
        return self._with_runs(kind, text, (token,) if token else ())

    def _with_runs(self, kind: Kind, text: str, repeated: Sequence[str]) -> Plan:
        """Return a plan with each run of some special tokens of a text as one token."""
        pattern = re.compile("|".join(f"((?:{re.escape(token)})+)" for token in repeated) or "(?!)")
        known = self.calls.processor.tokenizer.added_tokens_encoder
        return Plan(
            kind=kind,
            placeholder=str(placeholder(self.calls.processor, kind)),
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
            silent, ends = (dict(self.calls.blank("audio", (tried,), ends=tone)) for tone in (False, True))
            if any(not torch.equal(value, ends[name]) for name, value in silent.items() if isinstance(value, Tensor)):
                writing.heard = tried
            elif tried < self.calls.sampling_rate // 10:  # of a longer one, more may be heard
                raise self._too_short(length)
            else:
                writing.cut = tried
        if length >= writing.cut:
            raise SampleError(
                f"{self.calls.name} leaves out the end of a sound of {length / self.calls.sampling_rate:.1f} s: cut "
                f"sounds off with max_sound_seconds of the ChatConfig{called('max_sound_seconds')}, or leave the "
                "sample out"
            )

    def _too_short(self, length: int) -> SampleError:
        name = self.calls.name
        milliseconds = 1000 * length / self.calls.sampling_rate
        return SampleError(
            f"a sound of {milliseconds:.0f} ms is too short for {name}, which makes no token of it or hears nothing in "
            "it: pad it with silence, or leave the sample out"
        )

    def _with_sound(self, plan: Plan, count: int, video: VideoFrames) -> Plan:
        """Return the plan of a video with the tokens of its sound between those of its frames.

        The processor mixes them; it puts the tokens of one temporal patch in one place, so it is shown one of each.
        """
        seconds = self.calls.step_seconds(video)
        if seconds is None:
            raise SampleError("a video with sound must tell when its frames are shown: give fps or timestamps")
        heard = self.of_sound(video.sound.length).tokens
        processor = self.calls.processor
        part = processor.video_processor
        steps = -(-count // int(part.temporal_patch_size))
        key = (plan.tokens, steps, seconds, heard)
        plans = self.writings["video"].plans
        if key not in plans:
            text = processor.replace_video_with_audio_token(
                {
                    "video_grid_thw": np.array([[steps, int(part.merge_size), int(part.merge_size)]]),
                    "video_second_per_grid": [seconds],
                },
                0,
                {"num_audio_tokens": [heard]},
                0,
                **processor._merge_kwargs(tokenizer_init_kwargs={}, **self.calls.options),
            )
            mixed = self._with_runs("video", text, (processor.video_token, processor.audio_token))
            shown = mixed.text.replace(processor.audio_token, "\0").replace(processor.video_token, "\1")
            is_shown = [letter == "\1" for letter in shown if letter in "\0\1"]
            per_step = plan.tokens // steps
            runs = [run * per_step if frames else run for run, frames in zip(mixed.runs, is_shown, strict=True)]
            plans[key] = replace(mixed, runs=tuple(runs))
        return plans[key]

    def _known(self, kind: Kind, size: MediumSize, times: Sequence[float] | None = None) -> Plan:
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
                raise SampleError(f"{self.calls.name} cannot take the {what}") from error
        return writing.plans[key]

    def _made_plan(self, kind: Kind, writing: Writing, size: MediumSize, times: Sequence[float] | None) -> Plan:
        if writing.one is not None and writing.counted is not None:
            return replace(writing.one, runs=(writing.counted(size) // writing.factor + writing.more,))
        if writing.how == "grid":
            return self._plan(kind, self._from_grid(size, times or ()))
        if writing.how == "shape":
            shape = SHAPES[self.calls.name](self.calls.processor, *size)
            if shape not in writing.shapes:
                writing.shapes[shape] = self._plan(kind, self._of_shape(shape, size))
            return writing.shapes[shape]
        if kind == "audio":
            plan = writing.between(size[0])
            insort(writing.lengths, size[0])
            if plan is not None:
                return plan
        return self._plan(kind, self.calls.written(kind, size, times))

    def _of_shape(self, shape: Any, size: MediumSize) -> str:
        """Return what the processor writes for an image of a shape, which this size leads to."""
        name = BY_SHAPE.get(self.calls.name)
        if name is None:
            return self.calls.written("image", size)
        return str(self.calls.processor.replace_image_token({name: [shape]}, 0))

    def _learned(self, kind: Kind) -> Writing:
        """Learn from blank media what the processor writes."""
        replaced = getattr(self.calls.processor, f"replace_{kind}_token")
        if (text := _alike_for_all(replaced)) is not None:
            return Writing(how="constant", plans={None: self._plan(kind, text)})
        sizes = PROBES[kind]
        times = [[number / 2 for number in range(size[0])] if kind == "video" else None for size in sizes]
        texts = [self.calls.written(kind, size, of_size) for size, of_size in zip(sizes, times, strict=True)]
        plans = [self._plan(kind, text) for text in texts]
        if self.calls.options:  # which no count knows
            return Writing()
        for counted in self._counters(kind):
            if (writing := _counting(counted, sizes, plans)) is not None:
                return writing
        if kind == "image" and (shape := SHAPES.get(self.calls.name)) is not None:
            shapes = [shape(self.calls.processor, *size) for size in sizes]
            return Writing(how="shape", shapes=dict(zip(shapes, plans, strict=True)))
        if kind == "video":
            return Writing(how="grid" if all(map(self._is_from_grid, sizes, times, texts)) else "size")
        return Writing(
            plans=dict(zip(sizes, plans, strict=True)), lengths=sorted(size[0] for size in sizes if kind == "audio")
        )

    def _counters(self, kind: Kind) -> Sequence[Callable[[MediumSize], int]]:
        """Return the counts that the processor can give from a size: its own, or that of its image processor."""
        own = partial(_count_tokens, self.calls.processor, kind)
        return (own, partial(_count_patches, self.calls.processor)) if kind == "image" else (own,)

    def _from_grid(self, size: MediumSize, times: Sequence[float]) -> str:
        """Return what the processor writes for a video whose frames are patches on a grid."""
        processor = self.calls.processor
        merge = int(processor.video_processor.merge_size)
        steps = -(-size[0] // int(processor.video_processor.temporal_patch_size))
        counted = processor._get_num_multimodal_tokens(video_sizes=[list(size)])
        per_step = int(counted["num_video_tokens"][0]) // steps
        from transformers.video_utils import VideoMetadata

        made = {
            "video_grid_thw": torch.tensor([[steps, merge, per_step * merge]]),
            "video_metadata": [VideoMetadata(**metadata(size, times, None))],
        }
        return str(processor.replace_video_token(made, 0))

    def _is_from_grid(self, size: MediumSize, times: Sequence[float] | None, text: str) -> bool:
        try:
            return self._from_grid(size, times or ()) == text
        except Exception:  # the processor has no grids
            return False


def _counting(
    counted: Callable[[MediumSize], int], sizes: Sequence[MediumSize], plans: Sequence[Plan]
) -> Writing | None:
    """Return the rule that plans by a count, if the plans of some sizes differ in that count only; else None."""
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


def _count_tokens(processor: Any, kind: Kind, size: MediumSize) -> int:
    name = {"image": "image_sizes", "video": "video_sizes", "audio": "audio_lengths"}[kind]
    counted = processor._get_num_multimodal_tokens(**{name: [size[0] if kind == "audio" else list(size)]})
    return int(counted[f"num_{kind}_tokens"][0])


def _count_patches(processor: Any, size: MediumSize) -> int:
    counted = patches(processor, *size)
    return int(counted[0] if isinstance(counted, tuple) else counted)


def _alike_for_all(replace: Callable[..., Any]) -> str | None:
    """Return the text for a medium if the function that writes it does not look at what is known of the medium."""
    try:
        return str(replace(object(), 0))  # any look at it raises
    except Exception:
        return None
