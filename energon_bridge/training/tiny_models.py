"""Small models of the families, made in code: what `model.preset` names.

A preset is written as a folder in the layout of transformers, with a model configuration, an image processor and a
tokenizer of the family's special tokens and chat template that is trained on the texts of the dataset. Nothing in it
says that it is small: it is loaded by the code that loads the real models, and has the same names in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energon_bridge.errors import ConfigurationError
from energon_bridge.task_encoder.families import QWEN_VL_TEMPLATE
from energon_bridge.training.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """The special tokens of a family: those with a role, the other ones, and the chat template that writes them."""

    pad: str
    eos: str
    bos: str | None = None
    others: tuple[str, ...] = ()
    chat_template: str | None = None


LLAVA_TOKENS = SpecialTokens(pad="<pad>", bos="<s>", eos="</s>", others=("<image>",))

QWEN_TOKENS = SpecialTokens(
    pad="<|endoftext|>",
    eos="<|im_end|>",
    others=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    chat_template=QWEN_VL_TEMPLATE,
)


def write_tiny_llava(config: ModelConfig, folder: Path, texts: Iterable[str]) -> None:
    """Write a model of the LLaVA family: a CLIP tower, a projector and a Llama."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig

    _check_sizes(config, heads=2, patches=1)
    tokenizer = train_tokenizer(texts, config.vocab_size, LLAVA_TOKENS)
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": 2 * config.hidden_size}
    layers = {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    vision = CLIPVisionConfig(
        **sizes,
        **layers,
        image_size=config.image_size,
        patch_size=config.patch_size,
        projection_dim=config.hidden_size,
    )
    text = LlamaConfig(**_text_sizes(config, tokenizer), max_position_embeddings=4096)
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
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(config.image_size // config.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    for part in (llava, tokenizer, image_processor):
        part.save_pretrained(folder)


def write_tiny_qwen2_vl(config: ModelConfig, folder: Path, texts: Iterable[str]) -> None:
    """Write a model of the Qwen2-VL family."""
    from transformers import Qwen2VLConfig

    vision = {"embed_dim": config.hidden_size, "hidden_size": config.hidden_size, "mlp_ratio": 2}
    _write_qwen(Qwen2VLConfig, config, folder, texts, vision=vision)


def write_tiny_qwen2_5_vl(config: ModelConfig, folder: Path, texts: Iterable[str]) -> None:
    """Write a model of the Qwen2.5-VL family; the last layer of its vision tower sees whole images."""
    from transformers import Qwen2_5_VLConfig

    vision = {
        "hidden_size": config.hidden_size,
        "out_hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "window_size": 4 * config.patch_size,
        "fullatt_block_indexes": [config.num_layers - 1],
    }
    _write_qwen(Qwen2_5_VLConfig, config, folder, texts, vision=vision)


def write_tiny_qwen3_vl(config: ModelConfig, folder: Path, texts: Iterable[str]) -> None:
    """Write a model of the Qwen3-VL family; features of the first vision layer are added in the language model too."""
    from transformers import Qwen3VLConfig

    vision = {
        "hidden_size": config.hidden_size,
        "out_hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_position_embeddings": (config.image_size // config.patch_size) ** 2,
        "deepstack_visual_indexes": [0],
    }
    text = {"head_dim": config.hidden_size // config.num_heads}
    _write_qwen(Qwen3VLConfig, config, folder, texts, vision=vision, text=text, interleaved=True)


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
        special_tokens=[*named.values(), *special.others],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        additional_special_tokens=list(special.others),
        chat_template=special.chat_template,
        clean_up_tokenization_spaces=False,
    )


def _write_qwen(
    kind: Any,
    config: ModelConfig,
    folder: Path,
    texts: Iterable[str],
    *,
    vision: Mapping[str, Any],
    text: Mapping[str, Any] = MappingProxyType({}),
    interleaved: bool = False,
) -> None:
    from transformers import Qwen2VLImageProcessorPil

    merge = 2
    _check_sizes(config, heads=4, patches=merge)
    tokenizer = train_tokenizer(texts, config.vocab_size, QWEN_TOKENS)
    # The three axes share the frequencies of a head about equally, as in the published models.
    half = config.hidden_size // config.num_heads // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if interleaved:
        rope["mrope_interleaved"] = True
    ids: dict[str, int] = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        )
    }
    patches = {"patch_size": config.patch_size, "spatial_merge_size": merge, "temporal_patch_size": 2}
    model = kind(
        vision_config={"depth": config.num_layers, "num_heads": config.num_heads, **patches, **vision},
        text_config={
            **_text_sizes(config, tokenizer),
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            **text,
        },
        **ids,
    )
    image_processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": (merge * config.patch_size) ** 2, "longest_edge": config.image_size**2},
        patch_size=config.patch_size,
        merge_size=merge,
        temporal_patch_size=2,
    )
    for part in (model, tokenizer, image_processor):
        part.save_pretrained(folder)


def _text_sizes(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _check_sizes(config: ModelConfig, *, heads: int, patches: int) -> None:
    """Refuse sizes whose heads or patches do not come out even."""
    if config.hidden_size % (heads * config.num_heads):
        raise ConfigurationError(
            f"model.preset={config.preset}: model.hidden_size={config.hidden_size} must be a multiple of {heads} times "
            f"model.num_heads={config.num_heads}"
        )
    if config.image_size % (patches * config.patch_size):
        times = "" if patches == 1 else f" {patches} times"
        raise ConfigurationError(
            f"model.preset={config.preset}: model.image_size={config.image_size} must be a multiple of{times} "
            f"model.patch_size={config.patch_size}"
        )


Writer = Callable[[ModelConfig, Path, Iterable[str]], None]

PRESETS: Mapping[str, Writer] = MappingProxyType(
    {
        "tiny-llava": write_tiny_llava,
        "tiny-qwen2-vl": write_tiny_qwen2_vl,
        "tiny-qwen2.5-vl": write_tiny_qwen2_5_vl,
        "tiny-qwen3-vl": write_tiny_qwen3_vl,
    }
)
