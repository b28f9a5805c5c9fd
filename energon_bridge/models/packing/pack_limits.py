"""How long packs of a model may be: a small copy of it, made of its configuration, on packs and on each sample alone.

Some models keep the samples of short packs apart and go wrong in longer ones: a scale of queries that goes by the place
in the row, attention to blocks of the row, rotary positions whose factors go by the largest position of all. Each such
rule has a length in the configuration, of thousands of tokens mostly. So the text model is built again with few layers
(one of each kind), narrow ones, and one of these lengths after another set to a few tokens. Then packs of 32 tokens are
beyond it, on a CPU in a fraction of a second, and whatever differs from a sample alone is due to that length.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_LENGTHS = re.compile(
    r"window|chunk|block|floor|(?<!attn_)(?<!logit_)scale$|original_max|max_position|n_positions|max_seq|context_l|"
    r"index_topk|index_top_k|local|extent|bucket|distance|segment|compress|span|stride|period|num_hashes"
)
"""Names of lengths in configurations: attention windows, chunks, blocks, scaled positions, numbers of chosen tokens."""
_MEDIA = re.compile(r"(vision|visual|image|audio|speech|video)\w*_config$")
"""Parts of a configuration whose lengths are not those of text."""
_MOST = ("max_position_embeddings", "n_positions", "max_seq_len")
_NO_LENGTHS = re.compile(
    r"chunk_size_feed_forward|experts|layer|groups?$|type|vocab|size_per|init|num_.*blocks?$|bias_scale"
)
_BY_LARGEST = re.compile("dynamic|longrope")
"""Rotary embeddings that choose the frequencies of all tokens by the largest position."""
_SHORT = 16
"""Value given to a length of a copy, so that short samples exceed it; lengths up to 2 * _SHORT stay as they are."""
_ROWS = (11, 9, 12)
"""Tokens of samples each shorter than _SHORT, in a row longer than it: limits of the whole row show."""
_SAMPLES = (23, 9)
"""Tokens of a sample longer than _SHORT, and a shorter one behind it: limits of the longest sample show."""
_LONG = (150, 260, 90)
"""Tokens of the samples that are tried with all lengths short (for rules of several lengths), and with none short
(for lengths that are in a model's code only)."""
_ON_CPU = ("sdpa", "eager")
_SMALL_MODEL = 5_000_000
"""Parameters up to which a copy has the model's own sizes."""
_LARGEST_COPY = 150_000_000
_SAME = 1e-4
"""Largest difference, relative to the largest value, that counts as equal. Rounding makes 1e-6, the weakest real effect
(the scale of queries in Llama 4) 1e-2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLimits:
    """The lengths, in tokens, up to which a sample in a pack gives the same outputs as alone; None: any length.

    Attributes:
        row: Tokens of a row.
        sample: Tokens of the longest sample of a microbatch.
        row_by: The entry of the model's configuration that sets `row`, as `name=value`.
        sample_by: The entry that sets `sample`.
    """

    row: int | None = None
    sample: int | None = None
    row_by: str = ""
    sample_by: str = ""


def pack_limits(model: Any, positions: Callable[[Tensor], Tensor]) -> PackLimits:
    """Return the lengths up to which a model gives the samples of a pack the outputs that each has alone.

    Args:
        model: A model of transformers, without wrappers.
        positions: Makes the model's `position_ids` of plain ones, (B, S).
    """
    text = _text_model(model)
    if text is None:
        return PackLimits()
    with torch.device("cpu"):
        return _limits_of(text, type(model).__name__, positions)


def _limits_of(text: Any, name: str, positions: Callable[[Tensor], Tensor]) -> PackLimits:
    settings = text.config.to_dict()
    make = _copies(text)
    if make is None:
        return _named(name, settings)
    if _differs(make, (), _ROWS, positions):
        kernels = getattr(text.config, "_attn_implementation", None) not in _ON_CPU  # which the copy does not have
        return _named(name, settings) if kernels else PackLimits(row=0)
    lengths = _lengths(settings)
    rows = {key: value for key, value in lengths.items() if _differs(make, [key], _ROWS, positions)}
    rest = {key: value for key, value in lengths.items() if key not in rows}
    samples = {key: value for key, value in rest.items() if _differs(make, [key], _SAMPLES, positions)}
    if not rows and not samples:
        if _differs(make, list(lengths), _LONG, positions):
            rows = lengths
        if not rows and _differs(make, (), _LONG, positions):
            return PackLimits(row=0)
    return _limits(rows, samples)


def _limits(rows: Mapping[str, int], samples: Mapping[str, int]) -> PackLimits:
    values: dict[str, Any] = {}
    for kind, lengths in (("row", rows), ("sample", samples)):
        if lengths:
            name = min(lengths, key=lambda one: lengths[one])
            values |= {kind: lengths[name], f"{kind}_by": f"{name}={lengths[name]}"}
    return PackLimits(**values)


def _named(name: str, config: Mapping[str, Any]) -> PackLimits:
    """Return the limits of a model that cannot be tried: the shortest length in its configuration that may matter.

    Sliding attention windows and scaled positions do not: they go by a token's own positions, which restart with each
    sample. `dynamic` and `longrope` (`_BY_LARGEST`) go by the largest position of the row, so these do.
    """
    plain = ("sliding_window", "max_position", *(() if _BY_LARGEST.search(str(config)) else ("original_max",)))
    kept = {key: value for key, value in _lengths(config).items() if not key.startswith(plain)}
    logger.warning("no small copy of %s can be made to try long packs on: packs go up to the lengths it names", name)
    return _limits(kept, {})


# What a configuration says -------------------------------------------------------------------------------------------


def _lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths that a configuration names, at any depth, beyond those that every comparison passes."""
    found = {name: value for name, value in _integers(config) if value > 2 * _SHORT and _is_length(name)}
    if not _BY_LARGEST.search(str(config)):  # other positions end there, without a word before
        found = {name: value for name, value in found.items() if name not in _MOST}
    return found


def _is_length(name: str) -> bool:
    return bool(_LENGTHS.search(name)) and not _NO_LENGTHS.search(name)


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if _MEDIA.search(str(key)):
                continue
            # a table by kind of layer ({"sparse": 128}) has the name of the whole
            yield from _integers(entry, name if _is_length(name) else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _integers(entry, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value


def _shortened(value: Any, names: Sequence[str], name: str = "") -> Any:
    """Return a value of a configuration in which the lengths called `names` are short."""
    if isinstance(value, Mapping):
        inner = name if _is_length(name) else None
        return {key: _shortened(entry, names, inner or str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_shortened(entry, names, name) for entry in value)
    is_long = isinstance(value, int) and not isinstance(value, bool) and value > 2 * _SHORT
    return _SHORT if is_long and name in names else value


# A small copy --------------------------------------------------------------------------------------------------------


def _text_model(model: Any) -> Any:
    """Return the part of a model that text runs through, without its head; None of a model that has no such part."""
    try:
        decoder = model.get_decoder()
    except Exception:  # it is no model of transformers, or one without a decoder
        return None
    return decoder if hasattr(getattr(decoder, "config", None), "to_dict") else None


def _copies(text: Any) -> Callable[..., Any] | None:
    """Return what makes a copy with some lengths shortened, on the CPU; None if no copy runs."""
    small = sum(one.numel() for one in text.parameters()) <= _SMALL_MODEL
    for heads in (None,) if small else (4, 8, 16, 0):
        try:
            settings = text.config.to_dict() if heads is None else _narrow(text.config, heads)
            make = partial(_made, type(text), text.config, settings)
            with torch.device("meta"):
                size = sum(one.numel() for one in make((), seed=None).parameters())
            if size > _LARGEST_COPY:
                continue
            _values(make(()), _ROWS[:1], None)
        except Exception as error:  # configurations are of anyone's making
            logger.debug("no copy of %s with %s heads: %r", type(text).__name__, heads, error)
            continue
        return make
    return None


def _made(kind: type, config: Any, settings: Mapping[str, Any], names: Sequence[str], seed: int | None = 0) -> Any:
    own = type(config).from_dict(_shortened(settings, names))
    attention = config._attn_implementation
    own._attn_implementation = attention if attention in _ON_CPU else "sdpa"
    if seed is None:
        return kind(own)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone: the others' states stay as they are
        model = kind(own).float().eval()
        for parameter in model.parameters():  # so that attention is far from even
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


_WIDE = re.compile(r"intermediate|ffn|mlp_dim|^dff$|dim_ff|d_ff|n_inner|feed_forward_size")
_CHOSEN = re.compile(r"experts_per_tok|moe_topk|moe_k$|top_k_experts")
_EXPERTS = re.compile(r"experts$|expert_num$")
_GROUPS = ("n_group", "topk_group", "num_expert_group")
_HEADS = re.compile(r"^(swa_)?num_(attention|key_value|kv)_heads$|^n_heads?$|^attention_heads$")


def _narrow(config: Any, heads: int) -> dict[str, Any]:
    """Return the configuration of a narrow model with a layer of each kind and `heads` heads (0: the same width)."""
    settings = config.to_dict()
    names = {name: config.attribute_map.get(name, name) for name in ("num_hidden_layers", "hidden_size")}
    layers = settings[names["num_hidden_layers"]]
    wide = settings.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    share = heads / wide if heads and wide else 1.0
    own = settings.get("per_layer_config") or {}
    kept = _layers_of_each_kind(settings, layers, own)
    made = _narrowed(settings, kept, layers, share)
    if own:
        made["per_layer_config"] = {
            place: _narrowed(own[number], [], 0, share) for place, number in enumerate(kept) if number in own
        }
    made[names["num_hidden_layers"]] = len(kept)
    made[names["hidden_size"]] = int(settings[names["hidden_size"]] * share)
    return made | {"dtype": "float32"}


def _narrowed(settings: Mapping[str, Any], kept: Sequence[int], layers: int, share: float) -> dict[str, Any]:
    made = dict(settings)
    for name, value in settings.items():
        if isinstance(value, list | tuple) and value and len(value) == layers:
            value = [value[number] for number in kept]
        if name.endswith("token_id") and value is not None:
            value = 0
        elif isinstance(value, int) and not isinstance(value, bool):
            value = max(1, int(value * share)) if _HEADS.search(name) else _smaller(name, value, len(kept))
        elif isinstance(value, list) and _WIDE.search(name):
            value = [min(one, 64) if isinstance(one, int) else one for one in value]
        made[name] = value
    return made


def _smaller(name: str, value: int, layers: int) -> int:
    if "vocab_size" in name:
        return min(value, 128)
    if name in _GROUPS:
        return min(value, 1)
    most = {"num_kv_shared_layers": 0, "first_k_dense_replace": 1, "max_window_layers": layers}.get(name)
    for pattern, limit in ((_WIDE, 64), (_CHOSEN, 2), (_EXPERTS, 8)):
        if most is None and pattern.search(name):
            most = limit
    return value if most is None else min(value, most)


def _layers_of_each_kind(settings: Mapping[str, Any], layers: int, own: Mapping[int, Any]) -> list[int]:
    """Return the numbers of layers that have one of each kind among them, at least two, by the entries per layer."""
    lists = [value for value in settings.values() if isinstance(value, list | tuple) and len(value) == layers]
    lists = [value for value in lists if len(set(map(str, value))) <= 4]
    kinds = [str([[value[number] for value in lists], own.get(number)]) for number in range(layers)]
    first = sorted({kinds.index(kind) for kind in kinds})
    return first if len(first) > 1 else list(range(min(2, layers)))


# Packs beside samples ------------------------------------------------------------------------------------------------


def _differs(
    make: Callable[..., Any], names: Sequence[str], sizes: Sequence[int], positions: Callable[[Tensor], Tensor]
) -> bool:
    """Return whether samples of a pack have other values than alone, in a copy where these lengths are short."""
    try:
        # twice: where two experts or two blocks are as good as each other, rounding chooses
        return all(_difference(make(names, seed), sizes, positions) > _SAME for seed in range(2))
    except Exception as error:  # what a model does not run at all, it says by itself
        logger.debug("packs of %s with %s short: %r", sizes, names, error)
        return False


def _difference(model: Any, sizes: Sequence[int], positions: Callable[[Tensor], Tensor]) -> float:
    packed = _values(model, sizes, positions)
    alone = torch.cat([_values(model, [size], None, first) for size, first in zip(sizes, _starts(sizes), strict=True)])
    if not bool(alone.isfinite().all()):
        raise FloatingPointError("values are not finite")
    worst = float((packed - alone).abs().max() / alone.abs().max())
    return math.inf if math.isnan(worst) else worst


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


@torch.no_grad()
def _values(model: Any, sizes: Sequence[int], positions: Callable[[Tensor], Tensor] | None, first: int = 0) -> Tensor:
    """Return the output for a row of samples, (S, values); without `positions`, as for a sample alone."""
    most = getattr(model.config, "max_position_embeddings", None) or max(sizes)
    sizes = [min(size, most) for size in sizes]
    count = sum(sizes)
    tokens = (torch.arange(first, first + count) * 37 + 11) % 89 + 5
    inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
    if positions is not None:
        inputs["position_ids"] = positions(torch.cat([torch.arange(size) for size in sizes])[None])
    with torch.autocast("cpu", enabled=False):
        output = model(**inputs)
    return output[0][0].float()
