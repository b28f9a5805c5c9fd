"""Any processor of transformers that takes text with images, videos or sound.

A sample is planned from the sizes of its media alone: the text that the processor writes for a medium depends on its
size only. Before a sample is delivered, the processor itself is called with its text and media, and what it returns is
what the model gets; native pixels stand in for its image processor (`images/native.py`). Its tokens must be the planned
ones, or the sample is refused: nothing differs in silence.

What is written for a medium is learned when the family is made, from blank media of several sizes: see
`processor_plans.py`, and `processor_calls.py` for the calls. `known_processors.py` has what cannot be learned, by the
names of classes. `ProcessorFamily.counts` says from what the tokens of a medium are planned.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS
from energon_bridge.models.families.known_processors import MASKS, REFUSED, SUFFIXED
from energon_bridge.models.families.processor_calls import ARGUMENTS, ProcessorCalls, Replay, placeholder, sources_of
from energon_bridge.models.families.processor_plans import NONE, PROBES, ProcessorPlans
from energon_bridge.models.families.processor_positions import ModelPositions
from energon_bridge.models.families.vision import Plan, PreparedSample, VideoFrames
from energon_bridge.models.images.native import Handed, NativeImages, Uncut
from energon_bridge.models.images.pixels import PixelDtype, Profile, check_choices
from energon_bridge.models.images.programs import Program

_DROPPED = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"),
        *("text_replacement_offsets", "video_metadata"),
    }
)
"""Results of processors that are not passed on: batches have their own, or no model takes them."""
_MOST_MERGED = 16


@dataclass(kw_only=True, slots=True)
class ProcessorFamily:
    """A model whose processor of transformers is called for each sample.

    Examples:
        >>> processor = AutoProcessor.from_pretrained("google/gemma-3-4b-it")  # doctest: +SKIP
        >>> encoder = ChatTemplateTaskEncoder.for_processor(processor)  # doctest: +SKIP

    Args:
        processor: A processor of transformers 5.20 or later, that writes tokens for media.
        model_config: The model's configuration. It is needed for packs of models with positions on three axes.
        options: Further arguments of each call of the processor.
        pixels: Which values pixels have, `torch` or `pillow`, or `processor` to call the image processor; None: those
            of its class, without calling it if its program is known and gives the same bytes.
        pixels_dtype: Type of pixels and features: `bfloat16`, `float16`, `uint8` for `normalise_on_device`, or
            `float32`, which leaves the processor's.

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
    calls: ProcessorCalls = field(init=False, repr=False, compare=False)
    plans: ProcessorPlans = field(init=False, repr=False, compare=False)
    own_positions: ModelPositions | None = field(init=False, repr=False, compare=False)
    kinds: np.ndarray | None = field(init=False, repr=False, compare=False)
    adds_bos: bool = field(init=False, repr=False, compare=False, default=False)
    replays: bool = field(init=False, repr=False, compare=False, default=True)
    native: NativeImages | None = field(init=False, repr=False, compare=False, default=None)
    path: Program | None = field(init=False, repr=False, compare=False, default=None)
    merged: dict[bytes, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._check_processor()
        name = type(self.processor).__name__
        called = self.processor
        if self.image_processor is not None and self.pixels != "processor":
            called = copy(self.processor)
            self.native = NativeImages(self.image_processor, self.pixels, self.pixels_dtype)
            called.image_processor = self.native
        self.calls = ProcessorCalls.of(called, self.options)
        self.plans = ProcessorPlans(calls=self.calls)
        for kind in ARGUMENTS:
            self.plans.learn(kind)
        self._check_values()
        refused = self.plans.refused
        if not self.plans.writings:
            known = {kind: refused[kind] for kind in ARGUMENTS if not refused[kind].endswith(NONE)}
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in (known or refused).items())
            raise ConfigurationError(f"{name} takes no media that could be planned: {reasons}")
        self._set_path()
        self.own_positions = ModelPositions.of(self.model_config)
        self.kinds = _kinds(self.processor)

    def _check_processor(self) -> None:
        """Raise ConfigurationError for a processor or settings that cannot be used."""
        name = type(self.processor).__name__
        if getattr(self.processor, "tokenizer", None) is None:
            raise ConfigurationError(f"{name} has no tokenizer, so it writes no text for media")
        if _of_base("replace_image_token") is None:
            raise ConfigurationError(
                f"{name}: encoders of any processor need transformers 5.22 or newer, whose processors write the text "
                "of one image or video"
            )
        if reason := REFUSED.get(name):
            raise ConfigurationError(f"{name} cannot be used for training on conversations: {reason}")
        check_choices(self.pixels, self.pixels_dtype)

    def _set_path(self) -> None:
        """Set the native path of images, if all calls have one. Raises ConfigurationError if choices need it."""
        self.path = None if self.native is None else self.native.only
        if self.path is None and (self.pixels in ("torch", "pillow") or self.pixels_dtype == "uint8"):
            reason = "pixels='processor'" if self.native is None else self.native.reason
            raise ConfigurationError(
                f"the pixels of {type(self.processor).__name__} are what its image processor returns itself: {reason}; "
                "leave out pixels, and choose pixels_dtype float32, bfloat16 or float16"
            )

    @property
    def chat_template(self) -> str | None:
        """The template of the processor."""
        return SUFFIXED.get(type(self.processor).__name__) or getattr(self.processor, "chat_template", None)

    @property
    def suffixed(self) -> bool:
        """Whether the processor takes the answer apart, and its model reads the question in both directions."""
        return type(self.processor).__name__ in SUFFIXED

    @property
    def counts(self) -> dict[str, str]:
        """Return from what the tokens of each kind of media are planned."""
        return {kind: writing.how for kind, writing in self.plans.writings.items()}

    @property
    def refused(self) -> dict[Kind, str]:
        """Return why the family does not take the other kinds."""
        return self.plans.refused

    @property
    def media_tokens(self) -> frozenset[int]:
        """The tokens that are repeated for media, of the plans so far."""
        return self.plans.media_tokens

    @property
    def image_processor(self) -> Any:
        """The processor's image processor, if it has one."""
        return getattr(self.processor, "image_processor", None)

    @property
    def image_token(self) -> str:
        """What stands for an image in the chat template."""
        return str(placeholder(self.processor, "image") or "")

    @property
    def video_token(self) -> str | None:
        """What stands for a video."""
        return self.processor.video_token if "video" in self.plans.writings else None

    @property
    def audio_token(self) -> str | None:
        """What stands for a sound."""
        return self.processor.audio_token if "audio" in self.plans.writings else None

    @property
    def image_text(self) -> str:
        """The text for an image if no template writes it."""
        return self.calls.place("image") if "image" in self.plans.writings else ""

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
        mixes = hasattr(self.processor, "replace_video_with_audio_token")
        positions = self.own_positions
        told = positions is not None and positions.hear_videos
        return mixes and told and {"video", "audio"} <= self.plans.writings.keys()

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sounds that the processor takes."""
        return self.calls.sampling_rate

    def plan_image(self, width: int, height: int, *, alone: bool = True) -> Plan:
        """Return the plan of an image, the sample's only one or not."""
        return self.plans.of_image(width, height, alone=alone)

    def numbered(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans of a sample's media of one kind, with the number that the processor writes for each."""
        return self.plans.numbered(plans)

    def plan_sound(self, length: int) -> Plan:
        """Return the plan of a sound of so many samples.

        Raises:
            SampleError: The processor would cut it off, or makes no token of one so short.
        """
        return self.plans.of_sound(length)

    def plan_video(self, video: VideoFrames) -> Plan:
        """Return the plan of a video, with its sound if it has one (`video.sound`, a Sound)."""
        return self.plans.of_video(video, hears=self.hears_videos)

    def _check_values(self) -> None:
        """Learn what the processor puts before a text, whether its tokens may be told to it (see `Replay`), and refuse
        kinds of media with values that no batch has.
        """
        bos = self.processor.tokenizer.bos_token_id
        for kind in list(self.plans.writings):
            outs = [dict(self.calls.blank(kind, PROBES[kind][0], before=text)) for text in ("a ", "a few words more ")]
            tokens = [out["input_ids"][0] for out in outs]
            if bos is not None and int(tokens[0][0]) == bos:
                self.adds_bos = True
            dropped = _DROPPED.union(TOKEN_INPUTS)
            made = [{key: value for key, value in out.items() if key not in dropped} for out in outs]
            if unfit := _unfit(made, [len(of_text) for of_text in tokens]):
                del self.plans.writings[kind]
                self.plans.refused[kind] = f"{type(self.processor).__name__} returns {unfit}"
            elif not self._takes_replay(kind, outs[0]):
                self.replays = False

    def _takes_replay(self, kind: Kind, real: Mapping[str, Any]) -> bool:
        """Return whether the processor makes the same of a blank medium if it does not tokenise the text."""
        if any(name in real for name in TOKEN_INPUTS if name not in _DROPPED):  # which it makes of all tokens
            return False
        told = copy(self.calls.processor)
        told.tokenizer = Replay(self.processor.tokenizer)
        try:
            for _ in range(2):  # the tokens of the first call are told in the second
                out = dict(self.calls.blank(kind, PROBES[kind][0], before="a ", processor=told))
        except Exception:  # it asks for more than tokens
            return False
        real = {key: value for key, value in real.items() if key not in _DROPPED}
        return all(isinstance(out.get(key), Tensor) and torch.equal(out[key], value) for key, value in real.items())

    def processed(
        self, sample: PreparedSample, images: Sequence[Any], videos: Sequence[VideoFrames], sounds: Sequence[np.ndarray]
    ) -> dict[str, Tensor]:
        """Return what the processor makes of a sample's media.

        Raises:
            SampleError: The processor cannot take them, or its tokens are not the planned ones.
        """
        name = type(self.processor).__name__
        images = [Handed.of(image) for image in images] if self.native is not None else images
        given: dict[str, Any] = {"images": images, "videos": videos, "audio": sounds}
        given["sources"] = sources_of(sample.plans, videos)
        given |= self._said(sample)
        out: Mapping[str, Any] | None = None
        if self.replays:
            told = copy(self.calls.timed(videos))
            told._check_special_mm_tokens = _compared_below
            if not (videos or sounds or self.options):  # else, what is given differs from sample to sample
                told._merge_kwargs = self._merged
            with suppress(Exception):  # the processor itself says what is wrong
                told.tokenizer = Replay(self.processor.tokenizer, self._written_out(sample), sample.tokens)
                out = self.calls.called(processor=told, **given, special=sample.adds_special)
        try:
            out = dict(out or self.calls.called(**given, special=sample.adds_special))
            out = {key: one.as_subclass(Tensor) if isinstance(one, Uncut) else one for key, one in out.items()}
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
        for values, mask in MASKS.items():
            if values in visual and mask not in visual:
                visual[mask] = torch.ones(visual[values].shape[:2], dtype=torch.bool)
        if unfit := _unfit([visual], [0]):
            raise SampleError(f"{name} returns {unfit}")
        if self.pixels_dtype in ("float32", "uint8"):  # the default: what the processor itself makes
            return visual
        dtype = getattr(torch, self.pixels_dtype)
        dense = {key: one.to(dtype) for key, one in visual.items() if one.is_floating_point() and one.ndim > 1}
        return visual | dense

    def _said(self, sample: PreparedSample) -> dict[str, Any]:
        """Return the text of a sample as the processor takes it, without what it adds by itself."""
        if not self.suffixed:
            return {"text": sample.text}
        tokenizer = self.processor.tokenizer
        question = sample.text.removesuffix(sample.answer + tokenizer.eos_token).removesuffix("\n")
        begin = question.rindex(self.image_token) + len(self.image_token)
        behind = question[begin:].removeprefix(tokenizer.bos_token)
        return {"text": question[:begin] + behind, "suffix": sample.answer}

    def token_inputs(self, sample: PreparedSample) -> dict[str, Tensor]:
        """Return what the model gets with each token: where a question ends, if it reads that in both directions."""
        if not self.suffixed:
            return {}
        learned = (sample.loss_mask > 0).cumsum(0) - (sample.loss_mask > 0).long()  # of the tokens before each
        return {"token_type_ids": (learned > 0).long()[None]}

    def _merged(self, *args: Any, **given: Any) -> dict[str, Any]:
        """Return the arguments of each part of the processor, which checks the same ones once, not for each sample."""
        key = pickle.dumps((args, {name: one for name, one in given.items() if name != "tokenizer_init_kwargs"}))
        if key not in self.merged:
            if len(self.merged) >= _MOST_MERGED:
                self.merged.clear()
            self.merged[key] = self.calls.processor._merge_kwargs(*args, **given)
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
        """Return the model's own positions on three axes, int64 (3, tokens); None if it has one axis."""
        return None if self.own_positions is None else self.own_positions.of_sample(tokens, types, visual)


def _compared_below(*args: Any, **kwargs: Any) -> None:
    """Count no tokens, one Python number after the other: all of them are compared with the planned ones."""


def _unfit(made: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> str | None:
    """Return a phrase on the first result of a processor that cannot be batched; `tokens` are the lengths of texts."""
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
    of_kinds = [getattr(processor, f"{kind}_token_ids") for kind in ARGUMENTS]
    known = {token: number for number, tokens in enumerate(of_kinds, 1) for token in tokens}
    types = np.zeros(max(filter(None, known), default=0) + 2 if known else 0, np.uint8)
    for token, number in known.items():
        if token is not None:
            types[token] = number
    return types


def _of_base(name: str) -> Any:
    from transformers.processing_utils import ProcessorMixin

    return getattr(ProcessorMixin, name, None)
