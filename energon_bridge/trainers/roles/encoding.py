"""What each role makes of a sample: the language ranks its tokens, the encoder ranks its media.

Both run the same code up to the microbatch of texts: which samples there are, which of them are left out, and how they
are packed follows from texts and from what the headers of media tell. So all roles agree without a word. Only then does
an encoder rank decode media, and nothing that happens there can change a row: a medium that does not decode is
delivered blank, at the size that its header tells, and named; anything else stops the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.hooks import CONFIG, Hook, is_overridden
from energon_bridge.core.encoder.task_encoder import AugmentTaskEncoder
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, SampleError
from energon_bridge.core.samples import Batch, edataclass
from energon_bridge.core.storage.forks import PerProcess, Threads
from energon_bridge.models.conversations.blank_media import Blank
from energon_bridge.models.conversations.conversation import Kind
from energon_bridge.models.conversations.sample_encoders import sample_key
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS, join_visual
from energon_bridge.models.families import ChatTemplateTaskEncoder, ProcessorFamily, VideoFrames
from energon_bridge.models.families.chat_encoder import decoded_medium
from energon_bridge.models.families.processor_plans import PROBES
from energon_bridge.models.families.qwen import DeferredVideo
from energon_bridge.models.families.rendering import placeholder_tokens
from energon_bridge.models.families.sound import DeferredSound, Sound
from energon_bridge.models.families.video import FramesToDecode, frames_shape
from energon_bridge.models.families.vision import Plan, PreparedSample, positions_of
from energon_bridge.models.images.images import DeferredImage
from energon_bridge.trainers.replica.balanced import Cost

KINDS: Mapping[str, frozenset[Kind]] = {
    "vision": frozenset(("image", "video")),
    "audio": frozenset(("audio",)),
    "media": frozenset(("image", "video", "audio")),
}
"""The kinds of media of an encoder, by the name of its grid."""

_MEDIA: Mapping[Kind, str] = {"image": "images", "video": "videos", "audio": "sounds"}
"""Where a sample has the media of a kind, in the order in which processors take them."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """A row, or a batch of them, and the samples in it with their undecoded media."""

    content: Any
    samples: tuple[PreparedSample, ...]

    @classmethod
    def of(cls, content: Any, rows: Sequence[_Texts]) -> _Texts:
        return cls(content, tuple(one for row in rows for one in row.samples))


class LanguageTaskEncoder(AugmentTaskEncoder):
    """An encoder whose batches have the tokens of media, and not the media: for the ranks of the language model.

    Batches are those of the encoder inside, but for what only the media have: of `visual_inputs`, grids stay
    (`image_grid_thw`, `video_grid_thw`), and what a model takes with each token. Of media, headers are read.

    Args:
        task_encoder: A `ChatTemplateTaskEncoder`, or one around it.

    Raises:
        ConfigurationError: It is another one, which knows the tokens of media only when it has decoded them, or it
            changes what is made of media.
    """

    runs_elsewhere = True
    """What it leaves out, other processes must leave out, too: no sample may be barred in one of them alone."""

    def __init__(self, task_encoder: Any) -> None:
        super().__init__(task_encoder)
        chat = task_encoder
        while not isinstance(chat, ChatTemplateTaskEncoder) and "task_encoder" in getattr(chat, "__dict__", {}):
            chat = chat.task_encoder
        name = type(task_encoder).__name__
        if not isinstance(chat, ChatTemplateTaskEncoder):
            raise ConfigurationError(
                f"roles need an encoder that counts the tokens of media by their headers, and {name} is none: take "
                "ChatTemplateTaskEncoder, or its subclass BridgeTaskEncoder"
            )
        for hook in ("postencode_sample", "decoder"):
            own = getattr(task_encoder, hook)
            known = getattr(own, "__func__", None) is ChatTemplateTaskEncoder.postencode_sample
            if not (known if hook == "postencode_sample" else isinstance(own, SampleDecoder) and not own.takes_samples):
                raise ConfigurationError(
                    f"roles: {name} has a {hook} of its own, which needs the media that language ranks do not have: do "
                    "its work in preencode_sample, which sees undecoded media on all ranks"
                )
        if chat._blanks:
            raise ConfigurationError(
                "roles: blank_media of the ChatConfig would put tokens into rows whose media no encoder rank makes: "
                "leave it out, and give blank_media=True to make_roles, which gives them to encoder ranks"
            )
        self.chat = chat
        self._processor = family = chat.family if isinstance(chat.family, ProcessorFamily) else None
        self._results: dict[Kind, set[str]] = {}  # what its processor returns for each kind
        if family is not None:
            kinds = family.plans.writings
            self._results = {kind: {*family.calls.blank(kind, PROBES[kind][0], before="a ")} for kind in kinds}
        names = {name for of_kind in self._results.values() for name in of_kind}
        self._asks = any(map(_is_planned, names)) or (family is not None and family.own_positions is not None)
        if is_overridden(task_encoder, Hook.GROUP):
            self.batch_group_criterion = self._group

    @property
    def decoder(self) -> SampleDecoder:  # type: ignore[override]
        """The decoder, which leaves media in storage."""
        return replace(self.task_encoder.decoder, defer_images=True, unread_media=True)

    def preencode_sample(self, sample: Any) -> Any:
        """Render and tokenise a sample; its media stay undecoded."""
        made = self.task_encoder.preencode_sample(sample)
        return (_apart(one) for one in made) if isinstance(made, GeneratorType) else _apart(made)

    def postencode_sample(self, sample: PreparedSample) -> _Texts:
        """Return the sample without media."""
        visual, positions = self._planned_inputs(sample)
        return _Texts(sample.finished(visual, positions, of_processor=self._processor is not None), (sample,))

    def pack_selected_samples(self, samples: Sequence[_Texts]) -> _Texts:
        """Join the samples of a pack."""
        made = self.task_encoder.pack_selected_samples([row.content for row in samples])
        if isinstance(made, GeneratorType):
            raise FatalSampleError("roles: pack_selected_samples must return one row for a pack, and not yield several")
        return _Texts.of(made, samples)

    def batch(self, samples: Sequence[_Texts]) -> _Texts:
        """Collate the texts."""
        return _Texts.of(self.task_encoder.batch([row.content for row in samples]), samples)

    def encode_batch(self, batch: _Texts) -> Any:
        """Return the batch of texts."""
        made = self.task_encoder.encode_batch(batch.content)
        if isinstance(made, GeneratorType) or isinstance(batch.content, GeneratorType):
            raise FatalSampleError("roles: batch and encode_batch must return one batch, and not yield several")
        return made

    def _group(self, row: _Texts) -> Any:
        return self.task_encoder.batch_group_criterion(row.content)

    def _planned_inputs(self, sample: PreparedSample) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return what follows of the sizes of media: grids and inputs per token, and positions on three axes."""
        family = self._processor
        if family is None:
            grids = {
                f"{kind}_grid_thw": torch.tensor(found)
                for kind in ("image", "video")
                if (found := [plan.grid for plan in sample.plans if plan.kind == kind and plan.grid is not None])
            }
            return grids, positions_of(sample, self.chat.family)
        visual: dict[str, Tensor] = {}
        positions = None
        if sample.plans and self._asks:  # a processor makes them of blank media, too: they follow from sizes
            made = family.processed(sample, *(list(map(blank, getattr(sample, name))) for name in _MEDIA.values()))
            visual = {name: one for name, one in made.items() if _is_planned(name)}
            positions = family.positions(sample.tokens, sample.mm_token_type_ids, made)
        return visual | family.token_inputs(sample), positions


@edataclass
class EncoderBatch(Batch):
    """The media that an encoder rank gets at once: of `macro` microbatches of each language rank that it serves.

    The order is: microbatch, language rank, row, token. `visual_inputs`: what the model's encoder takes, such as
    `pixel_values` and `image_grid_thw`; empty if no row has such media. Lists have an entry for each microbatch of each
    language rank: `input_ids`, its tokens, int64 (B, S), to count those of media, always on the host; `num_tokens`, its
    media's tokens in this batch; `num_media`, how many media these are; `part_tokens`, by kind (`image`, `video`,
    `audio`), the tokens of each rank that its media are divided between. `blank_media` has
    the names of the inputs that are of a blank medium, whose features belong to no token. `pixel_norm` is there where
    pixels are bytes: `normalise_on_device` makes floats of them by it.
    """

    __on_host__ = frozenset({"input_ids"})

    visual_inputs: dict[str, Tensor]
    input_ids: list[Tensor]
    num_tokens: list[int]
    num_media: list[int]
    part_tokens: list[dict[str, list[int]]] = field(default_factory=list)
    blank_media: list[str] = field(default_factory=list)
    pixel_norm: Tensor | None = None


@edataclass
class LaneMedia(EncoderBatch):
    """The media of one microbatch of a language lane, as far as this encoder rank makes them.

    `blanks`: what is said of media that are blank since they could not be decoded. `cost`: that of the texts, where
    they are balanced.
    """

    blanks: list[str] = field(default_factory=list)
    cost: float = 0.0


class MediaTaskEncoder(LanguageTaskEncoder):
    """An encoder whose batches have the media of the rows, and their tokens only to count: for ranks of an encoder.

    Args:
        task_encoder: As of `LanguageTaskEncoder`: the same one.
        kinds: The kinds of media to make: `image`, `video`, `audio`.
        part: Which part of the media of a microbatch, of how many: cut in their order, with tokens as level as whole
            media allow.
        cost: Of a microbatch of texts, where these are balanced.

    Raises:
        ConfigurationError: As `LanguageTaskEncoder`.
    """

    def __init__(
        self, task_encoder: Any, kinds: frozenset[Kind], part: tuple[int, int] = (0, 1), cost: Cost | None = None
    ) -> None:
        super().__init__(task_encoder)
        self.kinds = kinds
        self.part = part
        self.cost = cost
        self._threads = PerProcess(_threads)
        own = {name for kind, names in self._results.items() if kind in kinds for name in names}
        self._foreign = {name for names in self._results.values() for name in names} - own
        if self.chat.config.video_sound and len({"video", "audio"} & kinds) == 1:
            raise ConfigurationError(
                "roles: with video_sound of the ChatConfig, a video and its sound are one medium, which one encoder "
                "must get: make roles with one grid for both, {'language': …, 'media': …}"
            )

    def blank_media(self) -> list[Blank]:
        """Return a blank medium of each of its kinds that the model takes.

        Raises ConfigurationError for a model that sees images through cross-attention.
        """
        taken = placeholder_tokens(self.chat.family)
        return [self.chat._blank(kind) for kind in sorted(self.kinds) if taken.get(kind)]

    def encode_batch(self, batch: _Texts) -> LaneMedia:
        """Make the batch of texts as a language rank does, then the media of this rank's part of it."""
        text = super().encode_batch(batch)
        try:
            return self._with_media(batch.samples, text)
        except FatalSampleError:
            raise
        except Exception as error:
            raise FatalSampleError(
                f"the media of a microbatch cannot be made ({type(error).__name__}: {error}), and it cannot be left "
                "out, since the language ranks have its tokens"
            ) from error

    def _with_media(self, samples: Sequence[PreparedSample], text: Any) -> LaneMedia:
        wanted, part_tokens = self._cut(samples)
        made, blanks = self._made(samples, wanted)
        given: Callable[[str], Any] = text.get if isinstance(text, dict) else lambda name: getattr(text, name, None)
        tokens = given("tokens") if given("input_ids") is None else given("input_ids")
        visual = join_visual(made, [0] * len(made), count=1) if any(made) else {}
        return LaneMedia(
            __key__=list(given("__key__")),
            __restore_key__=given("__restore_key__") or (),
            visual_inputs=visual,
            input_ids=[tokens],
            num_tokens=[sum(of_kind[self.part[0]] for of_kind in part_tokens.values())],
            num_media=[sum(map(len, wanted))],
            part_tokens=[part_tokens],
            blanks=blanks,
            cost=0.0 if self.cost is None else float(self.cost(text)),
            pixel_norm=self.chat._norm,
        )

    def _cut(self, samples: Sequence[PreparedSample]) -> tuple[list[list[int]], dict[str, list[int]]]:
        """Cut the media into parts; return this rank's media of each sample, as places among its plans, and the tokens
        of all parts, by kind.
        """
        own, parts = self.part
        # What is cut is a medium, or, where a processor makes those of a sample together, these.
        units: list[tuple[int, list[int]]] = []
        for number, sample in enumerate(samples):
            places = [place for place, plan in enumerate(sample.plans) if plan.kind in self.kinds]
            together = [places] * bool(places) if self._processor else [[place] for place in places]
            units += [(number, unit) for unit in together]
        sizes = [sum(samples[number].plans[place].tokens for place in unit) for number, unit in units]
        wanted: list[list[int]] = [[] for _ in samples]
        tokens: dict[str, list[int]] = {kind: [0] * parts for kind in sorted(self.kinds)}
        for (number, unit), part in zip(units, cut(sizes, parts), strict=True):
            wanted[number] += unit if part == own else []
            for kind, count in (found for place in unit for found in self._by_kind(samples[number].plans[place])):
                tokens[kind][part] += count
        return wanted, tokens

    def _by_kind(self, plan: Plan) -> Iterator[tuple[str, int]]:
        """Yield the tokens of a medium by kind: of a video that is heard, those of its frames and of its sound."""
        if len(plan.token_ids) < 2:
            yield plan.kind, plan.tokens
            return
        kinds = dict(zip(self.chat.tokenizer.convert_ids_to_tokens(plan.token_ids), ("video", "audio"), strict=True))
        runs = re.findall("|".join(map(re.escape, kinds)), plan.text)
        yield from zip(map(kinds.__getitem__, runs), plan.runs, strict=True)

    def _made(
        self, samples: Sequence[PreparedSample], wanted: Sequence[Sequence[int]]
    ) -> tuple[list[dict[str, Tensor]], list[str]]:
        """Return the visual inputs of each sample, and what is said of blank media."""
        given = [self._given(sample, places) for sample, places in zip(samples, wanted, strict=True)]
        flat = [value for media in given for of_kind in media for value in of_kind]
        over: Callable[..., Iterator[Any]] = self._threads().map if len(flat) > 1 else map
        tried = iter(over(_tried, flat))
        out: list[dict[str, Tensor]] = []
        blanks: list[str] = []
        for sample, places, media in zip(samples, wanted, given, strict=True):
            pairs = [[next(tried) for _ in of_kind] for of_kind in media]
            failed = [error for of_kind in pairs for _, error in of_kind if error]
            try:
                out.append(self._inputs(sample, places, [[value for value, _ in of_kind] for of_kind in pairs]))
            except SampleError as error:
                failed.append(str(error))
                out.append(self._inputs(sample, places, [list(map(blank, of_kind)) for of_kind in media]))
            blanks += [f"sample {sample_key(sample)!r}: {error}" for error in failed]
        return out, blanks

    def _given(self, sample: PreparedSample, places: Sequence[int]) -> list[list[Any]]:
        """Return the media of a sample by kind that are to be made, or that a processor must have."""
        media: dict[Kind, list[Any]] = {kind: [*getattr(sample, name)] * bool(places) for kind, name in _MEDIA.items()}
        if self._processor:
            return [one if kind in self.kinds else list(map(blank, one)) for kind, one in media.items()]
        turn = {kind: iter(one) for kind, one in media.items()}
        own = [(plan.kind, next(turn[plan.kind]), place) for place, plan in enumerate(sample.plans) if places]
        return [[one for kind, one, place in own if kind == wanted and place in places] for wanted in turn]

    def _inputs(self, sample: PreparedSample, places: Sequence[int], media: Sequence[list[Any]]) -> dict[str, Tensor]:
        """Return what the model's encoder takes. Raises SampleError."""
        if not places:
            return {}
        if self._processor:
            made = self._processor.processed(sample, *media)
            return {name: one for name, one in made.items() if name not in TOKEN_INPUTS and name not in self._foreign}
        assert self.chat.family is not None
        plans = sorted((sample.plans[place] for place in places), key=lambda plan: plan.kind)
        return self.chat.family.process(*media[:2], plans)


def _is_planned(name: str) -> bool:
    """Whether an input follows from the sizes of media: those of tokens, and grids."""
    return name in TOKEN_INPUTS or name.endswith("_grid_thw")


def _threads() -> Threads:
    config = CONFIG.get()
    return Threads(1 if config is None else max(1, config.threads), "energon-media")


def _apart(sample: PreparedSample) -> PreparedSample:
    """Return a sample whose media the engine does not decode: it looks into lists."""
    media: dict[str, Any] = {name: tuple(getattr(sample, name)) for name in _MEDIA.values()}
    return replace(sample, **media)


def cut(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the part of each of some things in order: runs whose sums are as level as their sizes allow.

    A thing belongs to the part in which its middle lies.
    """
    total = sum(sizes)
    ends = accumulate(sizes)
    return [min(parts - 1, (2 * end - size) * parts // (2 * total)) for size, end in zip(sizes, ends, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Media: decoded, or blank at the size that is known of them.


def _tried(value: Any) -> tuple[Any, str]:
    """Return a medium decoded, or blank with the reason."""
    try:
        return decoded_medium(value), ""
    except SampleError as error:
        return blank(value), str(error)


def blank(value: Any) -> Any:
    """Return a blank medium of the size of one that is not decoded; nothing of it is read."""
    if isinstance(value, DeferredImage):
        return np.zeros((*value.size[::-1], 3), np.uint8)
    if isinstance(value, DeferredVideo | DeferredSound):
        value = value.video if isinstance(value, DeferredVideo) else value.sound
    if isinstance(value, VideoFrames) and isinstance(value.frames, FramesToDecode):
        count, height, width = frames_shape(value.frames)
        return replace(value, frames=torch.zeros(count, 3, height, width, dtype=torch.uint8))
    return np.zeros(value.length, np.float32) if isinstance(value, Sound) else value
