"""Models by preset, by local folder or by hub name, through one code path.

A preset is a folder in the layout of transformers that this module writes into the run: a model configuration, an image
processor, and a tokenizer with the family's special tokens and chat template, trained on the texts of the dataset. It
is then loaded like any other folder, so a resumed run has the same tokenizer.

All image processors are the Pillow ones of transformers: the others need torchvision.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.models.conversations.layout import ImageToken, MultiModalSampleConfig
from energon_bridge.models.families import CHATML_TEMPLATE, OMNI_TEMPLATE, QWEN_VL_TEMPLATE, Family, ProcessorFamily
from energon_bridge.models.families.known_families import load_pretrained, model_place
from energon_bridge.training.config import ModelConfig

# ---------------------------------------------------------------------------------------------------------------------
# Small models.
#
# Made in code, one for each family. Nothing in their folders says that they are small: the code that loads real models
# loads them, with the same names in the same places.


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """The special tokens of a family: those with a role, the other ones, and the chat template that writes them.

    A processor asks for the `named` ones as attributes of the tokenizer, like `image_token`.
    """

    pad: str
    eos: str
    bos: str | None = None
    others: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


LLAVA_TOKENS = SpecialTokens(pad="<pad>", bos="<s>", eos="</s>", others=("<image>",))

QWEN_TOKENS = SpecialTokens(
    pad="<|endoftext|>",
    eos="<|im_end|>",
    others=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    chat_template=QWEN_VL_TEMPLATE,
)

IDEFICS_TOKENS = SpecialTokens(
    pad="<|endoftext|>",
    eos="<|im_end|>",
    others=(
        *("<|im_start|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    chat_template=CHATML_TEMPLATE,
)

MLLAMA_TOKENS = SpecialTokens(
    pad="<|endoftext|>",
    bos="<|begin_of_text|>",
    eos="<|im_end|>",
    others=("<|im_start|>",),
    named={"image_token": "<image>"},
    chat_template=CHATML_TEMPLATE,
)

AUDIO_TOKENS = SpecialTokens(
    pad="<|endoftext|>", eos="<|im_end|>", others=("<|im_start|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
)
"""Their chat template is that of the processor."""

OMNI_TOKENS = SpecialTokens(
    pad="<|endoftext|>",
    eos="<|im_end|>",
    others=("<|im_start|>",),
    named={
        **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")},
        **{f"{name}_token": f"<|{name}|>" for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos")},
    },
    chat_template=OMNI_TEMPLATE,
)


def _llava(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the LLaVA family: a CLIP tower, a projector and a Llama."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig

    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": config.image_size},
        crop_size={"height": config.image_size, "width": config.image_size},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    # The last layer, and every patch but the class token: a tower this small has no layers to leave out.
    llava = LlavaConfig(
        vision_config=CLIPVisionConfig(**_vision(config), projection_dim=config.hidden_size),
        text_config=LlamaConfig(**_text(config, tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(config.image_size // config.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return llava, tokenizer, image_processor


def _qwen2_vl(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the Qwen2-VL family."""
    from transformers import Qwen2VLConfig

    vision = {"embed_dim": config.hidden_size, "hidden_size": config.hidden_size, "mlp_ratio": 2}
    return _qwen(Qwen2VLConfig, config, tokenizer, vision=vision)


def _qwen2_5_vl(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the Qwen2.5-VL family; the last layer of its vision tower sees whole images."""
    from transformers import Qwen2_5_VLConfig

    return _qwen(Qwen2_5_VLConfig, config, tokenizer, vision=_windows(config))


def _qwen3_vl(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the Qwen3-VL family; features of the first vision layer are added in the language model too."""
    from transformers import Qwen3VLConfig

    vision = {
        "hidden_size": config.hidden_size,
        "out_hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_position_embeddings": (config.image_size // config.patch_size) ** 2,
        "deepstack_visual_indexes": [0],
    }
    text = {"head_dim": config.hidden_size // config.num_heads}
    return _qwen(Qwen3VLConfig, config, tokenizer, vision=vision, text=text, interleaved=True)


def _idefics3(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the Idefics 3 family: it cuts an image into up to four tiles, and gets the whole image too."""
    from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Processor, LlamaConfig

    model = Idefics3Config(
        vision_config=_vision(config),
        text_config=LlamaConfig(**_text(config, tokenizer)).to_dict(),
        scale_factor=_MERGE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * config.image_size}, max_image_size={"longest_edge": config.image_size}
    )
    count = (config.image_size // config.patch_size // _MERGE) ** 2
    return model, Idefics3Processor(image_processor, tokenizer, count, chat_template=tokenizer.chat_template)


def _mllama(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the MLlama family: of five layers of text, the fourth sees images, by cross-attention."""
    from transformers import MllamaConfig, MllamaImageProcessorPil, MllamaProcessor

    layers = 5 * config.num_layers
    vision = _vision(config) | {"num_global_layers": 1, "attention_heads": config.num_heads}
    del vision["num_attention_heads"]
    model = MllamaConfig(
        vision_config=vision | {"intermediate_layers_indices": [0], "vision_output_dim": 2 * config.hidden_size},
        text_config=_text(config, tokenizer)
        | {"num_hidden_layers": layers, "cross_attention_layers": list(range(3, layers, 5))},
        image_token_index=tokenizer.image_token_id,
    )
    image_processor = MllamaImageProcessorPil(size={"height": config.image_size, "width": config.image_size})
    return model, MllamaProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def _qwen2_audio(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return a model of the Qwen2-Audio family, which takes sounds of up to 30 seconds."""
    from transformers import Qwen2AudioConfig, Qwen2AudioProcessor, Qwen2Config, WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()
    model = Qwen2AudioConfig(
        audio_config=_hearing(config, extractor),
        text_config=Qwen2Config(**_text(config, tokenizer)).to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return model, Qwen2AudioProcessor(extractor, tokenizer)


def _qwen2_5_omni(config: ModelConfig, tokenizer: Any) -> tuple[Any, ...]:
    """Return the part of a model of the Qwen2.5-Omni family that reads images, videos and sounds, and writes text."""
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2_5OmniThinkerConfig,
        Qwen2VLImageProcessorPil,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    extractor = WhisperFeatureExtractor()
    tokens = {f"{kind}_token_index": kind for kind in ("image", "video", "audio")}
    tokens |= {"vision_start_token_id": "vision_bos", "vision_end_token_id": "vision_eos"}
    tokens |= {"audio_start_token_id": "audio_bos", "audio_end_token_id": "audio_eos"}
    model = Qwen2_5OmniThinkerConfig(
        audio_config={**_hearing(config, extractor), "output_dim": config.hidden_size},
        vision_config={**_qwen_vision(config), **_windows(config)},
        text_config=_qwen_text(config, tokenizer),
        **_ids(tokenizer, {name: OMNI_TOKENS.named[f"{token}_token"] for name, token in tokens.items()}),
    )
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessorPil(**_qwen_patches(config)),
        video_processor=Qwen2VLVideoProcessor(**_qwen_patches(config)),
        feature_extractor=extractor,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return model, processor


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: SpecialTokens) -> Any:
    """Train a byte-level BPE tokenizer on texts and give it the special tokens and chat template of a family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = {"pad_token": special.pad, "bos_token": special.bos, "eos_token": special.eos}
    named = {role: token for role, token in roles.items() if token is not None}
    # With the whole byte alphabet no text is ever unknown, whatever the captions were.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*named.values(), *special.others, *special.named.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        additional_special_tokens=list(special.others),
        extra_special_tokens=dict(special.named),
        chat_template=special.chat_template,
        clean_up_tokenization_spaces=False,
    )


_MERGE = 2
"""Patches along each side of what becomes a token, in the Qwen-VL families and Idefics 3."""


def _qwen(
    kind: Any,
    config: ModelConfig,
    tokenizer: Any,
    *,
    vision: Mapping[str, Any],
    text: Mapping[str, Any] = MappingProxyType({}),
    interleaved: bool = False,
) -> tuple[Any, ...]:
    from transformers import Qwen2VLImageProcessorPil

    tokens = {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
    tokens |= {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")}
    model = kind(
        vision_config={**_qwen_vision(config), **vision},
        text_config={**_qwen_text(config, tokenizer, interleaved=interleaved), **text},
        **_ids(tokenizer, tokens),
    )
    return model, tokenizer, Qwen2VLImageProcessorPil(**_qwen_patches(config))


def _ids(tokenizer: Any, tokens: Mapping[str, str]) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _qwen_patches(config: ModelConfig) -> dict[str, Any]:
    size = {"shortest_edge": (_MERGE * config.patch_size) ** 2, "longest_edge": config.image_size**2}
    return {"size": size, "patch_size": config.patch_size, "merge_size": _MERGE, "temporal_patch_size": 2}


def _qwen_vision(config: ModelConfig) -> dict[str, Any]:
    patches = {"patch_size": config.patch_size, "spatial_merge_size": _MERGE, "temporal_patch_size": 2}
    return {"depth": config.num_layers, "num_heads": config.num_heads, **patches}


def _windows(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "out_hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "window_size": 4 * config.patch_size,
        "fullatt_block_indexes": [config.num_layers - 1],
    }


def _qwen_text(config: ModelConfig, tokenizer: Any, *, interleaved: bool = False) -> dict[str, Any]:
    # The three axes share the frequencies of a head about equally, as in the published models.
    half = config.hidden_size // config.num_heads // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if interleaved:
        rope["mrope_interleaved"] = True
    return {**_text(config, tokenizer), "rope_parameters": rope}


def _hearing(config: ModelConfig, extractor: Any) -> dict[str, Any]:
    """Return the sizes of an audio encoder for what a feature extractor makes of 30 seconds."""
    return {
        "d_model": config.hidden_size,
        "encoder_ffn_dim": 2 * config.hidden_size,
        "encoder_layers": config.num_layers,
        "encoder_attention_heads": config.num_heads,
        "num_mel_bins": extractor.feature_size,
        "max_source_positions": extractor.nb_max_frames // 2,
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of the language model, and of vision towers."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
    }


def _vision(config: ModelConfig) -> dict[str, Any]:
    return _sizes(config) | {"image_size": config.image_size, "patch_size": config.patch_size}


def _text(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    return _sizes(config) | {
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": 4096,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A small model: its tokens, what makes its parts of sizes and a tokenizer, and what the sizes are multiples of."""

    tokens: SpecialTokens
    parts: Callable[[ModelConfig, Any], tuple[Any, ...]]
    heads: int = 2
    patches: int = 1
    needs_torchvision: bool = False

    def check(self, config: ModelConfig) -> None:
        """Refuse sizes whose heads or patches do not come out even, and a processor that misses torchvision."""
        from transformers.utils import is_torchvision_available

        if self.needs_torchvision and not is_torchvision_available():
            raise ConfigurationError(f"model.preset={config.preset}: the processor of this model needs torchvision")
        if config.hidden_size % (self.heads * config.num_heads):
            raise ConfigurationError(
                f"model.preset={config.preset}: model.hidden_size={config.hidden_size} must be a multiple of "
                f"{self.heads} times model.num_heads={config.num_heads}"
            )
        if config.image_size % (self.patches * config.patch_size):
            times = "" if self.patches == 1 else f" {self.patches} times"
            raise ConfigurationError(
                f"model.preset={config.preset}: model.image_size={config.image_size} must be a multiple of{times} "
                f"model.patch_size={config.patch_size}"
            )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-llava": Preset(tokens=LLAVA_TOKENS, parts=_llava),
        "tiny-qwen2-vl": Preset(tokens=QWEN_TOKENS, parts=_qwen2_vl, heads=4, patches=_MERGE),
        "tiny-qwen2.5-vl": Preset(tokens=QWEN_TOKENS, parts=_qwen2_5_vl, heads=4, patches=_MERGE),
        "tiny-qwen3-vl": Preset(tokens=QWEN_TOKENS, parts=_qwen3_vl, heads=4, patches=_MERGE),
        "tiny-idefics3": Preset(tokens=IDEFICS_TOKENS, parts=_idefics3, patches=_MERGE),
        "tiny-mllama": Preset(tokens=MLLAMA_TOKENS, parts=_mllama),
        "tiny-qwen2-audio": Preset(tokens=AUDIO_TOKENS, parts=_qwen2_audio),
        "tiny-qwen2.5-omni": Preset(
            tokens=OMNI_TOKENS, parts=_qwen2_5_omni, heads=4, patches=_MERGE, needs_torchvision=True
        ),
    }
)


_IMAGE = "<image>"

PLAIN = frozenset({"llava_next"})
"""Models, by the `model_type` of their configuration, that are trained on plain sequences of images and text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBundle:
    """A model with what turns samples into its inputs.

    `image_token_id` is the placeholder of an image, `image_tokens` times per image; None if that
    depends on the image. `image_processor` is the whole processor where the model is encoded by it. `family` says what
    the model makes of images, videos and sounds.
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    image_token_id: int
    image_tokens: int | None
    family: Family | ProcessorFamily | None = None

    @property
    def sample_config(self) -> MultiModalSampleConfig:
        """The sample configuration that fits the model."""
        return MultiModalSampleConfig(image_token=ImageToken(token_str=_IMAGE, token_id=self.image_token_id))


@optional_packages()
def write_preset(config: ModelConfig, folder: Path, captions: Callable[[], Iterable[str]]) -> None:
    """Write the folder of a preset in one step; an existing one is left as it is.

    Args:
        config: Names the preset and its sizes.
        folder: Where to write it.
        captions: Gives the texts that the tokenizer is trained on; only called where it is needed.

    Raises:
        ConfigurationError: There is no such preset, or its sizes do not fit together.
    """
    preset = PRESETS.get(config.preset)
    if preset is None:
        raise ConfigurationError(
            f"unknown model preset {config.preset!r}; presets: {', '.join(PRESETS)}. For your own model, set "
            "model.name_or_path to its folder or hub name"
        )
    if folder.exists():
        return
    preset.check(config)
    _save(preset.parts(config, train_tokenizer(captions(), config.vocab_size, preset.tokens)), folder)


def _save(parts: Iterable[Any], folder: Path) -> None:
    """Write the parts of a model into a folder, in one step, in place of an older one."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    for part in parts:
        part.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


@optional_packages()
def load_model(
    name_or_path: str, *, init: str, image_tokens_per_image: int | None = None, attn_implementation: str | None = None
) -> ModelBundle:
    """Load model, tokenizer and image processor; the weights in float32, whatever precision they are stored in.

    Args:
        name_or_path: A local folder or a hub name.
        init: `pretrained` loads the weights, `random` draws them from torch's global generator.
        image_tokens_per_image: Overrides what the model's configuration says.
        attn_implementation: How attention is computed; None: as transformers chooses.

    Raises:
        ConfigurationError: Something cannot be loaded; says what to do without a connection.
    """
    import torch
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    if _is_path(name_or_path) and not Path(name_or_path).exists():
        raise ConfigurationError(
            f"model.name_or_path={name_or_path!r}: no such folder. Give the folder of a model saved by transformers, a "
            "name on the Hugging Face hub, or a preset (model.name_or_path=null model.preset=tiny-llava)"
        )
    # Optimizers lose small steps on weights in bfloat16, which is what most are stored in; precision is the trainer's.
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    try:
        source = model_place(name_or_path)
        config = AutoConfig.from_pretrained(source)
        config = getattr(config, "thinker_config", config)  # the part of omni models that writes text
        family = None
        image_processor = None
        if config.model_type in PLAIN:
            tokenizer = AutoTokenizer.from_pretrained(source)
        else:
            # The template of the processor knows images; that of the tokenizer may be the language model's.
            pretrained = load_pretrained(source)
            tokenizer = pretrained.tokenizer
            family = pretrained.family
            tokenizer.chat_template = pretrained.chat_template or tokenizer.chat_template
            image_processor = family.processor if isinstance(family, ProcessorFamily) else None
        if image_processor is None:
            image_processor = AutoImageProcessor.from_pretrained(source, backend="pil")
        model = _model(source, config, init, options)
    except ImportError as error:
        raise ConfigurationError(
            f"cannot load model {name_or_path!r} (model.attn_implementation={attn_implementation}): {error}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load model {name_or_path!r} (init={init}): {error}\n"
            f"On a machine that reaches the Hugging Face hub, `hf download {name_or_path}` fills the cache (HF_HOME), "
            "or, with `--local-dir FOLDER`, a folder to copy here and name in model.name_or_path. Or use a preset "
            "(model.name_or_path=null model.preset=tiny-llava)"
        ) from error
    return ModelBundle(
        model=model.train(),  # pretrained ones come without dropout
        tokenizer=tokenizer,
        image_processor=image_processor,
        image_token_id=_image_token_id(config, tokenizer),
        image_tokens=image_tokens_per_image or _image_tokens(config),
        family=family,
    )


def _model(name_or_path: str, config: Any, init: str, options: Mapping[str, Any]) -> Any:
    """Return the model of a configuration that reads text with images, or with any media. Raises ValueError."""
    import transformers

    kinds = [transformers.AutoModelForImageTextToText, getattr(transformers, "AutoModelForMultimodalLM", None)]
    kind = next((one for one in kinds if one is not None and type(config) in one._model_mapping), kinds[0])
    if init == "random":
        return kind.from_config(config, **options)
    return kind.from_pretrained(name_or_path, config=config, **options)


def _is_path(name: str) -> bool:
    """Whether a name can be none of the hub's, which have one slash at most."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def export_model(bundle: ModelBundle, folder: Path) -> None:
    """Write model, tokenizer and image processor as `load_model` reads them, in one step, in place of an older one."""
    from transformers.utils import logging as output

    bars = output.is_progress_bar_enabled()
    output.disable_progress_bar()  # a bar of one step, between the lines of the run
    try:
        _save((bundle.model, bundle.tokenizer, bundle.image_processor), folder)
    finally:
        if bars:
            output.enable_progress_bar()


def _image_token_id(config: Any, tokenizer: Any) -> int:
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((token_id for token_id in ids if token_id is not None), None)
    token = tokenizer.convert_tokens_to_ids(_IMAGE) if token is None else token
    return -200 if token is None else int(token)


def _image_tokens(config: Any) -> int | None:
    """Return the tokens per image of models with a fixed grid of patches (the Llava family)."""
    vision = getattr(config, "vision_config", None)
    image_size = getattr(vision, "image_size", None)
    patch_size = getattr(vision, "patch_size", None)
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if strategy is None or not isinstance(image_size, int) or not isinstance(patch_size, int):
        return None
    return (image_size // patch_size) ** 2 + (1 if strategy == "full" else 0)
