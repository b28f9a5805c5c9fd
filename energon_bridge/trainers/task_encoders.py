"""Task encoder configurations: what to load and how to encode, without creating any object first.

A task encoder configuration is a dataclass of plain values with a method `build(context)`. Any class with that method
qualifies (`TaskEncoderConfig` is a protocol); the ones below are for the encoders of this package.

Tokenizers and image processors are loaded with transformers from a folder or the hub. Code that comes with them runs
only with `trust_remote_code=True`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from energon_bridge.core.errors import ConfigurationError, optional_packages
from energon_bridge.models.conversations.layout import MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.models.families.known_families import model_place


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEncoderContext:
    """What a run passes to every task encoder.

    Args:
        tokenizer: The run's tokenizer; None: the encoder loads its own.
        seq_length: Longest sequence.
        pad_to_multiple_of: Batches, and the samples of packs, are padded to a multiple of it.
        pad_to_max_length: Pad everything to `seq_length`.
        trust_remote_code: Default for configurations that do not set it.
        pack_batches_to_multiple_of: Pack the samples of a microbatch into one row, each padded to a multiple of this;
            None: one row per sample. Only the encoders of `bridge_encoders` can.
    """

    tokenizer: Any = None
    seq_length: int = 2048
    pad_to_multiple_of: int = 1
    pad_to_max_length: bool = False
    trust_remote_code: bool = False
    pack_batches_to_multiple_of: int | None = None


@runtime_checkable
class TaskEncoderConfig(Protocol):
    """A declared task encoder."""

    def build(self, context: TaskEncoderContext) -> Any:
        """Make the task encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalTaskEncoderConfig:
    """Declares a `MultiModalTaskEncoder`.

    Args:
        hf_processor_path: Folder or hub name of tokenizer and image processor.
        hf_processor_revision: Revision on the hub.
        sample_config: Placeholders and conversation template.
        image_tokens_per_image: Tokens of an image; None as in the encoder.
        add_bos: Begin with the tokenizer's begin-of-sequence token.
        blank_media: A microbatch without images gets a blank one.
        trust_remote_code: Run code that comes with the tokenizer or the image processor; None: what the run says.
    """

    hf_processor_path: str
    hf_processor_revision: str | None = None
    sample_config: MultiModalSampleConfig = MultiModalSampleConfig()  # noqa: RUF009 - it is frozen
    image_tokens_per_image: int | None = None
    add_bos: bool = True
    blank_media: bool = False
    trust_remote_code: bool | None = None

    def build(self, context: TaskEncoderContext) -> MultiModalTaskEncoder:
        """Load what it needs and make the encoder.

        Raises:
            ConfigurationError: transformers is not installed, or the path holds no tokenizer or image processor.
        """
        trust = context.trust_remote_code if self.trust_remote_code is None else self.trust_remote_code
        tokenizer, image_processor = load_processors(
            self.hf_processor_path, self.hf_processor_revision, tokenizer=context.tokenizer, trust_remote_code=trust
        )
        return MultiModalTaskEncoder(
            tokenizer,
            image_processor,
            self.sample_config,
            context.seq_length,
            image_tokens_per_image=self.image_tokens_per_image,
            pad_to_multiple_of=context.pad_to_multiple_of,
            pad_to_max_length=context.pad_to_max_length,
            add_bos=self.add_bos,
            blank_media=self.blank_media,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplateTaskEncoderConfig:
    """Declares a `ChatTemplateTaskEncoder`, for LLaVA, Qwen2-VL, Qwen2.5-VL or Qwen3-VL, whichever the folder holds.

    Args:
        hf_processor_path: Folder or hub name of the model, with tokenizer, image processor and `config.json`.
        chat: How conversations are rendered, learned and limited. Its `seq_length`, `pad_to_multiple_of` and
            `pad_to_max_length` are those of the run.
    """

    hf_processor_path: str
    chat: ChatConfig = ChatConfig()  # noqa: RUF009 - it is frozen

    def build(self, context: TaskEncoderContext) -> ChatTemplateTaskEncoder:
        """Load what it needs and make the encoder.

        Raises:
            ConfigurationError: Something cannot be loaded, or the model's family is not known.
        """
        chat = replace(
            self.chat,
            seq_length=context.seq_length,
            pad_to_multiple_of=context.pad_to_multiple_of,
            pad_to_max_length=context.pad_to_max_length,
        )
        return ChatTemplateTaskEncoder.from_pretrained(self.hf_processor_path, chat)


def load_processors(
    path: str, revision: str | None = None, *, tokenizer: Any = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load a tokenizer, unless there is one, and an image processor.

    Args:
        path: Folder or hub name.
        revision: Revision on the hub.
        tokenizer: Used as it is, if given.
        trust_remote_code: Run code that comes with them.

    Raises:
        ConfigurationError: transformers is not installed, or one of them cannot be loaded.
    """
    with optional_packages():
        from transformers import AutoImageProcessor, AutoTokenizer
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        path = model_place(path) if revision is None else path
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
        # Pillow's and torchvision's processors give different pixels; Pillow is available everywhere.
        return tokenizer, AutoImageProcessor.from_pretrained(path, backend="pil", **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"hf_processor_path={path!r}: cannot load a tokenizer and an image processor of transformers from there: "
            f"{error}"
        ) from error


def load_processor(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load a model's whole processor: tokenizer, and what encodes its media.

    Args:
        path: Folder or hub name.
        trust_remote_code: Run code that comes with it.

    Raises:
        ConfigurationError: transformers is not installed, or it cannot be loaded.
    """
    with optional_packages():
        from transformers import AutoProcessor
    try:
        return AutoProcessor.from_pretrained(model_place(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"hf_processor_path={path!r}: cannot load a processor of transformers from there: {error}"
        ) from error
