"""Dataset classes as Megatron-Bridge and others derive them from megatron-energon's."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass
from typing import Any

from megatron.energon.flavors.base_dataset import Sample
from megatron.energon.flavors.webdataset import DefaultDecoderWebdatasetFactory
from megatron.energon.flavors.webdataset.sample_decoder import DEFAULT_DECODER
from webdataset.autodecode import Decoder, imagehandler


@dataclass
class Conversation(Sample):
    conversation: Any
    imgs: Any = None


class Lists:
    def __call__(self, key: str, data: bytes) -> Any:
        if not key.endswith("jpgs"):
            return None
        return [imagehandler("torchrgb")("jpg", one) for one in pickle.loads(data)]


class Conversations(DefaultDecoderWebdatasetFactory[Conversation]):
    __sample_type__ = Conversation

    def __init__(self, path: Any, *, auto_decode: bool = True, spec: str = "torchrgb", **kwargs: Any) -> None:
        kwargs.pop("decoder", None)
        assert "decoder" in inspect.signature(DefaultDecoderWebdatasetFactory.__init__).parameters
        kwargs["decoder"] = None
        super().__init__(path, **kwargs)
        if auto_decode:
            self._decoder = Decoder([imagehandler(spec), Lists()])


class Older(DefaultDecoderWebdatasetFactory[Conversation]):
    """Written for versions before 6, where the class knows how images are decoded."""

    __sample_type__ = Conversation

    def __init__(self, path: Any, *, auto_decode: bool = True, **kwargs: Any) -> None:
        super().__init__(path, auto_decode=auto_decode, **kwargs)
        if auto_decode:
            self._decoder = Decoder([imagehandler(self.image_decode), Lists()])


class Shouted(DefaultDecoderWebdatasetFactory[Conversation]):
    __sample_type__ = Conversation

    def __init__(self, path: Any, *, decoder: Any = DEFAULT_DECODER, **kwargs: Any) -> None:
        super().__init__(path, decoder=decoder, **kwargs)
        self.loud = True

    def load_sample(self, sample: dict) -> Conversation:
        loaded = super().load_sample(sample)
        assert self.loud
        loaded.conversation = str(loaded.conversation).upper()
        return loaded


class Builds(DefaultDecoderWebdatasetFactory[Conversation]):
    __sample_type__ = Conversation

    def build(self, worker_rotation_offset: int = 0) -> Any:
        return super().build(worker_rotation_offset)
