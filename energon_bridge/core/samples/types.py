"""The sample types that a `dataset.yaml` can name, and the resolution of these names.

Names resolve through the table below only, so that a file never decides what is imported. Datasets prepared by old
releases name the class that loaded them (`CaptioningWebdataset`); these names mean the same types. Fields without
a default must come from the dataset. Boxes are tensors of shape (boxes, 4 or 4 corners, 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from energon_bridge.core.errors import UnknownArgumentError, did_you_mean
from energon_bridge.core.samples.sample import CrudeSample, Sample, edataclass

if TYPE_CHECKING:
    import torch

__all__ = [
    "CaptioningSample",
    "ChatMLSample",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "MultiChoiceVQASample",
    "OCRSample",
    "SimilarityInterleavedSample",
    "TextSample",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "sample_type_by_name",
    "sample_type_names",
]


@edataclass
class CaptioningSample(Sample):
    """An image and its caption; `sample['text']` is the caption as well.

    Examples:
        >>> sample = CaptioningSample(__key__="a", image=torch.zeros(3, 2, 2), caption="black")
    """

    __aliases__: ClassVar[Mapping[str, str]] = {"text": "caption"}

    image: torch.Tensor
    caption: str


@edataclass
class ChatMLSample(Sample):
    """A conversation of several turns with its images, videos and audio, as in Megatron-Bridge's datasets."""

    conversation: Any
    imgs: Any = None
    videos: list[list[torch.Tensor]] | None = None
    audio: torch.Tensor | None = None
    tools: list[dict[str, Any]] | None = None


@edataclass
class ImageSample(Sample):
    """An image alone.

    Examples:
        >>> sample = ImageSample(__key__="a", image=torch.zeros(3, 2, 2))
    """

    image: torch.Tensor


@edataclass
class ImageClassificationSample(Sample):
    """An image and its class, as a number, a name, or both.

    Examples:
        >>> sample = ImageClassificationSample(
        ...     __key__="a", image=torch.zeros(3, 2, 2), label=7, label_name="black"
        ... )
    """

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Images and texts in their order in a document.

    Examples:
        >>> sample = InterleavedSample(__key__="a", sequence=["before", torch.zeros(3, 2, 2), "after"])
    """

    sequence: list[torch.Tensor | str]


@edataclass
class MultiChoiceVQASample(Sample):
    """A question about an image, with choices to answer from, and the number of the right one, counted from 0.

    Examples:
        >>> sample = MultiChoiceVQASample(
        ...     __key__="a", image=torch.zeros(3, 2, 2), context="Which?", choices=["a", "b"], correct_choice_idx=0
        ... )
    """

    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int | None = None


@edataclass
class OCRSample(Sample):
    """An image of a page, its text, and the boxes of its blocks, lines, words and characters.

    Examples:
        >>> sample = OCRSample(__key__="a", image=torch.zeros(3, 2, 2), text="Exit")
    """

    image: torch.Tensor
    text: str
    block_boxes: torch.Tensor | None = None
    block_classes: torch.Tensor | list[str] | None = None
    block_text: list[str] | None = None
    lines_boxes: torch.Tensor | None = None
    lines_text: list[str] | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
    chars_boxes: torch.Tensor | None = None
    chars_text: list[str] | None = None


@edataclass
class SimilarityInterleavedSample(Sample):
    """The images and texts of a document, with their similarities.

    Examples:
        >>> sample = SimilarityInterleavedSample(__key__="a", images=[torch.zeros(3, 2, 2)], texts=["black"])
    """

    images: list[torch.Tensor]
    texts: list[str]
    audio: Any = None
    video: Any = None
    similarity_matrix: torch.Tensor | None = None
    matched_text_indices: list[int] | None = None


@edataclass
class TextSample(Sample):
    """A text alone.

    Examples:
        >>> sample = TextSample(__key__="a", text="hello")
    """

    text: str


@edataclass
class VidQASample(Sample):
    """A question about a video, with answers and their weights.

    Examples:
        >>> video = torch.zeros(8, 3, 2, 2)
        >>> sample = VidQASample(__key__="a", video=video, context="What happens?", answers=["nothing"])
    """

    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQASample(Sample):
    """A question about an image, with answers and their weights.

    Examples:
        >>> sample = VQASample(
        ...     __key__="a", image=torch.zeros(3, 2, 2), context="Which colour?", answers=["black"]
        ... )
    """

    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class VQAOCRSample(Sample):
    """A question about an image of text, with that text and the boxes of its words."""

    image: torch.Tensor
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None


_TYPED: tuple[type[Sample], ...] = tuple(globals()[name] for name in __all__ if name.endswith("Sample"))
_ALL: tuple[type, ...] = (*_TYPED, CrudeSample)

_BY_NAME: dict[str, type] = {
    name: cls for cls in _ALL for name in (cls.__name__, cls.__name__.removesuffix("Sample") + "Webdataset")
}


def sample_type_names() -> tuple[str, ...]:
    """Return the sorted names of all types with fields (all but CrudeSample)."""
    return tuple(cls.__name__ for cls in _TYPED)


def sample_type_by_name(name: str) -> type:
    """Return the sample type for a name in a `dataset.yaml`, current (`VQASample`) or old (`VQAWebdataset`).

    `CrudeWebdataset` gives CrudeSample. Raises UnknownArgumentError, naming the nearest match, for any other name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = ", ".join((*sample_type_names(), CrudeSample.__name__))
    raise UnknownArgumentError(f"unknown sample type {name!r}.{did_you_mean(name, _BY_NAME)} Known types: {known}")
