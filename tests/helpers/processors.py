"""Tiny processors of transformers, one of each class, built offline: its own parts with their defaults and a tokenizer
that has the special tokens which the class asks for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.families import ChatSample, VideoFrames

HAS_ALL_TEXTS = Version(transformers.__version__) >= Version("5.23")
"""Whether all processors write the text of one image, video or sound; those that do not are refused by name."""


@contextmanager
def planned() -> Iterator[None]:
    """Skip what needs a processor that an older transformers cannot ask for the text of one medium."""
    try:
        yield
    except ConfigurationError as error:
        if HAS_ALL_TEXTS or "could not take a blank one" not in str(error):
            raise
        pytest.skip(str(error))


TEXTS = (
    "A question about the picture and what can be seen or heard in it.",
    "The answer names three things: a red square, a blue circle and a green line.",
    "user assistant system <|im_start|> <|im_end|> 0123456789 row col seconds image video audio",
)
_NO_TOKENS = ("convert", "add", "unk", "eos_", "bos_", "pad_", "sep_", "cls_", "mask_")
_VISION = {"patch_size": 14, "vision_feature_select_strategy": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "Granite4VisionProcessor": _VISION,
    "LlavaNextProcessor": _VISION,
    "LlavaNextVideoProcessor": _VISION,
    "LlavaOnevisionProcessor": {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    "LlavaProcessor": _VISION,
    "PerceptionLMProcessor": {"patch_size": 14},
    "AyaVisionProcessor": {"patch_size": 32, "img_size": 384},
    "InternVLProcessor": {"image_seq_length": 64},
    "PixtralProcessor": {"spatial_merge_size": 2},
}
"""Arguments without which a processor takes no image, or not as its model does."""
PARTS: dict[str, dict[str, str]] = {
    "ColModernVBertProcessor": {"image_processor": "Idefics3ImageProcessor"},
    "MusicFlamingoProcessor": {"feature_extractor": "WhisperFeatureExtractor"},
    "NemotronH_Omni_Reasoning_V3Processor": {"feature_extractor": "ParakeetFeatureExtractor"},
}
"""Parts that the mappings of transformers do not name."""
_SLICES = {  # of small images, few of them
    f"{part}_processor.{name}": value
    for part in ("image", "video")
    for name, value in (("scale_resolution", 112), ("max_slice_nums", 4))
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "AyaVisionProcessor": {"image_processor.max_patches": 4},  # of the default 12, which take seconds
    "Idefics3Processor": {"image_processor.size": {"longest_edge": 728}},  # four tiles of the default sixteen
    "Ernie4_5_VLMoeProcessor": {"video_processor.draw_on_frames": False},  # with a font of its own
    "MiniCPMOcrProcessor": _SLICES,
    "MiniCPMV4_6Processor": _SLICES,
    "MiniCPMV4_7Processor": _SLICES,
    "PaliGemmaProcessor": {"image_processor.image_seq_length": 16},
    "Qwen3OmniMoeProcessor": {"image_processor.patch_size": 16, "video_processor.patch_size": 16},
    "Qwen3VLProcessor": {"image_processor.patch_size": 16},
}
"""Attributes of parts that the defaults leave out, or that the models of a class need."""
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MERGED = {"insert_layer_id": 0, "vision_config.insert_layer_id": 0, "vision_config.patch_size": 14}
MODELS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config.patch_size": 16, "vision_config.image_size": 384},
    "gemma3": {"vision_config.image_size": 224, "vision_config.patch_size": 14},
    "idefics3": {"vision_config.patch_size": 14, "vision_config.image_size": 364},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
        "text_config.moe_intermediate_size": [32, 16],
        "text_config.moe_num_experts": 4,
        "text_config.moe_k": 2,
    },
    "glm4v": {"text_config.rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "internvl": {"vision_config.patch_size": [24, 24], "vision_config.image_size": [384, 384]},
    "minicpm_ocr": _MERGED,
    "minicpmv4_6": _MERGED,
    "minicpmv4_7": _MERGED,
    "mistral3": {"vision_config.patch_size": 16},
    "mllama": {
        "text_config.cross_attention_layers": [1],
        "vision_config.image_size": 224,
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.num_global_layers": 1,
        "vision_config.vision_output_dim": 96,
    },
    "paddleocr_vl": {"text_config.rope_parameters": _MROPE},
    "paligemma": {"vision_config.patch_size": 56, "vision_config.image_size": 224},
    "qwen2_audio": {"audio_config.num_mel_bins": 80},
    "qwen2_vl": {"text_config.rope_parameters": _MROPE},
    "qwen2_5_vl": {"text_config.rope_parameters": _MROPE},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": _MROPE, "audio_config.num_mel_bins": 80},
    "qwen3_omni_moe_thinker": {"text_config.rope_parameters": _MROPE, "audio_config.num_mel_bins": 80},
}
"""Settings of models that fit the defaults of their processors."""
WORDS: dict[str, dict[str, str]] = {"PaliGemmaProcessor": {"image_token": "<image>"}}
"""Special tokens without whose own text a processor takes no image."""
VIDEOLESS = {"MiniCPMV4_6Processor", "MiniCPMV4_7Processor"}
"""Processors whose images need no torchvision; without it, they have a part here that takes no videos."""
ONE_QUESTION = {"PaliGemmaProcessor"}
"""Processors that take one question, and its answer apart."""
PADDED = {"AudioFlamingo3Processor", "GlmAsrProcessor", "MusicFlamingoProcessor"}
"""Processors that pad sounds to 30 seconds, unless a call says how to pad."""
REPLACING = ("replace_image_token", "replace_video_token", "replace_audio_token")


@functools.cache
def processor_classes() -> dict[str, tuple[str, ...]]:
    """Return the names of all processors that take text with media, each with the types of its models."""
    classes: dict[str, tuple[str, ...]] = {}
    for model_type, name in PROCESSOR_MAPPING_NAMES.items():
        classes[name] = (*classes.get(name, ()), model_type)
    return dict(sorted(classes.items()))


def expands(kind: type) -> bool:
    """Return whether a processor writes tokens for media, as models do that read media among text."""
    return any(getattr(kind, name, None) is not getattr(ProcessorMixin, name) for name in REPLACING)


def tiny_tokenizer(kind: type) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens in the source of a processor."""
    source = "".join(inspect.getsource(inspect.getmodule(base)) for base in kind.__mro__[:2] if _is_own(base))
    asked = re.findall(r"tokenizer(?:\.|, [\"'])(\w+_token)(?:_id)?\b", source)
    names = sorted({name for name in asked if not name.startswith(_NO_TOKENS)})
    written = set(re.findall(r"[\"'](<[^<>\s\"'{}]+>|\[[A-Z_]+\]|\|[A-Z]+\|)[\"']", source))
    written |= set(re.findall(r"[A-Z]+_TOKEN = [\"'](\S+)[\"']", source))
    tokens = sorted(written | {f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)})
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    constants = dict(re.findall(r"self\.(\w+_token) = [\"'](\S+)[\"']", source)) | WORDS.get(kind.__name__, {})
    own = {name: constants.get(name, f"<|{name.removesuffix('_token')}|>") for name in names}
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=own,
    )
    made.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    for name in names:  # as tokenizers of the hub have them
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(own[name]))
    return made


def tiny_processor(name: str) -> ProcessorMixin:
    """Return a processor with small or default parts."""
    kind = processor_class_from_name(name)
    arguments: dict[str, Any] = {}
    for attribute in kind.get_attributes():
        if attribute.endswith("tokenizer"):
            arguments[attribute] = tiny_tokenizer(kind)
            continue
        part = PARTS.get(name, {}).get(attribute)
        of_model = processor_classes()[name][0]
        if attribute == "video_processor" and name in VIDEOLESS and not is_torchvision_available():
            arguments[attribute] = BaseVideoProcessor(slice_mode=True, downsample_mode="16x")
            kind = type(name, (kind,), {"check_argument_for_proper_class": lambda self, name, part: type(part)})
            continue
        arguments[attribute] = getattr(transformers, part)() if part else tiny_part(of_model, attribute)
    for place, value in ATTRIBUTES.get(name, {}).items():
        attribute, _, field = place.partition(".")
        setattr(arguments[attribute], field, value)
    return kind(**arguments, **SETTINGS.get(name, {}))


def tiny_part(model_type: str, attribute: str) -> Any:
    """Return an image, video or sound processor with the defaults of its class."""
    mapping, names = {
        "image_processor": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES"),
        "video_processor": ("video_processing_auto", "VIDEO_PROCESSOR_MAPPING_NAMES"),
        "feature_extractor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
        "audio_processor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
    }[attribute]
    module = importlib.import_module(f"transformers.models.auto.{mapping}")
    found = getattr(module, names)[model_type]
    if isinstance(found, dict):
        found = (is_torchvision_available() and found.get("torchvision")) or found.get("pil")
    if found is None:
        raise ImportError(f"the {attribute} of {model_type} needs torchvision")
    return getattr(transformers, found)()


def _is_own(base: type) -> bool:
    return base.__module__.startswith("transformers.models")


_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size", "output_dim", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "depth", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **{"head_dim": 16, "num_experts": 4, "n_window": 50},
}


def tiny_model_config(model_type: str, processor: ProcessorMixin) -> Any:
    """Return a small configuration of a model, with the tokens of a processor."""
    config = _shrunk(transformers.AutoConfig.for_model(model_type), len(processor.tokenizer))
    for place, value in MODELS.get(model_type, {}).items():
        part, _, name = place.rpartition(".")
        setattr(getattr(config, part) if part else config, name, value)
    for name in list(vars(config)):
        one = next((one for one in _TOKENS if name in (f"{one}_token_id", f"{one}_token_index", f"{one}_id")), None)
        holders = [(processor.tokenizer, f"{one}_token_id"), (processor, f"{one}_token_id"), (processor, f"{one}_id")]
        known = [token for holder, attribute in holders if (token := getattr(holder, attribute, None)) is not None]
        if one is not None and known:
            setattr(config, name, known[0])
    if hasattr(config, "newline_id"):
        (config.newline_id,) = processor.tokenizer("\n", add_special_tokens=False).input_ids
    if model_type.endswith("thinker"):
        for ours, theirs in (
            ("vision_start", "vision_bos"),
            ("vision_end", "vision_eos"),
            ("audio_start", "audio_bos"),
        ):
            setattr(config, f"{ours}_token_id", getattr(processor.tokenizer, f"{theirs}_token_id"))
    return config


def tiny_model(config: Any, seed: int = 0) -> Any:
    """Return a model in which positions and neighbours matter."""
    torch.manual_seed(seed)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM):
        try:
            model = auto.from_config(config).eval()
        except ValueError:
            continue
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(2)
            elif "gate" in name:  # of MLlama's images, closed at first
                parameter.data.fill_(0.7)
        return model
    raise ValueError(f"no model of {type(config).__name__}")


_TOKENS = (
    *("image", "video", "audio", "vision_start", "vision_end", "audio_start", "audio_end", "boi", "eoi"),
    *("image_start", "image_end", "video_start", "video_end", "slice_start", "slice_end"),
)


def _shrunk(config: Any, words: int) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrunk(value, words)
        elif name in _SMALL and isinstance(value, int):
            setattr(config, name, _SMALL[name])
        elif name == "vocab_size":
            config.vocab_size = words
        elif name == "layer_types" and value:
            config.layer_types = (
                value[:2] if len(set(value)) == 1 else [value[0], next(v for v in value if v != value[0])]
            )
        elif isinstance(value, dict) and "mrope_section" in value:
            setattr(config, name, {**value, "mrope_section": [2, 3, 3]})
        elif name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
            setattr(config, name, [1] if name.startswith("full") else [0])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    return config


TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ IMAGE }}{%- elif part.type == 'video' -%}{{ VIDEO }}"
    "{%- elif part.type == 'audio' -%}{{ AUDIO }}{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
)
ONE_VIDEO = {"SmolVLMProcessor"}  # it writes the frames of the longest of a call, so a second one is refused
MANY = {"image": "images", "video": "videos", "audio": "audios"}


def place(processor: Any, kind: str) -> str:
    """Return the text that a chat template writes for a medium."""
    name = type(processor).__name__
    token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None) or ""
    if "Omni" in name and name.startswith("Qwen"):
        around = "audio" if kind == "audio" else "vision"
        return token.join(getattr(processor.tokenizer, f"{around}_{side}_token") for side in ("bos", "eos"))
    if kind == "video" and name.startswith("Glm"):
        return f"<|begin_of_video|>{token}<|end_of_video|>"
    return f"<|image_start|>{token}<|image_end|>" if name == "HunYuanVLProcessor" else token


def template_of(processor: Any) -> str | None:
    """Return a template; None: the encoder has that of the processor."""
    if type(processor).__name__ in ONE_QUESTION:
        return None
    template = TEMPLATE
    for kind in MANY:
        template = template.replace(kind.upper(), repr(place(processor, kind)))
    return template


def medium(kind: str, rng: np.random.Generator, processor: Any) -> Any:
    if kind == "audio":
        part = getattr(processor, "feature_extractor", None) or processor.audio_processor
        return rng.standard_normal(int(rng.integers(8000, 40000))).astype(np.float32) / 10, int(part.sampling_rate)
    height, width = (int(side) for side in rng.integers(60, 400, 2))
    if kind == "video":
        frames = torch.from_numpy(rng.integers(0, 256, (int(rng.integers(4, 9)), 3, height // 2, width // 2), np.uint8))
        return VideoFrames(frames=frames, fps=2.0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def conversation(number: int, kinds: list[str], processor: Any) -> tuple[ChatSample, str]:
    """Return a random conversation, and its text as the template writes it, or as the processor takes its question."""
    if type(processor).__name__ in ONE_QUESTION:
        return _question(number, processor)
    draw = random.Random(number)
    rng = np.random.default_rng(number)
    media: dict[str, list[Any]] = {kind: [] for kind in kinds}
    turns, text = [], ""
    if draw.random() < 0.3:
        turns.append({"role": "system", "content": "Be short."})
        text += "<|im_start|>system\nBe short.<|im_end|>\n"
    for turn in range(draw.choice((1, 2))):
        question = written = f"question {turn}"
        for kind in draw.choices(kinds, k=draw.choice((0, 1, 1, 2)) if turn or number % 3 else 1):
            if kind == "video" and media[kind] and type(processor).__name__ in ONE_VIDEO:
                continue
            media[kind].append(medium(kind, rng, processor))
            question += f" <{kind}> and"
            written += f" {place(processor, kind)} and"
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": f"answer {turn}"}]
        text += f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\nanswer {turn}<|im_end|>\n"
    sample = ChatSample(
        __key__=str(number), messages=turns, **{MANY[kind]: values or None for kind, values in media.items()}
    )
    return sample, text


def _question(number: int, processor: Any) -> tuple[ChatSample, str]:
    draw = random.Random(number)
    images = [medium("image", np.random.default_rng(number), processor) for _ in range(draw.choice((1, 1, 2)))]
    text = f"question {number}" if number % 4 else f"a question with <image> and {number} more words"
    shown = "<image>" * (len(images) - text.count("<image>")) + text
    turns = [{"role": "user", "content": shown}, {"role": "assistant", "content": f"answer {number}"}]
    return ChatSample(__key__=str(number), messages=turns, images=images), shown


def called(processor: Any, texts: list[str], samples: list[ChatSample]) -> dict[str, Any]:
    """Return what the processor makes of some samples by itself."""
    given: dict[str, Any] = {}
    images = [list(sample.images or ()) for sample in samples]
    if any(images):
        flat = type(processor).__name__ == "GotOcr2Processor"
        given["images"] = list(itertools.chain(*images)) if flat else images
    videos = [video for sample in samples for video in sample.videos or ()]
    if videos:
        given["videos"] = [video.frames for video in videos]
        metadata = [
            {"fps": 2.0, "frames_indices": list(range(n)), "total_num_frames": n, "duration": n / 2}
            for n in (len(video.frames) for video in videos)
        ]
        given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
    if type(processor).__name__ in ONE_QUESTION:
        given["suffix"] = [sample.messages[-1]["content"] for sample in samples]
    sounds, sources = heard(samples)
    if sounds:
        given["audio"] = sounds
    if any(source is not None for source in sources):
        given |= {"load_audio_from_video": True, "audio_from_video_indices": sources}
    if "Omni" in type(processor).__name__ and type(processor).__name__.startswith("Qwen") and videos:
        given["videos_kwargs"]["fps"] = videos[0].fps  # it takes one rate for all
    padding: dict[str, Any] = {"padding": True, "padding_side": "right"} if len(texts) > 1 else {}
    if padding and type(processor).__name__ in PADDED:
        padding = {"text_kwargs": padding}
    return dict(processor(text=texts, add_special_tokens=False, return_tensors="pt", **padding, **given))


def heard(samples: list[ChatSample]) -> tuple[list[np.ndarray], list[int | None]]:
    """Return all sounds in the order of their places, and for each the number of its video, or None."""
    slots: list[tuple[np.ndarray, int | None]] = []
    number = itertools.count()
    for sample in samples:
        alone, videos = iter(sample.audios or ()), iter(sample.videos or ())
        for kind in re.findall("<(video|audio)>", " ".join(turn["content"] for turn in sample.messages)):
            source = next(number) if kind == "video" else None
            sound = next(alone) if kind == "audio" else next(videos).sound
            if sound is not None:
                slots.append((sound[0], source))
    return [sound for sound, _ in slots], [source for _, source in slots]
