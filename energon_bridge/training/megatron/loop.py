"""One run of `trainer: megatron`, from its configuration to `predictions.jsonl`.

The run folder is as with the Lightning trainer (see `training.run_folder`), except for the checkpoints. The pure data-
parallel rank determines the batches of a replica, which all its ranks load, or receive from one with
`parallel.replica_loading: one_rank`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from energon_bridge.core.dataloader import EnergonDataloader
from energon_bridge.core.errors import ConfigurationError
from energon_bridge.models.conversations.blank_media import without_blanks
from energon_bridge.models.conversations.multimodal import MultiModalBatch
from energon_bridge.models.conversations.sequences import PaddingValues
from energon_bridge.models.images.devices import normalise_on_device
from energon_bridge.models.packing.packed_sequences import unpack_batch
from energon_bridge.tools.report.page import write_report
from energon_bridge.tools.report.recorder import Curve, RunRecorder, gathered, spec_of, summary
from energon_bridge.trainers.datamodule import EnergonMultiModalDataModule
from energon_bridge.trainers.feedback import MixFeedback
from energon_bridge.trainers.replica.costs import record_time
from energon_bridge.trainers.replica.groups import all_told
from energon_bridge.training.callbacks import (
    TIMES,
    append_metrics,
    append_validation,
    clock,
    lacks_validation,
    losses_since_line,
    rate,
    read_losses,
    read_metric,
    say_complete,
    say_fresh_start,
)
from energon_bridge.training.config import RunConfig
from energon_bridge.training.generation import (
    Prediction,
    exact_match,
    in_turn,
    predictions_of,
    prompt_lengths,
    visible_images,
    write_predictions,
)
from energon_bridge.training.megatron.checkpoints import complete_checkpoints, load_checkpoint, save_checkpoint
from energon_bridge.training.megatron.model import build_model
from energon_bridge.training.megatron.ranks import Ranks, connected_ranks
from energon_bridge.training.megatron.step import (
    RecordLosses,
    StepInputs,
    Training,
    learning_rate,
    microbatch_losses,
    over_replicas,
    own_tokens,
    prepare_training,
    run_schedule,
    run_stages,
    train_step,
    writing_inputs,
)
from energon_bridge.training.module import record_losses
from energon_bridge.training.presets import ModelBundle
from energon_bridge.training.run import RunResult, main_rank_first, report_title
from energon_bridge.training.run_data import build_data_module, build_feedback, withdraw
from energon_bridge.training.run_folder import discard_replaced, kept_description, prepare_run_dir
from energon_bridge.training.run_model import load_bundle

logger = logging.getLogger(__name__)

_WARM_UP = 2
"""Steps that are not timed."""


class RunProgress:
    """Record the losses of the steps; all ranks report at the same steps.

    Losses stay on the device until they are reported: until then only the last stages have them.
    """

    def __init__(self, metrics_path: Path, ranks: Ranks, data: EnergonDataloader, *, max_steps: int) -> None:
        self.metrics_path = metrics_path
        self.ranks = ranks
        self.data = data
        self.max_steps = max_steps
        self._steps: list[tuple[int, float, Tensor]] = []
        self.since_line: list[float] = []  # the losses of the next line
        self.restart_clock()

    def add(self, step: int, lr: float, sums: Tensor, *, samples: int) -> None:
        """Record what `train_step` returned for a step, and the number of this replica's samples in it."""
        self._steps.append((step, lr, sums))
        self._samples += samples
        self._timed += 1

    def restart_clock(self) -> None:
        """Exclude the time since the last report from the speed."""
        self._started = time.perf_counter()
        self._waited = self.data.wait_seconds
        self._samples = self._timed = 0

    def write(self) -> None:
        """Append the steps that are not written yet."""
        if not self._steps:
            return
        sums = over_replicas(torch.stack([sums for _, _, sums in self._steps]), self.ranks)
        losses: list[float] = (sums[:, 0] / sums[:, 1].clamp(min=1.0)).tolist()
        if self.ranks.main:
            append_metrics(self.metrics_path, [(step, lr) for step, lr, _ in self._steps], losses)
        self._steps.clear()
        self.since_line += losses

    def log(self, step: int, lr: float, norm: float) -> None:
        """Write a log line about the steps since the last one."""
        samples = torch.tensor(float(self._samples), device=self.ranks.device)
        dist.all_reduce(samples, group=self.ranks.groups.dp)
        if self.ranks.main:
            elapsed = max(1e-9, time.perf_counter() - self._started)
            logger.info(
                "step %d/%d  loss %.4f  lr %.2e  grad norm %.2f  %s samples/s  %.0f ms/step  waiting for data %.1f %%",
                step,
                self.max_steps,
                sum(self.since_line) / len(self.since_line),
                lr,
                norm,
                rate(float(samples) / elapsed),
                1000 * elapsed / max(1, self._timed),
                100 * (self.data.wait_seconds - self._waited) / elapsed,
            )
        self.since_line.clear()
        self.restart_clock()


def run(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> RunResult:
    """Train and validate; the arguments and results are those of `training.run.run`.

    Raises:
        ConfigurationError: The configuration does not fit together, or not to the number of processes.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    # Tokenizer threads do not survive the fork of the loader's workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.use_deterministic_algorithms(config.train.deterministic)
    with connected_ranks(config) as ranks:
        run_dir = Path(config.run_dir)
        with ExitStack() as stack:
            if ranks.main:
                stack.enter_context(kept_description(run_dir, resume=resume))
            main_rank_first(lambda: prepare_run_dir(config, run_dir, resume=resume, overwrite=overwrite), ranks.main)
            bundle = load_bundle(config, run_dir / "model")
            training = _build(config, bundle, ranks)
            data = stack.enter_context(closing(build_data_module(config, bundle, pg_collection=ranks.groups)))
            return _train(training, bundle, data, resume=resume)


def _build(config: RunConfig, bundle: ModelBundle, ranks: Ranks) -> Training:
    if bundle.image_tokens is None:
        raise ConfigurationError(
            f"model.preset={config.model.preset}: trainer=megatron needs a fixed number of tokens per image, and this "
            "model's depends on the image"
        )
    llava = build_model(config, ranks.groups, vocab_size=len(bundle.tokenizer), image_token_id=bundle.image_token_id)
    return prepare_training(llava, config, ranks)


def _train(training: Training, bundle: ModelBundle, data: EnergonMultiModalDataModule, *, resume: bool) -> RunResult:
    config = training.config
    ranks = training.ranks
    run_dir = Path(config.run_dir)
    loader = data.train_dataloader()
    microbatches = RerunDataIterator(loader)  # what Megatron-LM's loop reads through
    feedback = build_feedback(config, ranks.groups.dp)
    record = None if feedback is None else partial(record_losses, feedback)
    step = _resume(training, loader, run_dir / "checkpoints", feedback) if resume else 0
    withdraw(config, data)
    if ranks.main:
        say_complete(step, config.train.max_steps)
    progress = RunProgress(run_dir / "metrics.jsonl", ranks, loader, max_steps=config.train.max_steps)
    progress.since_line = losses_since_line(progress.metrics_path, step, config.train.log_interval)
    accumulate = config.accumulate(ranks.groups.dp.size())
    recorder = RunRecorder()
    recorder.start(loader)
    if ranks.main:
        discard_replaced(run_dir)
    validated: tuple[int, float, list[Prediction]] | None = None
    stop = False
    if step < config.train.max_steps and _lacks_validation(config, ranks, step):
        _validate(training, bundle, data, step)
        progress.restart_clock()
        recorder.start(loader)
    with _asked_to_stop() as asked:
        while step < config.train.max_steps and not stop:
            batches: list[MultiModalBatch] = []
            for _ in range(accumulate):
                batches.append(next(microbatches))
                recorder.microbatch(loader, batches[-1], step + 1)
            lr = learning_rate(config, step)
            timed = ranks.main and step >= _WARM_UP and step - _WARM_UP < config.train.time_microbatches // accumulate
            sums, norm = _step(training, batches, step, record, run_dir / TIMES if timed else None)
            microbatches.advance()
            step += 1
            if feedback is not None:
                feedback.step(loader)
            recorder.step_losses(batches, step, microbatch_losses(sums, ranks))
            progress.add(step, lr, sums.sum(dim=0), samples=sum(map(_real_samples, batches)))
            recorder.step(loader, step, None, lr)
            last = step == config.train.max_steps
            stop = _agree(asked.is_set(), ranks) and not last
            saves = last or stop or _is_due(step, config.checkpoint.interval)
            _write_losses(progress, step, lr, norm, logs=last or _is_due(step, config.train.log_interval), saves=saves)
            if saves:
                _save(training, step, loader, feedback)
            if not stop and _is_due(step, config.validation.interval):
                progress.write()
                validated = (step, *_validate(training, bundle, data, step))
                progress.restart_clock()
                recorder.start(loader)
    _report(config, ranks, recorder, loader, stopped=stop)
    if stop:
        logger.warning("received SIGTERM: saved step %d, exiting", step)
        return RunResult(step=step, validation_loss=None, read=None, stopped=True, main_rank=ranks.main)
    if validated is None or validated[0] != step:
        validated = (step, *_validate(training, bundle, data, step))
    return _result(training, *validated)


def _step(
    training: Training, batches: Sequence[MultiModalBatch], step: int, record: RecordLosses | None, times: Path | None
) -> tuple[Tensor, float]:
    """Run a step of the optimizer; return what `train_step` does. Its time is added to a file, if one is given."""
    started = clock() if times is not None else 0.0
    sums, norm = train_step(training, batches, step, record)
    if times is not None:
        record_time(times, batches, clock() - started)
    return sums, norm


def _is_due(step: int, interval: int) -> bool:
    """Return whether what happens every `interval` steps is due after this step; 0: never."""
    return interval > 0 and step % interval == 0


def _write_losses(progress: RunProgress, step: int, lr: float, norm: float, *, logs: bool, saves: bool) -> None:
    """Write the losses since the last time, if they are logged or saved."""
    if logs or saves:
        progress.write()
    if logs:
        progress.log(step, lr, norm)


def _save(training: Training, step: int, loader: EnergonDataloader, feedback: MixFeedback | None) -> None:
    config = training.config
    save_checkpoint(
        training,
        Path(config.run_dir) / "checkpoints",
        step,
        loader.state_dict(),
        keep=config.checkpoint.keep,
        feedback=None if feedback is None else feedback.state_dict(),
    )


def _result(training: Training, step: int, loss: float, predictions: list[Prediction]) -> RunResult:
    config = training.config
    ranks = training.ranks
    run_dir = Path(config.run_dir)
    if config.validation.generate and ranks.main:
        write_predictions(predictions, run_dir / "predictions.jsonl")
    read = exact_match(predictions) if config.validation.generate else None
    return RunResult(step=step, validation_loss=loss, read=read, stopped=False, main_rank=ranks.main)


def _report(
    config: RunConfig, ranks: Ranks, recorder: RunRecorder, loader: EnergonDataloader, *, stopped: bool
) -> None:
    """Write `report.html`, without pages of samples if the process has to end soon; every rank must call it."""
    summaries = gathered(summary(recorder, loader))
    if ranks.main:
        run_dir = Path(config.run_dir)
        recorder.set_losses(read_losses(run_dir / "metrics.jsonl"))
        recorder.rate, recorder.validation = (
            Curve.of(read_metric(run_dir / "metrics.jsonl", name)) for name in ("lr", "validation_loss")
        )
        spec = None if stopped else spec_of(loader)
        facts = {"ended by": "SIGTERM"} if stopped else {}
        title = report_title(config)
        write_report(run_dir / "report.html", summaries, recorder, title=title, facts=facts, spec=spec)


def _resume(training: Training, loader: Any, folder: Path, feedback: MixFeedback | None) -> int:
    """Continue from the latest complete checkpoint; return the optimizer steps done, 0 without a checkpoint."""
    newest: list[str | None] = [None]
    if training.ranks.main and (complete := complete_checkpoints(folder)):
        newest = [str(complete[-1])]
    dist.broadcast_object_list(newest)  # other nodes may see the folder later
    if newest[0] is None:
        if training.ranks.main:
            say_fresh_start(folder.parent)
        return 0
    logger.info("resuming from %s", newest[0])
    step, state, of_feedback = load_checkpoint(training, Path(newest[0]))
    loader.load_state_dict(state)
    if feedback is not None and of_feedback is not None:
        feedback.load_state_dict(of_feedback)
    return step


def _lacks_validation(config: RunConfig, ranks: Ranks, step: int) -> bool:
    """Return whether the validation after a step, at which the run goes on, was due and is missing."""
    path = Path(config.run_dir) / "metrics.jsonl"
    lacks = [ranks.main and lacks_validation(path, step, config.validation.interval)]
    dist.broadcast_object_list(lacks)
    return lacks[0]


def _validate(
    training: Training, bundle: ModelBundle, data: EnergonMultiModalDataModule, step: int
) -> tuple[float, list[Prediction]]:
    """Return and write the loss over the validation split; return the answers in the order of the split, too."""
    settings = training.config.validation
    ranks = training.ranks
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    written: list[list[Prediction]] = []
    training.model.eval()
    for batch in islice(data.val_dataloader().one_pass(), settings.limit_batches):
        sums += run_schedule(training, [batch], forward_only=True).sum(dim=0)
        if settings.generate:
            written.append(write_answers(training, bundle, batch))
    training.model.train()
    sums = over_replicas(sums, ranks)
    predictions = in_turn(all_told(written, ranks.groups.dp))
    loss = float(sums[0] / sums[1].clamp(min=1.0))
    if ranks.main:
        append_validation(Path(training.config.run_dir) / "metrics.jsonl", step, loss, {})
    return loss, predictions


def _real_samples(batch: MultiModalBatch) -> int:
    return len(batch.answers) if batch.__valid__ is None or bool(batch.__valid__.any()) else 0


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Handle SIGTERM inside the block: yield an event that is set when the signal arrives."""
    asked = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _agree(asked: bool, ranks: Ranks) -> bool:
    """Return whether any rank was asked to stop; ranks may receive the signal during different steps."""
    flag = torch.tensor(float(asked), device=ranks.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


# ---------------------------------------------------------------------------------------------------------------------
# Writing answers.
#
# Greedy generation by a model whose parts are on several ranks; the whole sequence is run again for each token.


@torch.no_grad()
def write_answers(training: Training, bundle: ModelBundle, batch: MultiModalBatch) -> list[Prediction]:
    """Continue the prompts of a batch with the most likely tokens; all ranks of a replica return the same.

    Invalid rows are left out.
    """
    tokenizer = bundle.tokenizer
    longest = training.config.validation.max_new_tokens
    if batch.cu_seqlens is not None:
        batch = unpack_batch(batch, PaddingValues(pad_id=tokenizer.pad_token_id, ignore=-100))
    batch = normalise_on_device(without_blanks(batch, tokenizer.pad_token_id), training.ranks.device)
    lengths = prompt_lengths(batch)
    width = int(lengths.max())
    prompts = batch.tokens[:, :width].clone()
    prompts[torch.arange(width) >= lengths[:, None]] = tokenizer.pad_token_id
    pixels = {} if batch.pixel_values is None else {"pixel_values": batch.pixel_values}
    pixels = visible_images(pixels, batch, prompts, image_token_id=bundle.image_token_id, per_image=bundle.image_tokens)
    device = training.ranks.device
    tokens = torch.nn.functional.pad(prompts, (0, longest), value=tokenizer.pad_token_id).to(device)
    lengths = lengths.to(device)
    ends = lengths.clone()
    rows = torch.arange(len(tokens), device=device)
    ended = torch.zeros_like(ends, dtype=torch.bool)
    while not ended.all() and int((ends - lengths).max()) < longest:
        inputs = writing_inputs(tokens[:, : int(ends.max())], pixels.get("pixel_values"), training.ranks)
        chosen = _most_likely(training, inputs, ends - 1, len(tokenizer))
        ended |= torch.eq(chosen, tokenizer.eos_token_id)
        tokens[rows[~ended], ends[~ended]] = chosen[~ended]
        ends += (~ended).long()
    written = [row[start:end] for row, start, end in zip(tokens.tolist(), lengths.tolist(), ends.tolist(), strict=True)]
    texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return predictions_of(batch, texts)


def _most_likely(training: Training, inputs: StepInputs, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the most likely token after one position of each row, int64 (B,), on all ranks of a replica."""
    ranks = training.ranks
    logits = run_stages(training, inputs)
    chosen = torch.zeros_like(positions)
    if logits is not None:
        # The position belongs to one of the context-parallel ranks.
        here = torch.eq(own_tokens(inputs.tokens, ranks), positions[:, None])
        of_position = (logits.float() * here.unsqueeze(-1)).sum(dim=1)
        if ranks.groups.cp.size() > 1:
            dist.all_reduce(of_position, group=ranks.groups.cp)
        whole = gather_from_tensor_model_parallel_region(of_position, group=ranks.groups.tp)
        chosen = whole[:, :vocab_size].argmax(dim=1)
    return ranks.from_last_stage(chosen)
