"""The arguments of a model of transformers, made of a batch: one function for every trainer.

Rows of one sample each are described by an attention mask, packs by their positions. Positions that restart tell
transformers where a sample ends; its masks and variable-length kernels then keep samples apart. But this works only
without an attention mask and without a cache: with either, the model silently attends across samples. So both are left
out, and `check_packing` tests the model. Models with three position axes (the Qwen-VL families) get the plain positions
in front of the three, and use those to tell samples apart.

Padding needs no mask: it follows the tokens of its sample, attention is causal, and padding carries no loss. In packs
its positions begin again and never pass those of the longest sample, for some models choose the rotary frequencies of
all tokens by the largest position (`longrope` and `dynamic`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.samples.sample import once_per_class
from energon_bridge.models.conversations.blank_media import add_to_inputs
from energon_bridge.models.conversations.sequences import TOKEN_INPUTS, MultiModalSample, PaddingValues
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.models.packing.pack_limits import PackLimits, pack_limits
from energon_bridge.models.packing.packed_sequences import NO_PACKS_ACROSS, batch_packs, pack_sequences

IGNORED_LABEL = -100

Inputs = dict[str, Any]

_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids", "token_type_ids", *TOKEN_INPUTS)
"""Arguments with a value per token, in their last dimension; `cross_attention_mask` in its second."""


def model_inputs(
    batch: Any, model: Any = None, *, labels: bool = True, blank_media: Sequence[Mapping[str, Tensor]] = ()
) -> Inputs:
    """Return a batch as the keyword arguments of a model of transformers.

    Examples:
        >>> batch = {"__key__": ["a"], "input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}
        >>> model_inputs(batch)
        {'input_ids': tensor([[1, 2]]), 'labels': tensor([[1, 2]])}

    Of a batch of `MultiModalTaskEncoder` or `ChatTemplateTaskEncoder` (also as Megatron-Bridge's steps read it) these
    are tokens, positions of one or of three axes, images and videos, and the labels where transformers expects them
    (each token's own), with -100 where nothing is learned. Any other dict stays a dict, without entries like `__key__`.
    Labels of rows that are masked in `__valid__` become -100 throughout.

    Args:
        batch: What the loader delivers.
        model: The model, also in wrappers (DDP, FSDP, PEFT, compiled). It says which arguments it takes; before the
            first pack, and the first longer one, it is checked that it keeps samples apart (`check_packing`). None:
            nothing is known of it, and nothing checked.
        labels: Whether to return labels. Without them, the arguments have the shape of the batch's own labels.
        blank_media: For batches of your own encoder: what the processor returns for a text with one blank picture (and
            video, and sound). It is added, masked and unseen, to batches without any, so that all ranks run the whole
            model. The encoders here have an option of that name instead.

    Raises:
        ConfigurationError: The batch is neither; the model mixes the samples of packs; or it needs positions on three
            axes that the batch does not have.
    """
    if blank_media:
        return _with_blank_media(model_inputs(batch, model, labels=labels), model, blank_media)
    batch = normalise_on_device(batch)
    if isinstance(batch, Mapping):
        if not {"input_ids", "loss_mask", "visual_inputs"} <= batch.keys():
            return _of_dict(batch, labels)
        batch = _of_bridge(batch)
    elif not (hasattr(batch, "tokens") and hasattr(batch, "loss_mask")):
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} has no arguments of a model: return them as a dict from "
            "encode_batch, or pass model_inputs= to EnergonTrainer"
        )
    if model is not None and batch.cu_seqlens is not None:
        _check_once(model, batch)
    mrope = model is not None and takes_mrope(model)
    inputs = {"input_ids": batch.tokens, **sequence_inputs(batch, mrope=mrope), **visual_inputs(batch, model)}
    if model is not None and batch.cu_seqlens is None and not mrope and _by_largest_position(model):
        inputs["position_ids"] = _restarted(batch.position_ids, batch.attention_mask)
    if "position_ids" in inputs:
        inputs.pop("second_per_grid_ts", None)  # a model only makes positions of it
    _check_questions(inputs, model)
    types = batch.mm_token_type_ids
    if model is not None and types is not None and _takes(model, "token_type_ids"):
        inputs.setdefault("token_type_ids", types)  # as models of the Gemma family call them
    if model is not None and (types is None or not _takes(model, "mm_token_type_ids")):
        types = token_types(batch.tokens, model)
    if types is not None:
        inputs["mm_token_type_ids"] = types
    _check_positions(batch, inputs, model, mrope=mrope)
    return _with_labels(batch, inputs) if labels else inputs


def _with_blank_media(inputs: Inputs, model: Any, blank_media: Sequence[Mapping[str, Tensor]]) -> Inputs:
    pad_id = getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None)
    for made in blank_media:
        made = {**made, **_floats_of(model, made)}
        inputs = add_to_inputs(inputs, made, pad_id=pad_id or 0, ignore=IGNORED_LABEL)
    return inputs


def loss_weights(batch: Any) -> Tensor:
    """Return the weight of each token in the loss, float32 (B, S): the loss mask, 0 in rows that are masked."""
    mask: Tensor = batch.loss_mask
    return mask if batch.__valid__ is None else mask * batch.__valid__.to(mask)[:, None]


def sequence_inputs(batch: Any, *, mrope: bool = False) -> Inputs:
    """Return the forward arguments that tell which tokens of a batch see each other, and their positions.

    A model with three position axes (`mrope`) gets them after the plain positions, which tell where a sample begins:
    int64 of shape (4, B, S). Without such positions in the batch, the plain ones are used for all axes.
    """
    positions = batch.mrope_position_ids
    if batch.cu_seqlens is None:
        inputs = {"attention_mask": batch.attention_mask}
        return inputs if positions is None else {**inputs, "position_ids": positions}
    plain = batch.position_ids if batch.attention_mask is None else _restarted(batch.position_ids, batch.attention_mask)
    if mrope or positions is not None:
        axes = plain.expand(3, *plain.shape) if positions is None else positions
        plain = torch.cat([plain[None], axes])
    return {"position_ids": plain, "use_cache": False}


def _restarted(positions: Tensor, mask: Tensor) -> Tensor:
    """Return positions, (B, S), that restart where padding (0 in the mask) begins, and stay below the longest sample.

    transformers gets no attention mask for packs and reads samples from restarting positions, so each stretch of
    padding becomes a sample of its own.
    """
    padding = mask == 0
    first = padding & ~torch.nn.functional.pad(padding, (1, 0))[:, :-1]
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    # cummax carries the place of the last padding start to all tokens behind it: the position where theirs began.
    begin = positions.gather(1, torch.where(first, places, 0).cummax(dim=1).values)
    longest = torch.where(padding, 0, positions).max() + 1
    return torch.where(padding, (positions - begin) % longest, positions)


def visual_inputs(batch: Any, model: Any = None) -> dict[str, Tensor]:
    """Return the images, videos and sounds of a batch, pixels and features as floats of the model's type."""
    batch = normalise_on_device(batch)
    inputs = dict(batch.visual_inputs)
    if batch.pixel_values is not None:
        inputs["pixel_values"] = batch.pixel_values
    if model is not None and not _takes(model, "second_per_grid_ts"):
        inputs.pop("second_per_grid_ts", None)
    return inputs | _floats_of(model, inputs)


def _floats_of(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return pixels and features in the type of a model."""
    dtype = getattr(unwrapped(model), "dtype", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return {}
    dense = {name: values for name, values in inputs.items() if values.is_floating_point() and values.ndim > 1}
    return {name: values.to(dtype) for name, values in dense.items()}


def token_types(tokens: Tensor, model: Any) -> Tensor | None:
    """Return 1 for image tokens, 2 for video tokens, 0 for text; None for a model that does not take them."""
    if model is None or not _takes(model, "mm_token_type_ids"):
        return None
    config = unwrapped(model).config
    types = torch.zeros_like(tokens)
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        if (token := getattr(config, name, None)) is not None:
            types += kind * torch.eq(tokens, token)
    return types


def takes_mrope(model: Any) -> bool:
    """Whether a model's positions have three axes: time, height and width."""
    config: Any = getattr(unwrapped(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "mrope_section" in rope


def _by_largest_position(model: Any) -> bool:
    """Whether a model chooses the rotary frequencies of all tokens by the largest position of a batch."""
    config: Any = getattr(unwrapped(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    return any(kind in rope for kind in ("longrope", "dynamic"))


def unwrapped(model: Any) -> Any:
    """Return the model inside its wrappers: those of data parallelism (`module`), of torch.compile and of PEFT."""
    while isinstance(model, torch.nn.Module):
        wrapper: Any = model
        inner = wrapper._modules.get("module") or wrapper._modules.get("_orig_mod")
        if inner is None and hasattr(wrapper, "get_base_model"):
            inner = wrapper.get_base_model()
        if inner is None:
            break
        model = inner
    return model


@once_per_class
def _parameters(kind: type) -> frozenset[str]:
    forward = getattr(kind, "forward", None)
    return frozenset(inspect.signature(forward).parameters if forward is not None else ())


def _takes(model: Any, name: str) -> bool:
    return name in _parameters(type(unwrapped(model)))


def _of_dict(batch: Mapping[str, Any], labels: bool) -> Inputs:
    inputs = {name: value for name, value in batch.items() if not str(name).startswith("__")}
    own = inputs.get("labels")
    valid = batch.get("__valid__")
    if not labels:
        inputs.pop("labels", None)
    elif own is not None and valid is not None and not bool(valid.all()):
        inputs["labels"] = own.clone()
        inputs["labels"][~valid] = IGNORED_LABEL
    return inputs


def _of_bridge(batch: Mapping[str, Any]) -> Any:
    """Return what Megatron-Bridge's steps read with the names of a `MultiModalBatch`."""
    media = batch["visual_inputs"]
    visual = {} if media is None else {name: value for name, value in vars(media).items() if value is not None}
    mask = batch["attention_mask"]
    if mask is None and batch.get("cu_seqlens_q_padded") is not None:
        lengths = batch["cu_seqlens_q"].diff().repeat_interleave(batch["cu_seqlens_q_padded"].diff())
        mask = (batch["position_ids"] < lengths.view_as(batch["position_ids"])).long()
    return SimpleNamespace(
        **{name: batch[name] for name in ("labels", "loss_mask", "position_ids")},
        attention_mask=mask,
        **{name: batch.get(name) for name in ("mrope_position_ids", "__valid__")},
        tokens=batch["input_ids"],
        cu_seqlens=batch.get("cu_seqlens_q"),
        mm_token_type_ids=visual.pop("mm_token_type_ids", None),
        pixel_values=visual.pop("pixel_values", None),
        visual_inputs=visual,
        pixel_norm=None,
    )


def _check_positions(batch: Any, inputs: Inputs, model: Any, *, mrope: bool) -> None:
    """Raise where a model would take plain positions for images, which it has on a grid."""
    grids = sorted(name for name in inputs if name.endswith("_grid_thw"))
    if hasattr(getattr(unwrapped(model), "model", None), "get_rope_index"):  # MiniCPM-V 4.7 has it of sizes, 4.6 not
        sizes = sorted(name for name in inputs if name.startswith("target_sizes"))
        grids += sizes
        mrope = mrope or bool(sizes)
    if not grids or batch.mrope_position_ids is not None:
        return
    if batch.cu_seqlens is not None and mrope:
        raise ConfigurationError(
            f"the packs have {', '.join(grids)}, but no mrope_position_ids: the model would train on wrong positions. "
            "ChatTemplateTaskEncoder makes them (for_processor: if it has the model_config), and MultiModalTaskEncoder "
            "without image_tokens_per_image; or train unpacked (without packing_buffer_size)"
        )
    if model is None and "mm_token_type_ids" not in inputs:
        raise ConfigurationError(
            f"the batch has {', '.join(grids)}, but neither mrope_position_ids nor mm_token_type_ids, so a model with "
            "positions on three axes would take wrong ones: pass the model, model_inputs(batch, model)"
        )


def _check_questions(inputs: Inputs, model: Any) -> None:
    """Raise where a model would read questions as it reads answers, though it reads them in both directions."""
    kind = getattr(getattr(unwrapped(model), "config", None), "model_type", None)
    if kind == "paligemma" and "token_type_ids" not in inputs:
        raise ConfigurationError(
            f"the batch does not say where questions end (token_type_ids), which {type(unwrapped(model)).__name__} "
            "reads in both directions: ChatTemplateTaskEncoder.for_processor makes such batches"
        )


def _with_labels(batch: Any, inputs: Inputs) -> Inputs:
    """Add labels as transformers takes them: `labels[i]` is token i itself, and the model shifts them.

    In the batch, `labels[i]` is token i + 1, and the last token of a sequence is in the labels only. So it is appended
    to `input_ids` if it is learned; if a row has no padding for it, all rows become a token longer (in packs, that
    token is a sample of its own).
    """
    learned = torch.where(loss_weights(batch) > 0, batch.labels, IGNORED_LABEL)
    last = learned[:, -1]  # (B,): learned in rows that fill the whole length S, so that there is no padding to write to
    if bool((last != IGNORED_LABEL).any()):
        for name in _TOKEN_ARGUMENTS:
            if name in inputs:
                sides = (0, 0, 0, 0, 0, 1) if name == "cross_attention_mask" else (0, 1)
                inputs[name] = pad(inputs[name], sides, value=TOKEN_INPUTS.get(name, 0) * (name in batch.visual_inputs))
        inputs["input_ids"][:, -1] = last.max()  # a token that is learned stands for no image
    inputs["labels"] = torch.full_like(inputs["input_ids"], IGNORED_LABEL)
    inputs["labels"][:, 1:] = learned[:, : inputs["input_ids"].shape[1] - 1]  # the shift to the right by one token
    if "attention_mask" in inputs:  # some models ignore labels where it is 0, so the appended tokens need a 1
        last_tokens = (inputs["labels"] != IGNORED_LABEL) & (inputs["attention_mask"] == 0)
        inputs["input_ids"] = torch.where(last_tokens, inputs["labels"], inputs["input_ids"])
        inputs["attention_mask"] = inputs["attention_mask"] | last_tokens.to(inputs["attention_mask"])
    return inputs


# Packs ---------------------------------------------------------------------------------------------------------------

# Of a change in the first sample, 0.13 to 0.81 leaked into the others in small models (LLaVA and Idefics3 with a cache,
# Qwen2-VL as it is), and exactly nothing in LLaVA and Idefics3 as they are called here. This leaves room for noise in
# models that compute the tokens of all samples together, such as mixtures of experts.
_NOISE = 1e-2

_checked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Models that passed `check_packing`, and with how many rows: other rows are tested again."""

_limits: WeakKeyDictionary[Any, PackLimits] = WeakKeyDictionary()
"""The lengths up to which these models keep samples apart, by model without wrappers."""


def _check_once(model: Any, batch: Any) -> None:
    rows = min(2, len(batch.tokens))
    limits = _limits.get(unwrapped(model))
    seen = limits is not None and _checked.get(model, 0) >= rows
    if seen and limits == PackLimits():
        return
    samples = len(batch.cu_seqlens) - 1
    row = batch.tokens.shape[1] if samples > len(batch.tokens) else 0  # a sample that has its row alone is right
    longest = int(batch.cu_seqlens.diff().max()) if samples > 1 else 0
    if seen:
        _check_lengths(model, row, longest)
    else:
        check_packing(model, rows=rows, row_length=row, sample_length=longest)


@torch.no_grad()
def check_packing(
    model: Any, *, rows: int = 1, row_length: int | None = None, sample_length: int | None = None
) -> None:
    """Check that a model keeps the samples of a pack apart: three of three tokens, and in a small copy, long ones.

    The first sample changes: its tokens, and whether they are of an image, of a model that takes their types. (Gemma 3
    of transformers 5.23 reads the types of a later sample from the first one, in its layers with a sliding window.)
    The copy, on the CPU in a second, compares samples beyond every length that the configuration names (attention
    windows, blocks, scales) with each alone: Llama 4 scales queries by their place in the row, sparse attention may
    choose from other samples, and with `longrope` one long sample changes all others (see `pack_limits`).

    Args:
        model: A model of transformers.
        rows: Rows of the microbatch. Some kernels keep the samples of one row apart, but not those of several.
        row_length: Tokens of the longest row, padding included. None: of any length.
        sample_length: Tokens of the longest sample. None: of any length.

    Raises:
        ConfigurationError: Changing the tokens of one sample changes the model's output for the others, rows or
            samples are longer than those that do not differ from each sample alone, or the model has cross-attention
            to images.
    """
    if _takes(model, "cross_attention_mask"):
        raise ConfigurationError(f"{type(unwrapped(model)).__name__}: {NO_PACKS_ACROSS}")
    _check_apart(model, rows)
    _checked[model] = max(rows, _checked.get(model, 0))
    inner = unwrapped(model)
    if inner not in _limits:
        mrope = takes_mrope(model)
        _limits[inner] = pack_limits(inner, lambda plain: plain.expand(4, *plain.shape) if mrope else plain)
    _check_lengths(model, row_length, sample_length)


def _check_lengths(model: Any, row: int | None, sample: int | None) -> None:
    limits = _limits[unwrapped(model)]
    name = type(unwrapped(model)).__name__
    unpacked = "train unpacked (without packing_buffer_size; data.packing_buffer_size=null)"
    for kind, length, limit, by in (
        ("row", row, limits.row, limits.row_by),
        ("sample", sample, limits.sample, limits.sample_by),
    ):
        if limit is None or (length is not None and length <= limit):
            continue
        if not limit:
            raise ConfigurationError(
                f"{name} does not keep the samples of a pack apart: in a small copy of it, their values are others "
                f"than those of each alone. Its attention does not go by restarting position_ids; {unpacked}, or with "
                "a model of another family"
            )
        raise ConfigurationError(
            f"{name} does not keep the samples of a pack apart if a {kind} is longer than {limit} tokens ({by} in its "
            f"configuration): their values are others than those of each alone. Here it may have "
            f"{'any number' if length is None else length}; make {kind}s no longer (seq_length"
            f"{'' if length is not None else f', and {kind}_length= of check_packing'}), or {unpacked}"
        )


def _check_apart(model: Any, rows: int) -> None:
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    first = _logits(model, [5, 6, 7], rows, [0, 0, 0])
    second = _logits(model, [8, 9, 10], rows, [0, 1, 1])
    for part, training in modes:
        part.training = training
    torch.clear_autocast_cache()  # of weights without gradients, which the caller's next step would use
    change = (first - second).abs().amax(dim=-1).reshape(-1)
    if change[:3].max() == 0 or change[3:].max() > _NOISE * change[:3].max():
        raise ConfigurationError(
            f"{type(model).__name__} does not keep the samples of a pack apart: another first sample "
            f"changes the logits of the next ones by up to {float(change[3:].max()):.2g} (expected: 0), in {rows} "
            f"{'row' if rows == 1 else 'rows'}. Its attention ({getattr(model.config, '_attn_implementation', None)}) "
            "does not go by restarting position_ids; train "
            + ("" if rows == 1 else "with one pack in a microbatch, or ")
            + "unpacked (without packing_buffer_size; data.packing_buffer_size=null), or with a model of another family"
        )


def _logits(model: Any, tokens: list[int], rows: int, types: list[int]) -> Tensor:
    filling = PaddingValues(pad_id=0, ignore=IGNORED_LABEL)
    packs = [
        pack_sequences([_sample(first), _sample([5, 6, 7]), _sample([7, 6, 5])], filling)
        for first in (tokens, *[[5, 6, 7]] * (rows - 1))
    ]
    batch = batch_packs(packs, filling)
    device = next(model.parameters()).device
    for name in ("tokens", "position_ids", "attention_mask"):
        setattr(batch, name, getattr(batch, name).to(device))
    of_tokens = torch.zeros_like(batch.tokens)
    of_tokens[0, :3] = torch.tensor(types, device=device)
    taken = {name: of_tokens for name in ("token_type_ids", "mm_token_type_ids") if _takes(model, name)}
    logits: Tensor = model(input_ids=batch.tokens, **sequence_inputs(batch, mrope=takes_mrope(model)), **taken).logits
    return logits.float()


def _sample(tokens: list[int]) -> MultiModalSample:
    sequence = torch.tensor(tokens)
    return MultiModalSample(
        __key__="check",
        __restore_key__=(),
        tokens=sequence,
        labels=sequence,
        loss_mask=torch.ones(len(tokens)),
        visual={},
        answer="",
        num_images=0,
    )
