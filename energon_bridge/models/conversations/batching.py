"""What the task encoders of conversations do alike: with pixels before, and with token sequences behind the encoding.

`MultiModalTaskEncoder` and `ChatTemplateTaskEncoder` make sequences in ways of their own; here these are padded, packed
and joined to batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.encoder.task_encoder import TaskEncoder, decoder_of, default_hook
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.blank_media import Blank, add_blanks, room_of
from energon_bridge.models.conversations.sample_encoders import SampleEncoder
from energon_bridge.models.conversations.sequences import (
    MultiModalBatch,
    MultiModalSample,
    PaddingValues,
    batch_sequences,
    with_norm,
)
from energon_bridge.models.images.images import Alpha
from energon_bridge.models.images.pixels import PixelDtype, alpha_for, pixel_settings
from energon_bridge.models.images.programs import Program
from energon_bridge.models.packing.packed_sequences import MultiModalPack, batch_packs, pack_sequences
from energon_bridge.models.packing.packing import Packer


class SequenceTaskEncoder(TaskEncoder[Any, Any, MultiModalBatch, MultiModalBatch]):
    """A task encoder whose samples are token sequences with images; a subclass makes them."""

    packer: Packer[Any]
    _encoders: dict[type, SampleEncoder]

    def _set_pixels(self, image_processor: Any, path: Program | None, dtype: Any, own: SampleDecoder | None) -> None:
        """Set the native path of pixels, and the decoder of images that fits; `own` is that of the package's class."""
        self._processor = image_processor
        self._path = path
        self._pixels_dtype: PixelDtype = dtype
        if path is not None and own is not None and type(self).decoder is own:
            self.decoder = replace(own, image_decode="fastrgb")  # bytes for the native path, without Pillow's copies
        if isinstance(type(self).decoder, SampleDecoder):
            self.decoder = decoder_of(self)

    def _set_rows(
        self, tokenizer: Any, packer: Packer[Any] | None, longest: int, multiple_of: int, *, padded: bool, ignore: int
    ) -> None:
        """Set the length of rows and the padding.

        Args:
            tokenizer: Has the token that fills them up.
            packer: That of the user, if there is one.
            longest: The most tokens of a sequence; with `padded`, rows have as many.
            multiple_of: Rows, and samples in packs, are padded to a multiple of it.
            ignore: The label of what is not learned.
        """
        self._multiple_of = multiple_of
        self._padded = padded
        # The longest row: the longest sample must fit when it is padded, too.
        self._row_length = longest + -longest % multiple_of
        self._longest = longest
        self._blanks: tuple[Blank, ...] = ()
        self._room: int | None = None
        self._admits = packer is not None  # by itself no sample is longer than seq_length
        self.packer = packer or Packer(limits={"tokens": self._row_length}, size_of=self.padded_length)
        pad, end = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos"))
        self._filling = PaddingValues(pad_id=(end if pad is None else pad) or 0, ignore=ignore)

    def _set_blanks(self, blanks: Sequence[Blank]) -> None:
        """Set the blank media of microbatches without any; rows of a fixed length have room for all of them.

        Raises ConfigurationError if they leave none for samples.
        """
        self._blanks = tuple(blanks)
        if not (self._padded and blanks):
            return
        self._room = room_of(blanks, self._multiple_of)
        self._row_length -= self._room
        if self._row_length < 1:
            raise ConfigurationError(
                f"blank_media takes {self._room} tokens of a row, and seq_length={self._longest} leaves none for "
                "samples: raise it"
            )
        self._longest = min(self._longest, self._row_length)
        if not self._admits:
            self.packer = Packer(limits={"tokens": self._row_length}, size_of=self.padded_length)

    def _with_blanks(self, batch: MultiModalBatch) -> MultiModalBatch:
        if self._blanks:
            batch = add_blanks(batch, self._blanks, self._filling, multiple_of=self._multiple_of, room=self._room)
        return with_norm(batch, self._norm)

    @property
    def pixel_settings(self) -> dict[str, str]:
        return pixel_settings(self._processor, self._path, self._pixels_dtype)

    @property
    def image_alpha(self) -> Alpha:
        return alpha_for(self._processor, self._path)

    def padded_length(self, sample: Any) -> int:
        """Return the number of tokens that a sample takes in a pack."""
        length: int = sample.tokens.shape[0]  # `len` of a tensor takes ten times as long
        return length + -length % self._multiple_of

    @default_hook
    def sample_length(self, sample: Any) -> int:
        return self._row_length + (self._room or 0) if self._padded else self.padded_length(sample)

    def select_samples_to_pack(self, samples: Sequence[Any]) -> list[list[Any]]:
        return self.packer.select(samples)

    def pack_selected_samples(self, samples: Sequence[Any]) -> MultiModalPack:
        length = self._row_length if self._padded else None
        return pack_sequences(samples, self._filling, multiple_of=self._multiple_of, length=length)

    def batch(self, samples: Sequence[MultiModalSample | MultiModalPack]) -> MultiModalBatch:
        """Pad the sequences, or the packs, to a common length and join the images."""
        if isinstance(samples[0], MultiModalPack):
            return self._batch_packs(cast(Sequence[MultiModalPack], samples))
        sequences = cast(Sequence[MultiModalSample], samples)
        length = self._row_length if self._padded else max(map(self.padded_length, sequences))
        return self._with_blanks(batch_sequences(sequences, length, self._filling))

    def _batch_packs(self, packs: Sequence[MultiModalPack]) -> MultiModalBatch:
        return self._with_blanks(batch_packs(packs, self._filling))

    @property
    def _norm(self) -> Tensor | None:
        return None if self._path is None else self._path.byte_norm
