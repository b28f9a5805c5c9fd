"""Models by preset, by local folder or by hub name, through one code path.

A preset is a folder that this module writes into the run: model configuration, image processor and a tokenizer trained
on the captions of the dataset. From there it is loaded like any other folder, so a resumed run has the same tokenizer.

Everything here uses the Pillow image processors of transformers: the others need torchvision.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.conversation import ImageToken, MultiModalSampleConfig
from energon_bridge.training.config import ModelConfig

_PAD, _BOS, _EOS, _IMAGE = "<pad>", "<s>", "</s>", "<image>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBundle:
    """A model with what turns samples into its inputs.

    `image_token_id` stands for an image in the token sequence, `image_tokens` times per image; None where that
    depends on the image.
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    image_token_id: int
    image_tokens: int | None

    @property
    def sample_config(self) -> MultiModalSampleConfig:
        """The sample configuration that fits the model."""
        return MultiModalSampleConfig(image_token=ImageToken(token_str=_IMAGE, token_id=self.image_token_id))


def write_preset(config: ModelConfig, folder: Path, captions: Callable[[], Iterable[str]]) -> None:
    """Write the folder of a preset in one step; an existing one is left as it is.

    Args:
        config: Names the preset and its sizes.
        folder: Where to write it.
        captions: Gives the texts that the tokenizer is trained on; only called where it is needed.

    Raises:
        ConfigurationError: There is no such preset, or its sizes do not fit together.
    """
    write = _PRESETS.get(config.preset)
    if write is None:
        raise ConfigurationError(
            f"there is no model preset {config.preset!r}; presets: {', '.join(_PRESETS)}. For a model of your own set "
            "model.name_or_path to its folder or hub name"
        )
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    write(config, temporary, captions())
    os.replace(temporary, folder)


def load_model(name_or_path: str, *, init: str, image_tokens_per_image: int | None = None) -> ModelBundle:
    """Load model, tokenizer and image processor.

    Args:
        name_or_path: A local folder or a hub name.
        init: `pretrained` loads the weights, `random` draws them from torch's global generator.
        image_tokens_per_image: Overrides what the model's configuration says.

    Raises:
        ConfigurationError: Something cannot be loaded; says what to do without a connection.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil")
        if init == "random":
            model = AutoModelForImageTextToText.from_config(config)
        else:
            model = AutoModelForImageTextToText.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load model {name_or_path!r} (init={init}): {error}\n"
            "Without a connection to the Hugging Face hub use a model that is in the cache (HF_HOME), a local folder "
            "(model.name_or_path=/path/to/folder), or a preset (model.name_or_path=null model.preset=tiny-llava)"
        ) from error
    return ModelBundle(
        model=model,
        tokenizer=tokenizer,
        image_processor=image_processor,
        image_token_id=_image_token_id(config, tokenizer),
        image_tokens=image_tokens_per_image or _image_tokens(config),
    )


def _image_token_id(config: Any, tokenizer: Any) -> int:
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    found = next((token_id for token_id in ids if token_id is not None), None)
    return int(tokenizer.convert_tokens_to_ids(_IMAGE) if found is None else found)


def _image_tokens(config: Any) -> int | None:
    """Return the tokens per image of models with a fixed grid of patches (the Llava family)."""
    vision = getattr(config, "vision_config", None)
    image_size, patch_size = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if strategy is None or not isinstance(image_size, int) or not isinstance(patch_size, int):
        return None
    return (image_size // patch_size) ** 2 + (1 if strategy == "full" else 0)


def _write_tiny_llava(config: ModelConfig, folder: Path, captions: Iterable[str]) -> None:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig

    if config.hidden_size % (2 * config.num_heads) or config.image_size % config.patch_size:
        raise ConfigurationError(
            f"model.hidden_size={config.hidden_size} must be a multiple of twice model.num_heads={config.num_heads}, "
            f"and model.image_size={config.image_size} one of model.patch_size={config.patch_size}"
        )
    tokenizer = _train_tokenizer(captions, config.vocab_size)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
    }
    vision = CLIPVisionConfig(
        **sizes, image_size=config.image_size, patch_size=config.patch_size, projection_dim=config.hidden_size
    )
    text = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        num_key_value_heads=config.num_heads,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": config.image_size},
        crop_size={"height": config.image_size, "width": config.image_size},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    # The last layer, and every patch but the class token: a tower this small has no layers to leave out.
    llava = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        image_seq_length=(config.image_size // config.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    for part in (llava, tokenizer, image_processor):
        part.save_pretrained(folder)


def _train_tokenizer(captions: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # With the whole byte alphabet no text is ever unknown, whatever the captions were.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _BOS, _EOS, _IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        additional_special_tokens=[_IMAGE],
        clean_up_tokenization_spaces=False,
    )


_PRESETS: dict[str, Callable[[ModelConfig, Path, Iterable[str]], None]] = {"tiny-llava": _write_tiny_llava}
