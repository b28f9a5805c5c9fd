"""The loader of torchtitan's trainer, as its configuration names it.

    def open_loader(run):
        encoder = ChatTemplateTaskEncoder.from_pretrained(FOLDER, ChatConfig(seq_length=run.max_context_length))
        config = run.worker_config(num_workers=4, microbatches_per_global_batch=16)
        return get_savable_loader(
            get_train_dataset("/data/chats", batch_size=run.rows, task_encoder=encoder, packing_buffer_size=64,
                              worker_config=config))

    config.dataloader = TitanDataLoader.Config(open_loader=open_loader)

It is for torchtitan since August 2026, whose loaders are made with `num_tokens_per_batch` and whose batches are one row
of tokens. The state is that of the whole run, one string, the same on every rank: a checkpoint may be loaded on another
number of data-parallel ranks. torchtitan fetches what it trains on and nothing ahead, so a state never counts more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchtitan.components.data.loader import BaseDataLoader

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.loader.fits import merge
from energon_bridge.core.worker_config import WorkerConfig
from energon_bridge.models.conversations.inputs import IGNORED_LABEL, loss_weights, visual_inputs
from energon_bridge.trainers.replica.groups import all_told

_MEDIA = {"image_grid_thw": "grid_thw", "video_grid_thw": "grid_thw_videos"}
_MEDIA |= {name: name for name in ("pixel_values", "pixel_values_videos")}
"""Names of media inputs of the Qwen-VL family: in transformers, and in torchtitan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanRun:
    """What torchtitan tells a loader of a run.

    Args:
        dp_rank: Data-parallel rank.
        dp_world_size: Number of data-parallel ranks.
        tokenizer: torchtitan's tokenizer.
        max_context_length: Longest sample, in tokens.
        num_tokens_per_batch: Tokens of a microbatch of one rank, padding included.
    """

    dp_rank: int
    dp_world_size: int
    tokenizer: Any
    max_context_length: int
    num_tokens_per_batch: int

    @property
    def rows(self) -> int:
        """Rows of `max_context_length` tokens in a microbatch: the `batch_size` that fills it with packs."""
        return max(1, self.num_tokens_per_batch // self.max_context_length)

    def worker_config(self, **settings: Any) -> WorkerConfig:
        """Return the `WorkerConfig` of this rank, with further settings."""
        return WorkerConfig(rank=self.dp_rank, world_size=self.dp_world_size, **settings)


class TitanDataLoader(BaseDataLoader):
    """A savable loader as torchtitan's trainer and validator take it.

    Raises:
        ConfigurationError: The loader is not one of this rank, or validation has no end.
        MaskedMicrobatchesError: The number of ranks does not divide the lanes of a training run.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What a configuration says of it.

        Args:
            open_loader: Opens the savable loader of a rank. Its batches are those of `ChatTemplateTaskEncoder` or
                `MultiModalTaskEncoder`, dicts with the `tokens` of windows (`corpus.idx?window=4096+1`), or what
                torchtitan takes, `(inputs, labels)`.
            repeat: For data that ends, whether a pass follows the other; the validator sets it.
        """

        open_loader: Callable[[TitanRun], Any]
        repeat: bool = True

    def __init__(self, config: Config, **facts: Any) -> None:
        names = TitanRun.__dataclass_fields__
        self._run = run = TitanRun(**{name: value for name, value in facts.items() if name in names})
        self._repeat = config.repeat
        loader = config.open_loader(run)
        self._data = EnergonDataloader(loader, cycle=True, on_delivery=lambda batch: trainer_batch(batch, run))
        given = loader.config.dp_rank, loader.config.dp_size
        if given != (run.dp_rank, run.dp_world_size) or (self._data.endless and not config.repeat):
            raise ConfigurationError(
                f"TitanDataLoader: called open_loader for rank {run.dp_rank} of {run.dp_world_size}, but it returned a "
                f"loader of rank {given[0]} of {given[1]}{', which never ends' if self._data.endless else ''}; pass "
                "run.worker_config(), and for validator.steps=-1 data of get_val_dataset"
            )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Return the one stream of training data; of data that ends, passes or (without `repeat`) one pass."""
        return iter(self._data) if self._repeat else self._data.one_pass()

    def state_dict(self) -> dict[str, str]:
        """Return the state of the whole run; all ranks must call it, also those of one replica."""
        return {"energon_bridge": json.dumps(merge(all_told(self._data.save_state())))}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Continue from a state of `state_dict`, saved on any number of ranks; an empty one changes nothing."""
        if state_dict:
            self._data.restore_state(json.loads(state_dict["energon_bridge"]))

    def close(self) -> None:
        """Stop the worker processes."""
        self._data.close()


def trainer_batch(batch: Any, run: TitanRun) -> tuple[dict[str, Any], Tensor]:
    """Return a batch as torchtitan trains on it: rows laid end to end, padded to `run.num_tokens_per_batch`.

    Returns:
        `input` and `positions`, int64 of shape (tokens,), where 0 begins a sample; images and videos as torchtitan's
        Qwen models take them, with `mrope_positions`, (tokens, 3), and `special_tokens`; and the labels, (tokens,),
        each the next token, or -100 where nothing is learned.

    Raises:
        ConfigurationError: The batch is of another kind, or has more tokens, longer samples or other media.
    """
    if isinstance(batch, tuple):
        return batch
    if isinstance(batch, Mapping):
        return _windows(batch, run)
    if not hasattr(batch, "loss_mask"):
        raise ConfigurationError(
            f"TitanDataLoader: torchtitan cannot train on a {type(batch).__name__}: return (inputs, labels) from "
            "encode_batch, or take ChatTemplateTaskEncoder or MultiModalTaskEncoder"
        )
    labels = torch.where(loss_weights(batch) > 0, batch.labels, IGNORED_LABEL)
    # torchtitan has rotary frequencies for positions below max_context_length only, and padding, which counts on after
    # its sample, may pass that.
    positions = batch.position_ids
    positions = torch.where(batch.attention_mask > 0, positions, positions % run.max_context_length)
    inputs, labels = _filled(batch.tokens, positions, labels, run)
    media = {name: value for name, value in visual_inputs(batch).items() if name != "second_per_grid_ts"}
    if unknown := media.keys() - _MEDIA:
        raise ConfigurationError(f"TitanDataLoader: torchtitan has no model that takes {', '.join(sorted(unknown))}")
    inputs |= {_MEDIA[name]: value for name, value in media.items()}
    if media and batch.mrope_position_ids is not None:
        axes = batch.mrope_position_ids.flatten(1)
        inputs["mrope_positions"] = pad(axes, (0, len(labels) - axes.shape[1])).T.contiguous()
    if media:
        fields = getattr(run.tokenizer, "TOKEN_FIELDS", ())
        inputs["special_tokens"] = {f"{name}_id": getattr(run.tokenizer, f"{name}_id") for name in fields}
    return inputs, labels


def _windows(batch: Mapping[str, Any], run: TitanRun) -> tuple[dict[str, Any], Tensor]:
    """Return a batch of windows (rows of n + 1 tokens of a Megatron index) as n inputs and n labels a row."""
    tokens = batch.get("tokens")
    valid = batch.get("__valid__")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise ConfigurationError(
            f"TitanDataLoader: a dict of {', '.join(map(str, batch))} has no tokens of shape (rows, n + 1): read "
            "windows (corpus.idx?window=4096+1), or return (inputs, labels) from encode_batch"
        )
    labels = tokens[:, 1:].long()
    labels = labels if valid is None else labels.masked_fill(~valid[:, None], IGNORED_LABEL)
    return _filled(tokens[:, :-1].long(), torch.arange(labels.shape[1]).expand_as(labels), labels, run)


def _filled(tokens: Tensor, positions: Tensor, labels: Tensor, run: TitanRun) -> tuple[dict[str, Any], Tensor]:
    """Lay rows end to end and pad them to the tokens of a microbatch."""
    missing = run.num_tokens_per_batch - tokens.numel()
    longest = int(positions.max()) + 1
    if missing < 0 or longest > run.max_context_length:
        raise ConfigurationError(
            f"TitanDataLoader: a batch has {tokens.shape[0]} rows of {tokens.shape[1]} tokens, with samples of up to "
            f"{longest}, but there is room for {run.num_tokens_per_batch} "
            f"(training.num_tokens_per_microbatch_per_dp_rank) and samples of {run.max_context_length} "
            "(max_context_length): set seq_length=run.max_context_length and batch_size=run.rows"
        )
    rest = torch.arange(missing) % run.max_context_length  # padding restarts, as a sample of its own
    tokens = pad(tokens.flatten(), (0, missing), value=getattr(run.tokenizer, "pad_id", None) or 0)
    inputs = {"input": tokens, "positions": torch.cat([positions.flatten(), rest])}
    return inputs, pad(labels.flatten(), (0, missing), value=IGNORED_LABEL)
