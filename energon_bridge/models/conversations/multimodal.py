"""Turns samples with images and texts into the inputs of a vision-language model.

A sample is rendered to pieces of text (`sample_encoders`, `layout`), its placeholders are expanded to as many
image tokens as the model needs, and the result becomes one token sequence with shifted labels (`sequences`). Only the
answers carry loss.

Sequences longer than `seq_length` are cut on the right, but never inside the tokens of an image: such an image is
dropped with everything after it. If nothing to learn is left, the sample fails, and the error policy counts and names
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.hooks import MAX_LIMIT
from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.conversations.batching import SequenceTaskEncoder
from energon_bridge.models.conversations.blank_media import Blank, BlankMedia, blank_image, blank_kinds
from energon_bridge.models.conversations.conversation import Piece, name_missing_end
from energon_bridge.models.conversations.layout import MultiModalSampleConfig, Rendered, layout_markers, render
from energon_bridge.models.conversations.rendering import ChatRenderer
from energon_bridge.models.conversations.sample_encoders import SAMPLE_ENCODERS, SampleEncoder, read_sample, sample_key
from energon_bridge.models.conversations.sequences import (
    MultiModalBatch,
    MultiModalSample,
    PatchGrid,
    Sequencer,
    count_truncated,
    mrope_positions,
    nothing_learned,
)
from energon_bridge.models.conversations.templates import (
    RunDay,
    check_markers,
    control_tokens,
    template_source,
    writes_date,
)
from energon_bridge.models.conversations.texts import is_fast, tokenize
from energon_bridge.models.images.pixels import PixelDtype, Profile, pixel_path, process_image
from energon_bridge.models.images.visual import concat_visual
from energon_bridge.models.packing.packing import Packer

__all__ = ["ImageTokenCount", "MultiModalBatch", "MultiModalSample", "MultiModalTaskEncoder"]

ImageTokenCount = int | Callable[[Mapping[str, Tensor]], int]
"""Image tokens per image: a number, or a function of the image processor's result for the image."""


class MultiModalTaskEncoder(SequenceTaskEncoder):
    """Encode samples of images and text with any tokenizer and image processor of the transformers interface.

    Examples:
        >>> tokenizer = AutoTokenizer.from_pretrained("llava-hf/llava-1.5-7b-hf")  # doctest: +SKIP
        >>> image_processor = AutoImageProcessor.from_pretrained("openai/clip-vit-large-patch14-336")  # doctest: +SKIP
        >>> encoder = MultiModalTaskEncoder(tokenizer, image_processor, seq_length=128)
        >>> dataset = get_train_dataset("data/captions", batch_size=4, task_encoder=encoder)
        >>> next(iter(get_savable_loader(dataset))).tokens.shape
        torch.Size([4, ...])

    Args:
        tokenizer: Has `encode(text, add_special_tokens=False)` and the ids of its special tokens.
        image_processor: Called as `image_processor(images=[image], return_tensors="pt")`; None: for texts only.
        multimodal_sample_config: Placeholders and conversation template.
        seq_length: Longest sequence, image tokens included.
        image_tokens_per_image: Tokens of an image. None: computed from `image_grid_thw` if the image
            processor returns it, else 1 (the model itself makes room for the features, as megatron-core's does).
        pad_to_multiple_of: Batches, and the samples of packs, are padded to a multiple of this length.
        pad_to_max_length: Pad every batch, and every pack, to `seq_length`: one shape for all batches.
        add_bos: Begin with the tokenizer's begin-of-sequence token, if it has one.
        packer: Packs samples, and drops, truncates, splits or rejects those that no pack can hold. None: best fit into
            `seq_length` tokens, if packing is on.
        pixels: Which values the pixels have: `torch` or `pillow`, those of transformers' torchvision-backed or
            Pillow-backed processors; `processor` calls the image processor. None: those of its class.
        pixels_dtype: Type of the pixels: `float32`, `bfloat16`, `float16`, or `uint8`, for `normalise_on_device`.
        autorotate: Turn images as EXIF says, and videos as their headers say, as viewers do. False: as they are stored.
        today: The date that a chat template writes, as of a `ChatConfig`.
        blank_media: As of a `ChatConfig`: a microbatch without images gets a blank one.

    Raises:
        ConfigurationError: No tokenizer, image tokens that alone fill `seq_length`, an image token without an id or a
            marker of the template that the tokenizer does not know.
    """

    decoder: SampleDecoder | None = SampleDecoder(image_decode="pilrgb")

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        multimodal_sample_config: MultiModalSampleConfig | None = None,
        seq_length: int = 2048,
        *,
        image_tokens_per_image: ImageTokenCount | None = None,
        pad_to_multiple_of: int = 1,
        pad_to_max_length: bool = False,
        add_bos: bool = True,
        packer: Packer[MultiModalSample] | None = None,
        pixels: Profile | None = None,
        pixels_dtype: PixelDtype = "float32",
        autorotate: bool = False,
        today: date | str | None = None,
        blank_media: BlankMedia = False,
    ) -> None:
        if tokenizer is None:
            raise ConfigurationError(
                "MultiModalTaskEncoder needs a tokenizer and, for images, an image processor of the transformers "
                f"interface; got tokenizer=None, image_processor={image_processor!r} (pass both, or your own task "
                "encoder)"
            )
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.pixels_dtype: PixelDtype = pixels_dtype
        self.autorotate = autorotate
        self._day = RunDay.of(today)
        self._renderers: dict[Any, ChatRenderer] = {}
        path = pixel_path(image_processor, pixels, pixels_dtype)
        self._set_pixels(image_processor, path, pixels_dtype, MultiModalTaskEncoder.decoder)
        self.config = multimodal_sample_config or MultiModalSampleConfig()
        self.seq_length = seq_length
        self.image_tokens_per_image = image_tokens_per_image
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_to_max_length = pad_to_max_length
        self.add_bos = add_bos
        ignore = self.config.ignore_place_holder
        self._set_rows(tokenizer, packer, seq_length, pad_to_multiple_of, padded=pad_to_max_length, ignore=ignore)
        self._encoders = dict(SAMPLE_ENCODERS)
        check_markers(layout_markers(self.config.conversation_template_config), tokenizer)
        self._image_token_id = _image_token_id(tokenizer, self.config)
        self._reserved = _reserved(tokenizer, self._image_token_id)
        if isinstance(image_tokens_per_image, int) and image_tokens_per_image >= seq_length:
            raise ConfigurationError(
                f"seq_length={seq_length} leaves no room for text: one image takes {image_tokens_per_image} tokens; "
                f"set seq_length to more than {image_tokens_per_image}"
            )
        if blank_kinds(blank_media, () if image_processor is None else ("image",)):
            visual = process_image(image_processor, blank_image(), self._path, self._dtype)
            tokens = torch.tensor(self._image_tokens(visual))
            self._set_blanks([Blank.of(tokens, None, visual, torch.eq(tokens, self._image_token_id))])

    def register_encoder(self, sample_type: type, encoder: SampleEncoder) -> None:
        """Encode samples of a type, and of its subtypes, by a function of the sample and the configuration.

        The function returns a `Conversation`, a `Document` or a `ChatSample`, and replaces one registered before.
        """
        self._encoders[sample_type] = encoder

    def encode_sample(self, sample: Any) -> MultiModalSample | Iterator[MultiModalSample]:
        """Encode one sample; with a packer that splits, the result may be a generator of several.

        Raises:
            SampleError: The sample cannot be trained on: no answer, a wrong number of placeholders, or an image that
                does not fit into `seq_length`.
            SkipSample, OverLongSampleError: It does not fit into a pack of the given packer; its policy decides.
        """
        try:
            content = read_sample(sample, self._encoders, self.config, control_tokens=self._control_tokens)
            rendered = render(content, self.config, self.tokenizer, self._day, self._renderers)
            self._check_placeholders(rendered.pieces, len(content.images))
            sequence = Sequencer(longest=self.seq_length if self._room is None else self._longest)
            visual = self._fill(sequence, rendered, content.images)
            finished = sequence.finish(self.config.ignore_place_holder)
            if finished is None:
                whole = Sequencer(longest=MAX_LIMIT)
                self._fill(whole, rendered, content.images)
                raise SampleError(nothing_learned(whole.learned, self.seq_length, sequence.longest))
            if sequence.cut:
                length = len(sequence.tokens) - 1 + sequence.left
                count_truncated(sample_key(sample), f"at least {length}", len(finished[0]), self.seq_length)
        except SampleError as error:
            raise type(error)(f"sample {sample_key(sample)!r}: {error}") from error
        tokens, labels, loss_mask = finished
        joined = concat_visual(visual)
        encoded = MultiModalSample.derive_from(
            sample,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            visual=joined,
            answer=content.first_answer,
            num_images=len(visual),
            mrope_position_ids=self._mrope(tokens, joined.get("image_grid_thw")),
        )
        return self.packer.admitted(encoded) if self._admits else encoded

    @property
    def image_token_ids(self) -> frozenset[int]:
        """Return the placeholder tokens of images."""
        return frozenset({self._image_token_id})

    @property
    def run_day(self) -> RunDay | None:
        template = self.config.conversation_template_config
        source = None if template.layout else template_source(self.tokenizer, template.chat_template)
        return self._day if self._day.given or (source and writes_date(source)) else None

    def _check_placeholders(self, pieces: Sequence[Piece], num_images: int) -> None:
        placeholder = self.config.image_token.token_str
        for piece in pieces:
            if piece.learned and placeholder in piece.text:
                raise SampleError(
                    f"the answer {piece.text!r} contains the image placeholder {placeholder!r}; only a question may"
                )
        places = sum(piece.text.count(placeholder) for piece in pieces)
        if places != num_images:
            images = "1 image" if num_images == 1 else f"{num_images} images"
            raise SampleError(f"the text has {places} placeholders {placeholder!r} but the sample has {images}")

    def _fill(self, sequence: Sequencer, rendered: Rendered, images: Sequence[Any]) -> list[dict[str, Tensor]]:
        """Add pieces to a sequence until it is full; return the image processor's results for the images in it."""
        bos, eos = self._bos_and_eos
        if bos is not None and not rendered.has_special_tokens:
            sequence.add([bos], learned=False)
        token = self.config.image_token
        visual: list[dict[str, Tensor]] = []
        texts = [piece.text.split(token.token_str) for piece in rendered.pieces]
        tokens = iter(self._tokenized(rendered.pieces, texts))
        for piece, part in zip(rendered.pieces, texts, strict=True):
            for number in range(len(part)):
                if sequence.full:
                    sequence.cut_off(sum(map(len, tokens)))
                    return visual
                if number:
                    if self.image_processor is None:
                        raise ConfigurationError(
                            "the sample has an image, but MultiModalTaskEncoder was made with image_processor=None: "
                            "pass the image processor of the model, or your own task_encoder"
                        )
                    image = process_image(self.image_processor, images[len(visual)], self._path, self._dtype)
                    expanded = self._image_tokens(image)
                    if not sequence.has_room(len(expanded)):
                        sequence.cut_off(len(expanded) + sum(map(len, tokens)))
                        return visual
                    visual.append(image)
                    sequence.add(expanded, learned=False)
                text = next(tokens)
                if not self._reserved.keys().isdisjoint(text):
                    reserved = next(self._reserved[one] for one in text if one in self._reserved)
                    raise SampleError(
                        f"a text of the sample contains {reserved!r}, the token reserved for an image or video; write "
                        f"images as {token.token_str!r} in questions"
                    )
                sequence.add(text, learned=piece.learned)
            if piece.ends and eos is not None:
                sequence.add([eos], learned=piece.learned)
            elif piece.ends:
                name_missing_end()
        sequence.cut = len(sequence.tokens) > sequence.longest + 1
        return visual

    def _tokenized(self, pieces: Sequence[Piece], texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the tokens of each text as they are in the middle of the whole text.

        Tokenizers such as Llama's put a blank before a text that is tokenised alone, but not behind another token. So
        each text is tokenised with a token in front that ends what comes before it, and that token is cut off.
        """
        flat = [text for part in texts for text in part]
        *_, whole, line_break, letter = self._around_image
        if whole == line_break + letter:
            return tokenize(self.tokenizer, flat)
        special = self.tokenizer.all_special_tokens  # it puts a blank before a text, as those of Llama do
        image = self.config.image_token.token_str
        before = ""
        fronts = []
        mark = image if image in special else special[0] if special else ""  # a token that never stands in the text
        for piece, part in zip(pieces, texts, strict=True):
            for number, text in enumerate(part):
                before = before if not number else mark
                fronts.append(next((token for token in special if before.endswith(token)), "\n" if before else ""))
                before = text or before
            before = (self.tokenizer.eos_token or before) if piece.ends else before
        heads = dict(zip(fronts, tokenize(self.tokenizer, fronts), strict=True))
        both = tokenize(self.tokenizer, [front + text for front, text in zip(fronts, flat, strict=True)])
        return [
            tokens[len(head) :] if tokens[: len(head := heads[front])] == head else tokenize(self.tokenizer, [text])[0]
            for front, text, tokens in zip(fronts, flat, both, strict=True)
        ]

    def _image_tokens(self, visual: Mapping[str, Tensor]) -> list[int]:
        before, after, *_ = self._around_image
        return [*before, *[self._image_token_id] * self._count_image_tokens(visual), *after]

    def _count_image_tokens(self, visual: Mapping[str, Tensor]) -> int:
        count = self.image_tokens_per_image
        if callable(count):
            return count(visual)
        if count is not None:
            return count
        grid = visual.get("image_grid_thw")
        if grid is None:
            return 1
        return int(grid.prod(-1).sum()) // int(getattr(self.image_processor, "merge_size", 1)) ** 2

    def _mrope(self, tokens: Tensor, grids: Tensor | None) -> Tensor | None:
        """Return M-RoPE positions, int64 (3, n); None for models whose image processor has no grid of patches."""
        merge_size = getattr(self.image_processor, "merge_size", None)
        if merge_size is None or self.image_tokens_per_image is not None:
            return None
        if grids is None:
            return torch.arange(len(tokens)).expand(3, -1)
        types = torch.eq(tokens, self._image_token_id).long().numpy()
        return mrope_positions(types, {1: [PatchGrid(*grid) for grid in grids.tolist()]}, int(merge_size))

    @cached_property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.pixels_dtype)
        return dtype

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        template = self.config.conversation_template_config
        texts = f"{template}{'' if template.layout else template_source(self.tokenizer, template.chat_template)}"
        return control_tokens(self.tokenizer, texts, (*self._reserved.values(), self.config.image_token.token_str))

    @cached_property
    def _bos_and_eos(self) -> tuple[int | None, int | None]:
        tokenizer = self.tokenizer  # which looks them up in its vocabulary every time
        return tokenizer.bos_token_id if self.add_bos else None, tokenizer.eos_token_id

    @cached_property
    def _around_image(self) -> list[list[int]]:
        """The tokens before and after an image; and of a text, and its parts, by which `_tokenized` knows blanks."""
        token = self.config.image_token
        probe = ("\na", "\n", "a") if is_fast(self.tokenizer) else ("", "", "")
        return tokenize(self.tokenizer, [token.before, token.after, *probe])


def _image_token_id(tokenizer: Any, config: MultiModalSampleConfig) -> int:
    token = config.image_token
    if token.token_id is not None:
        return token.token_id
    token_id = tokenizer.convert_tokens_to_ids(token.token_str)
    if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
        raise ConfigurationError(
            f"the tokenizer does not know the image token {token.token_str!r}: add it as a special token, or set "
            "ImageToken(token_id=...) to the id that the model expects"
        )
    return int(token_id)


_MEDIA_TOKENS = ("<image>", "<video>", "<|image_pad|>", "<|video_pad|>")


def _reserved(tokenizer: Any, image_token_id: int) -> dict[int, str]:
    """Return the tokens that stand for media: the encoder's own, and special ones that models know by these names."""
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    named = [getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "video", "audio")]
    names = [name for name in (*_MEDIA_TOKENS, *named) if isinstance(name, str) and name in special]
    reserved = {int(tokenizer.convert_tokens_to_ids(name)): name for name in names}
    return {image_token_id: f"the token {image_token_id}", **reserved}
