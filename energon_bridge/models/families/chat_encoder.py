"""The task encoder of all families: from conversations to the model's inputs.

It works in two steps, before and after packing. `preencode_sample` renders and tokenises a conversation, and counts the
tokens of its images from the sizes in their headers; `postencode_sample` makes the pixels. So samples in a packing
buffer have no pixels, and only delivered samples are decoded.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.deferred import Deferred
from energon_bridge.core.encoder.hooks import count_over_long
from energon_bridge.core.errors import (
    ConfigurationError,
    OverLongSampleError,
    SampleError,
    SkipSample,
    called,
    check_number,
)
from energon_bridge.core.samples import VidQASample
from energon_bridge.core.samples.sample_place import warn_once
from energon_bridge.models.conversations.batching import SequenceTaskEncoder
from energon_bridge.models.conversations.blank_media import Blank, BlankMedia, blank_image, blank_kinds
from energon_bridge.models.conversations.conversation import (
    ChatSample,
    Conversation,
    Document,
    MediaWithOptions,
    in_parts,
    name_missing_end,
)
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.conversations.rendering import TextPiece
from energon_bridge.models.conversations.sample_encoders import (
    SAMPLE_ENCODERS,
    SampleEncoder,
    encode_video_question,
    read_sample,
    sample_key,
)
from energon_bridge.models.conversations.segments import MediaOptions
from energon_bridge.models.conversations.sequences import MultiModalSample, count_truncated, finished, nothing_learned
from energon_bridge.models.conversations.templates import RunDay, control_tokens
from energon_bridge.models.families.known_families import family_of, load_pretrained
from energon_bridge.models.families.llava import FixedTokenFamily, TiledFamily
from energon_bridge.models.families.processor import ProcessorFamily
from energon_bridge.models.families.qwen import QwenFamily
from energon_bridge.models.families.rendering import (
    Tokens,
    bos_to_add,
    document_segments,
    make_renderer,
    placeholder_ids,
    placeholder_tokens,
    tokenize_segments,
)
from energon_bridge.models.families.sound import DeferredSound, Sound, sound_of, track_of
from energon_bridge.models.families.video import decoded, frames_shape, thinned, video_of
from energon_bridge.models.families.vision import Family, Plan, PreparedSample, VideoFrames, positions_of
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.models.images.pixels import DeferredPixels, PixelDtype, Profile
from energon_bridge.models.images.programs import Program
from energon_bridge.models.images.resize import smart_resize
from energon_bridge.models.images.visual import as_pil, size_of
from energon_bridge.models.packing.packing import OverLong, Packer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """How to render, mask, limit and pad conversations.

    Examples:
        >>> config = ChatConfig(seq_length=8192, learn="last")
        >>> ChatTemplateTaskEncoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", config)  # doctest: +SKIP

    Args:
        seq_length: Longest sequence, image tokens included.
        chat_template: A Jinja template instead of the tokenizer's own.
        template_kwargs: Further arguments of the template, for example `{"enable_thinking": False}`.
        system: System prompt for conversations without one.
        today: The date that the template writes, if it writes one, such as "2026-01-31". None: the day on which the run
            began, which its states have.
        learn: `all` answers, or only the `last`, for templates that write earlier turns differently.
        over_long: What to do with a conversation longer than `seq_length`: `truncate` cuts it on the right, never
            inside an image or a video; `drop` leaves it out as SkipSample does; `raise` stops the run.
        max_num_images: Most images and videos of a sample; None: any number.
        max_visual_tokens: Most image and video tokens of a sample.
        video_fps: Frames per second to take from a video given as a decoder (`AVDecoder`).
        min_num_frames: Fewest frames to take from such a video, if it has that many.
        max_num_frames: Most frames of a video, evenly spaced, with the first and the last.
        max_video_tokens: Most tokens of all videos of a sample: they get fewer frames, evenly spaced, until they fit.
        max_video_pixels: Most pixels of all frames of a sample, as they are stored, by fewer frames likewise: what a
            processor holds of them at a time.
        max_sound_seconds: Cut sounds off after so many seconds. None: a sound that is longer than the model's processor
            takes, which would cut it off in silence, is a SampleError.
        video_sound: Hear the sound tracks of videos given as decoders, in time with their frames, as Qwen2.5-Omni and
            Qwen3-Omni do (`use_audio_in_video`); a video without one is silent.
        over_limit: The same choices for samples over `max_num_images` or `max_visual_tokens`: `truncate` cuts before
            the first image or video over the limit.
        place_images: Put images without a placeholder `before` or `after` the first question.
        add_bos: Start with the begin-of-sequence token. None: if the tokenizer does, unless the text already has it.
        pad_to_multiple_of: Batches, and the samples of packs, are padded to a multiple of this length.
        pad_to_max_length: Pad every batch, and every pack, to `seq_length`: one shape for all batches.
        ignore_index: Label of every position that carries no loss.
        pixels: Which values pixels have: `torch` or `pillow`, as from transformers' processors based on torchvision
            or Pillow; `processor` calls the image processor. None: the family's choice.
        pixels_dtype: Type of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, which `normalise_on_device`
            turns into floats. None: the family's choice.
        autorotate: Turn images as EXIF says, and videos as their headers say, as viewers do. False: as they are stored.
        blank_media: A microbatch without images gets a blank one, whose tokens no other sees and which changes no loss,
            so that every rank runs the vision tower; likewise without videos and sounds. True: every kind that the
            model takes; or their names: `("image", "video")`. With `pad_to_max_length`, they take their tokens from
            `seq_length`.

    Raises:
        ConfigurationError: A number is not positive, or a choice is unknown.
    """

    seq_length: int = 2048
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    today: date | str | None = None
    learn: Literal["all", "last"] = "all"
    over_long: OverLong | Literal["truncate", "drop", "raise"] = OverLong.TRUNCATE
    max_num_images: int | None = None
    max_visual_tokens: int | None = None
    video_fps: float = 2.0
    min_num_frames: int = 4
    max_num_frames: int | None = 768
    max_video_tokens: int | None = None
    max_video_pixels: int | None = None
    max_sound_seconds: float | None = None
    video_sound: bool = False
    over_limit: OverLong | Literal["truncate", "drop", "raise"] = OverLong.DROP
    place_images: Literal["before", "after"] = "before"
    add_bos: bool | None = None
    pad_to_multiple_of: int = 1
    pad_to_max_length: bool = False
    ignore_index: int = -100
    pixels: Profile | None = None
    pixels_dtype: PixelDtype | None = None
    autorotate: bool = False
    blank_media: BlankMedia = False

    def __post_init__(self) -> None:
        numbers = ("seq_length", "max_num_images", "max_visual_tokens", "min_num_frames", "max_num_frames")
        for name in (*numbers, "max_video_tokens", "max_video_pixels", "pad_to_multiple_of"):
            number = check_number(f"ChatConfig: {name}", getattr(self, name), 1, optional=True)
            object.__setattr__(self, name, number)
        for name in ("video_fps", "max_sound_seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigurationError(f"ChatConfig: {name} must be positive, got {value!r}")
        RunDay.of(self.today)
        policies = (OverLong.TRUNCATE, OverLong.DROP, OverLong.RAISE)
        for name, choices in (
            ("over_long", policies),
            ("over_limit", policies),
            ("learn", ("all", "last")),
            ("place_images", ("before", "after")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"ChatConfig: {name} must be one of {', '.join(choices)}, got {str(getattr(self, name))!r}"
                )


class ChatTemplateTaskEncoder(SequenceTaskEncoder):
    """Encode conversations with images and videos for a model of transformers, with its tokenizer's chat template.

    Examples:
        >>> encoder = ChatTemplateTaskEncoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct")  # doctest: +SKIP
        >>> dataset = get_train_dataset("data/chats", batch_size=1, task_encoder=encoder)  # doctest: +SKIP

    Args:
        tokenizer: Of the transformers interface, with a chat template unless the configuration has one.
        family: How the model takes images and videos: `family_of(model.config, tokenizer, image_processor)`, a
            QwenFamily, a FixedTokenFamily, a ProcessorFamily or your own. None: the model takes texts only.
        config: How to render, mask, limit and pad conversations.
        packer: How to pack `PreparedSample`s; its `over_long` decides about samples too long for a pack. None: by best
            fit into `seq_length` tokens, if packing is on.

    Attributes:
        counts: Number of over-long samples in this process so far, by policy and limit.

    Raises:
        ConfigurationError: There is no chat template, or the tokenizer lacks the family's tokens.
    """

    decoder: SampleDecoder | None = SampleDecoder(image_decode="pilrgb", defer_images=True)

    def __init__(
        self,
        tokenizer: Any,
        family: Family | ProcessorFamily | None,
        config: ChatConfig | None = None,
        *,
        packer: Packer[PreparedSample] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config or ChatConfig()
        self.family = family = _with_pixels(family, self.config)
        dtype = getattr(family, "pixels_dtype", "float32")
        path: Program | None = getattr(family, "path", None)
        self._set_pixels(getattr(family, "image_processor", None), path, dtype, ChatTemplateTaskEncoder.decoder)
        self.counts: Counter[str] = Counter()
        self._renderer = make_renderer(
            tokenizer,
            family,
            template=self.config.chat_template or getattr(family, "chat_template", None),
            learn=self.config.learn,
            options=self.config.template_kwargs,
            day=RunDay.of(self.config.today),
        )
        self._placeholders = placeholder_ids(tokenizer, family)
        media = placeholder_tokens(family).values()
        self._control_tokens = control_tokens(tokenizer, self._renderer.template, media)
        if self.config.video_sound and not getattr(family, "hears_videos", False):
            raise ConfigurationError(
                f"video_sound of the ChatConfig{called('video_sound')} needs a model that hears videos (Qwen2.5-Omni, "
                "Qwen3-Omni), its model_config, and transformers 5.23 or later; the family is a "
                f"{type(family).__name__}"
            )
        self._bos = bos_to_add(tokenizer, self.config.add_bos)
        if isinstance(family, ProcessorFamily) and (family.adds_bos or family.suffixed):
            self._bos = tokenizer.bos_token_id if family.adds_bos else None
        longest = self.config.seq_length
        padded = self.config.pad_to_max_length
        multiple_of = self.config.pad_to_multiple_of
        self._set_rows(tokenizer, packer, longest, multiple_of, padded=padded, ignore=self.config.ignore_index)
        self._encoders = {**SAMPLE_ENCODERS, VidQASample: encode_video_question}
        # For the encoders of sample types; the placeholder is that of conversations, not the model's.
        self._sample_config = MultiModalSampleConfig(
            image_token=ImageToken(token_str="<image>"), image_following_text=self.config.place_images == "after"
        )
        taken = [kind for kind, token in placeholder_tokens(family).items() if token]
        self._set_blanks([self._blank(kind) for kind in blank_kinds(self.config.blank_media, taken)])

    @classmethod
    def for_model(
        cls,
        model_config: Any,
        tokenizer: Any,
        image_processor: Any,
        config: ChatConfig | None = None,
        *,
        packer: Packer[PreparedSample] | None = None,
    ) -> Self:
        """Return the encoder for a model, whose configuration names its family. Raises ConfigurationError."""
        return cls(tokenizer, family_of(model_config, tokenizer, image_processor), config, packer=packer)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, config: ChatConfig | None = None, *, packer: Packer[PreparedSample] | None = None
    ) -> Self:
        """Return the encoder for a model in a folder or on the hub.

        Models of the LLaVA and Qwen-VL families get native pixels with their Pillow image processor; all others are
        encoded by their own processor.

        Raises:
            ConfigurationError: A part cannot be loaded, or the model's processor does not read media among turns.
        """
        loaded = load_pretrained(name_or_path)
        return cls(loaded.tokenizer, loaded.family, _with_template(config, loaded.chat_template), packer=packer)

    @classmethod
    def for_processor(
        cls,
        processor: Any,
        config: ChatConfig | None = None,
        *,
        model_config: Any = None,
        packer: Packer[PreparedSample] | None = None,
    ) -> Self:
        """Return the encoder for a processor of transformers, which is called for each sample.

        Args:
            processor: Takes text with images, videos or sound.
            config: How to render, mask, limit and pad conversations.
            model_config: The model's configuration; models with positions on three axes need it for packs.
            packer: As of the class.

        Raises:
            ConfigurationError: The processor does not read media among the turns of a conversation.
        """
        family = ProcessorFamily(processor=processor, model_config=model_config)
        return cls(processor.tokenizer, family, config, packer=packer)

    def register_encoder(self, sample_type: type, encoder: SampleEncoder) -> None:
        """Encode samples of a type and its subclasses with a function of the sample and a configuration.

        The function returns a `ChatSample`, a `Conversation` or a `Document`, with `<image>` for images in prompts.
        """
        self._encoders[sample_type] = encoder

    def encode(self, sample: Any) -> MultiModalSample:
        """Encode one sample in a single step, with pixels. Raises SampleError and SkipSample as the two steps do."""
        return self.postencode_sample(self._prepared(sample))

    def preencode_sample(self, sample: Any) -> PreparedSample | Iterator[PreparedSample]:
        """Render and tokenise a sample, and count its image tokens; a packer that splits yields several samples.

        Raises:
            SampleError: The sample has no answer, or a wrong number of images.
            SkipSample: It exceeds a limit with the policy `drop`.
            OverLongSampleError: It exceeds a limit with the policy `raise`.
        """
        prepared = self._prepared(sample)
        return self.packer.admitted(prepared) if self._admits else prepared

    def postencode_sample(self, sample: PreparedSample) -> MultiModalSample:
        """Process the images and videos of a sample. Raises SampleError if their sizes differ from the plans."""
        images = [image.decoded() if isinstance(image, DeferredImage) else image for image in sample.images]
        visual: dict[str, Tensor] = {}
        family = self.family
        if sample.plans and family is not None:
            try:
                videos = list(map(decoded_medium, sample.videos))
                if isinstance(family, ProcessorFamily):
                    visual = family.processed(sample, images, videos, list(map(decoded_medium, sample.sounds)))
                else:  # images, then videos; each in order
                    visual = family.process(images, videos, sorted(sample.plans, key=lambda plan: plan.kind))
            except SampleError as error:
                raise type(error)(f"sample {sample_key(sample)!r}: {error}") from error
        if isinstance(family, ProcessorFamily):
            visual |= family.token_inputs(sample)
            positions = family.positions(sample.tokens, sample.mm_token_type_ids, visual) if sample.plans else None
        else:
            positions = positions_of(sample, family)
        return sample.finished(visual, positions, of_processor=isinstance(family, ProcessorFamily))

    @property
    def image_token_ids(self) -> frozenset[int]:
        """Return the tokens that stand for images, videos and sounds."""
        tokens = frozenset(self._placeholders.values())
        return self.family.media_tokens or tokens if isinstance(self.family, ProcessorFamily) else tokens

    @property
    def run_day(self) -> RunDay | None:
        return self._renderer.run_day

    @property
    def autorotate(self) -> bool:
        return self.config.autorotate

    def _prepared(self, sample: Any) -> PreparedSample:
        try:
            return self._planned_sample(sample)
        except (SampleError, SkipSample, OverLongSampleError) as error:
            raise type(error)(f"sample {sample_key(sample)!r}: {error}") from error

    def _planned_sample(self, sample: Any) -> PreparedSample:
        content = read_sample(
            sample,
            self._encoders,
            self._sample_config,
            place_images=self.config.place_images,
            takes_sound=isinstance(self.family, ProcessorFamily) and self.family.audio_token is not None,
            control_tokens=self._control_tokens,
        )
        if isinstance(content, Document) and self._apart:
            content = content.as_question()
        segments = self._rendered(content)
        videos = self._videos(content.videos) if isinstance(content, Conversation) and content.videos else []
        sounds = self._sounds(content.audios) if isinstance(content, Conversation) and content.audios else []
        images = self._deferred([_at_size(image, self.family) for image in content.images])
        plans = self._planned(segments, images, videos, sounds)
        sounds = _in_order(plans, videos, sounds)
        whole = tokenize_segments(segments, plans, self.tokenizer, self._placeholders, apart=self._apart)
        adds_bos = self._bos is not None and whole.rows[0, :1].tolist() != [self._bos]
        if self._bos is not None and adds_bos:
            whole = whole.after(self._bos)
        limited = self._limited(whole)
        rows, media = self._fitting(limited)
        kept = [place.plan for place in media]
        done = finished(rows[0], rows[1], self.config.ignore_index)
        if done is None:
            raise SampleError(self._nothing_learned(limited, plans, kept))
        if rows.shape[1] < whole.rows.shape[1]:
            by_length = rows.shape[1] < limited.rows.shape[1]
            limit = self.config.seq_length if by_length else None
            count_truncated(sample_key(sample), whole.rows.shape[1] - 1, len(done[0]), limit)
        tokens, labels, loss_mask = done
        types = rows[2, :-1]
        if isinstance(self.family, ProcessorFamily):
            types = self.family.token_types(rows[0, :-1], types)
        kinds = [plan.kind for plan in kept]
        num_videos = kinds.count("video")
        heard = kinds.count("audio") + sum(video.sound is not None for video in videos[:num_videos])
        return PreparedSample.derive_from(
            sample,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            mm_token_type_ids=torch.from_numpy(types.astype(np.int64)),
            plans=tuple(kept),
            images=images[: kinds.count("image")],
            videos=self._deferred_videos(videos[:num_videos]),
            sounds=[DeferredSound(sound=one) if one.alone else one for one in sounds[:heard]],
            answer=content.first_answer,
            text=_text_with(segments, len(kept)) if isinstance(self.family, ProcessorFamily) else "",
            adds_special=adds_bos and not (isinstance(self.family, ProcessorFamily) and self.family.adds_bos),
        )

    def _blank(self, kind: str) -> Blank:
        """Return a blank medium, encoded as in a conversation. Raises ConfigurationError if it does not fit."""
        family: Any = self.family
        frames = torch.full((4, 3, 64, 64), 255, dtype=torch.uint8)
        rate = family.sampling_rate if kind == "audio" else 1
        turns = [{"role": "user", "content": f"<{kind}>"}, {"role": "assistant", "content": "."}]
        sample = ChatSample(
            __key__="blank",
            messages=turns,
            images=[blank_image()] if kind == "image" else None,
            videos=[VideoFrames(frames=frames, fps=2.0)] if kind == "video" else None,
            audios=[(np.zeros(rate // 2, np.float32), rate)] if kind == "audio" else None,
        )
        try:
            prepared = self._prepared(sample)
            made = ChatTemplateTaskEncoder.postencode_sample(self, prepared)
        except (SampleError, SkipSample, OverLongSampleError) as error:
            raise ConfigurationError(f"blank_media: {error}") from error
        return Blank.of(made.tokens, made.mm_token_type_ids, made.visual, prepared.mm_token_type_ids > 0)

    @property
    def _apart(self) -> bool:
        """Whether a question and its answer are apart for the model: tokenised each alone."""
        return isinstance(self.family, ProcessorFamily) and self.family.suffixed

    def _rendered(self, content: Conversation | Document) -> list[TextPiece]:
        """Return the text of a sample."""
        if isinstance(content, Document):
            if not self.tokenizer.eos_token:
                name_missing_end()
            return document_segments(content, self._renderer.media, eos=self.tokenizer.eos_token or "")
        content = in_parts(content)
        _check_last_turns(content)
        return self._renderer.segments(content.with_system(self.config.system))

    def _videos(self, values: Sequence[Any]) -> list[VideoFrames]:
        config = self.config
        least = config.min_num_frames
        most = config.max_num_frames
        videos = [video_of(value, fps=config.video_fps, least=least, most=most) for value in values]
        videos = [_video_at_size(video, value, self.family) for video, value in zip(videos, values, strict=True)]
        timed = getattr(self.family, "video_timestamps", True) or getattr(self.family, "tokens_per_second", True)
        if timed and any(video.rate is None and frames_shape(video.frames)[0] > 1 for video in videos):
            what = "frames of a video have no times, and are taken as 24 a second, as in transformers"
            warn_once(_logger, f"{what}: give VideoFrames with fps or timestamps")
        videos = [self._with_sound(video, value) for video, value in zip(videos, values, strict=True)]
        if config.max_video_pixels is not None:
            videos = thinned(videos, lambda video: math.prod(frames_shape(video.frames)), config.max_video_pixels)
        if config.max_video_tokens is not None and (family := self.family) is not None:
            videos = thinned(videos, lambda video: family.plan_video(video).tokens, config.max_video_tokens)
        return videos

    def _with_sound(self, video: VideoFrames, value: Any) -> VideoFrames:
        """Return a video with its sound at the rate of the model, undecoded. Raises SampleError if it hears none."""
        if video.sound is None and not self.config.video_sound:
            return video
        if not isinstance(self.family, ProcessorFamily) or not self.family.hears_videos:
            raise SampleError("a video has sound, but the model of this task encoder hears none in videos")
        rate = self.family.sampling_rate
        sound = track_of(value, rate=rate) if video.sound is None else sound_of(video.sound, rate=rate)
        return replace(video, sound=sound and sound.until(self.config.max_sound_seconds))

    def _sounds(self, values: Sequence[Any]) -> list[Sound]:
        """Return the sounds at the rate of the model."""
        if not isinstance(self.family, ProcessorFamily):
            return []
        longest = self.config.max_sound_seconds
        return [sound_of(value, rate=self.family.sampling_rate).until(longest) for value in values]

    def _planned(
        self, segments: Sequence[TextPiece], images: Sequence[Any], videos: Sequence[Any], sounds: Sequence[Sound]
    ) -> list[Plan]:
        """Return the plans of images, videos and sounds in the order of their placeholders."""
        family = self.family
        if (images or videos) and family is None:
            raise SampleError("the sample has images or videos, but the encoder has no family for them: pass family=…")
        if family is None:
            return []
        alone = {"alone": len(images) == 1} if isinstance(family, ProcessorFamily) else {}
        plans = {
            "image": [family.plan_image(*size_of(image), **alone) for image in images],
            "video": [family.plan_video(video) for video in videos],
            "audio": [family.plan_sound(sound.length) for sound in sounds if isinstance(family, ProcessorFamily)],
        }
        if isinstance(family, ProcessorFamily):
            plans = {kind: family.numbered(of_kind) for kind, of_kind in plans.items()}
        ordered = [plans[s.media].pop(0) for s in segments if s.media is not None and plans[s.media]]
        return [*ordered, *plans["image"], *plans["video"], *plans["audio"]]

    def _deferred(self, images: Sequence[Any]) -> list[Any]:
        """Return images whose undecoded ones become pixels on the decode threads.

        User code that takes images in `postencode_sample` or `Family.process` still gets images.
        """
        path = self._path
        if path is None or not self._makes_pixels_early:
            return list(images)
        if isinstance(self.family, ProcessorFamily) and len(images) > 1:  # whose pixels may depend on one another
            return list(images)
        return [DeferredPixels.of(image, path) if type(image) is DeferredImage else image for image in images]

    def _deferred_videos(self, videos: Sequence[VideoFrames]) -> list[Any]:
        """The same as `_deferred`, for videos given as decoders."""
        if not isinstance(self.family, QwenFamily) or not self._makes_pixels_early:
            return list(videos)
        return [self.family.deferred_video(video) for video in videos]

    @property
    def _makes_pixels_early(self) -> bool:
        return type(self.family) in _FAMILIES and type(self).postencode_sample is _POSTENCODE

    def _limited(self, whole: Tokens) -> Tokens:
        """Apply the limits of images and visual tokens."""
        tokens = 0
        for images, place in enumerate(whole.media, 1):
            tokens += place.plan.tokens
            for name, size in (("max_num_images", images), ("max_visual_tokens", tokens)):
                limit = getattr(self.config, name)
                if limit is not None and size > limit:
                    what = f"at least {size} images and videos" if name == "max_num_images" else f"{size} visual tokens"
                    self._over(self.config.over_limit, name, f"{what}, with {name}={limit}")
                    return whole.until(place.start)
        return whole

    def _fitting(self, found: Tokens) -> Tokens:
        """Return the tokens that fit, and one more, as the label of the last; no medium is cut."""
        total = found.rows.shape[1]
        longest = self._longest
        if total <= longest:
            return found
        if total > longest + 1:
            self._over(self.config.over_long, "seq_length", f"{total - 1} tokens, with seq_length={longest}")
        return found.until(min([longest + 1, *(place.start for place in found.media if place.end > longest)]))

    def _nothing_learned(self, limited: Tokens, plans: Sequence[Plan], kept: Sequence[Plan]) -> str:
        """Return what to say of a sample of which nothing is learned, and by which setting something would be."""
        missing = plans[len(kept)] if len(kept) < len(plans) else None
        which = "" if missing is None else f"{missing.kind} {len(kept) + 1} of {len(plans)} ({missing.tokens} tokens)"
        if len(kept) == len(limited.media) < len(plans):
            return (
                f"nothing to learn: max_num_images or max_visual_tokens leaves out {which}, and all text to learn "
                "comes after it; raise the limit"
            )
        why = f", for it has no room for {which}" if which else ""
        said = nothing_learned(limited.rows[1].tolist(), self.config.seq_length, self._longest, why)
        if missing is not None and missing.kind == "audio":
            return f"{said}, or cut sounds off with max_sound_seconds{called('max_sound_seconds')}"
        return said

    def _over(self, policy: str, limit: str, complaint: str) -> None:
        """Apply a policy: count the sample, and raise unless the policy cuts it."""
        self.counts[f"{policy} {limit}"] += 1
        if policy == OverLong.DROP:
            count_over_long("dropped")
            raise SkipSample(complaint)
        if policy == OverLong.RAISE:
            raise OverLongSampleError(
                f"{complaint}: raise the limit, or set over_long or over_limit of the ChatConfig to "
                "'truncate' or 'drop'"
            )


def _at_size(image: Any, family: Any) -> Any:
    """Return an image at the size that its part says, as `fetch_image` of qwen-vl-utils scales it.

    Raises:
        SampleError: The sizes of images are the model's.
    """
    if not isinstance(image, MediaWithOptions):
        return image
    if not image.options.resizes:
        return image.value
    factor = _factor(family, image.options)
    width, height = size_of(image.value)
    rows, columns = _size_by_options(image.options, (height, width), factor, (4 * factor**2, 16384 * factor**2))
    value = image.value.get() if isinstance(image.value, DeferredImage) else image.value
    return as_pil(value, "white").resize((columns, rows))


def _video_at_size(video: VideoFrames, value: Any, family: Any) -> VideoFrames:
    """Return a video whose frames have the size that its part says, as in qwen-vl-utils. Raises as above."""
    if not isinstance(value, MediaWithOptions) or not value.options.resizes:
        return video
    if not isinstance(family, QwenFamily):
        raise SampleError(f"a part gives a video its size in pixels, which {type(family).__name__} has no choice of")
    options = value.options
    factor = family.factor
    count, height, width = frames_shape(video.frames)
    least = options.min_pixels or 128 * factor**2
    most = 768 * factor**2
    if options.total_pixels is not None:
        most = min(most, options.total_pixels * 2 // count)
    area = (least, max(most, int(least * 1.05)))
    return replace(video, scaled_to=_size_by_options(options, (height, width), factor, area))


def _size_by_options(
    options: MediaOptions, size: tuple[int, int], factor: int, area: tuple[int, int]
) -> tuple[int, int]:
    """Return height and width by the options of a part; `area` has the bounds, in pixels, for those it does not set."""
    if options.resized_height is not None and options.resized_width is not None:
        return smart_resize(options.resized_height, options.resized_width, factor=factor, area=area)
    least = options.min_pixels or area[0]
    most = options.max_pixels if options.total_pixels is None else min(options.max_pixels or area[1], area[1])
    return smart_resize(*size, factor=factor, area=(least, most or area[1]))


def _factor(family: Any, options: MediaOptions) -> int:
    processor: Any = getattr(family, "image_processor", None)
    if isinstance(family, QwenFamily) or hasattr(processor, "merge_size"):
        return int(processor.patch_size) * int(processor.merge_size)
    given = ", ".join(name for name in ("min_pixels", "max_pixels", "resized_height") if getattr(options, name))
    raise SampleError(f"a part gives an image {given}, but the sizes of images are those of the model: leave it out")


_logger = logging.getLogger(__name__)
_FAMILIES = (FixedTokenFamily, TiledFamily, QwenFamily, ProcessorFamily)
_POSTENCODE = ChatTemplateTaskEncoder.postencode_sample


def _check_last_turns(content: Conversation) -> None:
    """Warn once of turns after the last answer that have media, which are cut off with these turns.

    Raises SampleError if they are questions, and hold all media of the sample: answers would be learned blind.
    """
    if not content.turns or content.turns[-1].role == "assistant":
        return
    numbers = (number for number, turn in enumerate(content.turns, 1) if turn.role == "assistant")
    last = max(numbers, default=len(content.turns))
    seen = any(part.kind != "text" for turn in content.turns[:last] for part in turn.parts)
    for number, turn in enumerate(content.turns[last:], last + 1):
        if kind := next((part.kind for part in turn.parts if part.kind != "text"), None):
            place = f"no answer follows the {kind} of message {number} ({turn.role})"
            if turn.role == "user" and not seen:
                raise SampleError(
                    f"{place}: the last one, message {last}, would be learned without it. Put the answer behind its "
                    f"question, or take message {number} out of the sample"
                )
            said = f"{place} of a sample: it is left out, as all turns after the last answer are"
            warn_once(_logger, said, "media behind")


def _with_template(config: ChatConfig | None, template: Any) -> ChatConfig:
    """Return a configuration with the chat template of a processor, unless it has its own."""
    config = config or ChatConfig()
    return replace(config, chat_template=template) if config.chat_template is None and template is not None else config


def _text_with(segments: Sequence[TextPiece], media: int) -> str:
    """Return the text of a sample before its medium number `media`, from 0; all of it if there are fewer."""
    places = [number for number, segment in enumerate(segments) if segment.media is not None]
    return "".join(segment.text for segment in segments[: places[media] if media < len(places) else None])


def _in_order(plans: Sequence[Plan], videos: Sequence[VideoFrames], sounds: Sequence[Sound]) -> list[Sound]:
    """Return the sounds of a sample, those of its videos among them, in the order of their places."""
    own = iter(sounds)
    of_videos = iter(video.sound for video in videos)
    heard = [next(own if plan.kind == "audio" else of_videos) for plan in plans if plan.kind != "image"]
    return [sound for sound in heard if sound is not None]


def decoded_medium(medium: Any) -> Any:
    """Return what a family takes of an image, video or sound that the engine's threads have decoded, or not."""
    if isinstance(medium, Deferred):
        return medium.decoded()
    if isinstance(medium, VideoFrames):
        return decoded(medium)
    return medium.get() if isinstance(medium, Sound) else medium


def _with_pixels(family: Any, config: ChatConfig) -> Any:
    """Return a family with the pixels of a configuration. Raises ConfigurationError if it has no such choice."""
    wanted = {"pixels": config.pixels, "pixels_dtype": config.pixels_dtype}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if not wanted or family is None:
        return family
    if not is_dataclass(family) or not {"pixels", "pixels_dtype"} <= {entry.name for entry in fields(family)}:
        raise ConfigurationError(
            f"{' and '.join(wanted)} of the ChatConfig have no effect on a {type(family).__name__}, since your own "
            "family makes its pixels itself: leave them out"
        )
    return replace(cast(Any, family), **wanted)
