"""Modules of another project's checkout, imported without all that the packages around them import.

`scripts/bridge-encoders`, `scripts/nemo-tests`, `scripts/programs` and `scripts/public-encoders` run files of other
projects unchanged, in an environment that has a few of their dependencies. A `Checkout` on `sys.meta_path` finds the
files; packages are empty but for their folder, and modules that only lend a name to an annotation or a base class are
made up.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import types
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Checkout:
    """Finds the modules of a package of a checkout.

    Args:
        source: Folder that the package is in.
        package: Its name.
        made_up: Modules without files: each has a class of every name that is asked for.
        whole: Packages of which `__init__` is run.
    """

    def __init__(self, source: Path, package: str, made_up: Collection[str], whole: Collection[str] = ()) -> None:
        self.source, self.package = source, package
        self.made_up, self.whole = frozenset(made_up), frozenset(whole)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to make a package or a made-up module, None for what Python finds itself."""
        if name in self.made_up:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        folder = self.source.joinpath(*name.split("."))
        if not f"{name}.".startswith(f"{self.package}.") or name in self.whole or not folder.is_dir():
            return None
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make the module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give a made-up module a class of every name."""
        if module.__name__ in self.made_up:
            module.__dict__["__getattr__"] = _named


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda kind, _: kind)})


def stand_in(name: str, **contents: Any) -> None:
    """Put a module with these contents where an import finds it."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(contents)


def one_rank() -> None:
    """Make megatron-core say that this is the only rank."""
    from megatron.core import num_microbatches_calculator, parallel_state

    for name, value in (("rank", 0), ("world_size", 1), ("group", None)):
        setattr(parallel_state, f"get_data_parallel_{name}", lambda *_, value=value, **__: value)
    for kind in ("tensor_model", "pipeline_model", "context"):
        setattr(parallel_state, f"get_{kind}_parallel_rank", lambda *_, **__: 0)
        setattr(parallel_state, f"get_{kind}_parallel_world_size", lambda *_, **__: 1)
    num_microbatches_calculator.get_num_microbatches = lambda: 1


def checkpoint_name(folder: str, iteration: int, basename: str, **_: Any) -> str:
    """Return where a trainer saves the state of the data."""
    return os.path.join(folder, f"iter_{iteration:07d}", basename)


def digest(tensor: Any) -> str:
    """Return what only an equal tensor has, type and shape included."""
    import torch

    read = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(read).hexdigest()}"


PAD = "<|endoftext|>"
SPECIAL = [PAD, "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
OMNI = ["<img>", "<image>", "</img>", "<so_embedding>", "<so_start>", "<so_end>"]


def qwen_processor() -> Any:
    """Return a processor of Qwen3-VL over a tokenizer of bytes, without torchvision: videos go as images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([*SPECIAL, "<|placeholder|>", *OMNI])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token=PAD, eos_token="<|im_end|>")
    template = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
        "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 16)

    class Videos:
        merge_size = images.merge_size

        def __call__(self, videos: Any, **settings: Any) -> dict[str, Any]:
            # Either videos, or a list of videos for each row of a batch; a video is a list of pictures.
            videos = [video for one in videos for video in ([one] if one and not isinstance(one[0], list) else one)]
            made = [images(images=None, videos=video, return_tensors="pt") for video in videos]
            import torch

            told = [types.SimpleNamespace(fps=2.0, frames_indices=list(range(len(video)))) for video in videos]
            found = {name: torch.cat([one[name] for one in made]) for name in ("pixel_values_videos", "video_grid_thw")}
            return found | {"video_metadata": told}

    found: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    found.image_processor, found.tokenizer, found.video_processor = images, tokenizer, Videos()
    found.chat_template = tokenizer.chat_template = template
    for name in ("image_token", "video_token", "vision_start_token", "vision_end_token"):
        token = f"<|{name.removesuffix('_token')}{'_pad' if 'vision' not in name else ''}|>"
        setattr(found, name, token)
        setattr(found, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return found


def jpg(number: int) -> bytes:
    """Return a picture that no other number has."""
    import numpy as np
    from PIL import Image

    size = (28 + 28 * (number % 3), 56, 3)
    pixels = np.random.Generator(np.random.PCG64(number)).integers(0, 256, size, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg")
    return file.getvalue()
