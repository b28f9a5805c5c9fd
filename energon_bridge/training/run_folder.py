"""The folder of a run: who may write into it, and how it is left as it was by a run that does not begin.

It holds everything that belongs to the run::

    config.yaml          the resolved configuration
    model/               a preset's model configuration, image processor and tokenizer
    checkpoints/         see `callbacks`
    metrics.jsonl        see `callbacks`
    microbatches.jsonl   times of some microbatches, if asked for
    report.html          losses, waiting, datasets, what was left out, slowest microbatches; see `tools/report/`
    predictions.jsonl    see `generation`
    export/              the trained model in the layout of transformers, if asked for
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.training.callbacks import TIMES
from energon_bridge.training.config import SIZES, RunConfig, learning_rate_factor
from energon_bridge.training.config_file import load_config, write_config
from energon_bridge.training.run_model import write_model_of_run

logger = logging.getLogger(__name__)

_OF_A_RUN = (
    "checkpoints",
    "metrics.jsonl",
    TIMES,
    "predictions.jsonl",
    "report.html",
    "model",
    "config.yaml",
    "export",
)
"""Names of the files and folders that a run writes into its folder."""


@contextmanager
def kept_description(run_dir: Path, *, resume: bool) -> Iterator[None]:
    """Leave the run folder as it was if a run fails before it has left a step in it.

    `config.yaml` still says how the run was made that a resume was to continue, a run that was to be replaced is there
    again, and one that never began can be started again without `--overwrite`.
    """
    described = run_dir / "config.yaml"
    metrics = run_dir / "metrics.jsonl"
    there = {name for name in _OF_A_RUN if (run_dir / name).exists()}
    before = described.read_bytes() if resume and described.exists() else None
    written = metrics.stat().st_mtime_ns if metrics.exists() else 0
    try:
        yield
    except BaseException:
        restore_replaced(run_dir)
        if (metrics.stat().st_mtime_ns if metrics.exists() else 0) != written:
            raise
        if before is not None:
            described.write_bytes(before)
        made = {name for name in _OF_A_RUN if (run_dir / name).exists()} - there
        if made and made <= {"config.yaml", "model"}:
            for name in made:
                _remove(run_dir / name)
            with suppress(OSError):  # something else is in it
                run_dir.rmdir()
        raise


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


_MOVING, _REPLACED = ".moving", ".replaced"
"""Where the parts of a run lie that is to be replaced: while they are moved there, and until the new one begins."""


def restore_replaced(run_dir: Path) -> None:
    """Put a run back that was to be replaced, if there is one: the new one has not begun."""
    for aside in (run_dir / _MOVING, run_dir / _REPLACED):
        if not aside.exists():
            continue
        for name in _OF_A_RUN if aside.name == _REPLACED else ():
            if (run_dir / name).exists():
                _remove(run_dir / name)
        for part in aside.iterdir():
            part.rename(run_dir / part.name)
        aside.rmdir()


def discard_replaced(run_dir: Path) -> None:
    """Remove a run that is replaced by one that begins now."""
    if (run_dir / _REPLACED).exists():
        _remove(run_dir / _REPLACED)


def prepare_run_dir(config: RunConfig, run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the run folder, and write configuration and preset to it.

    Raises:
        ConfigurationError: It holds a run, and neither `resume` nor `overwrite` is set.
    """
    restore_replaced(run_dir)  # that was to be replaced by a run which was killed as it began
    present = [name for name in _OF_A_RUN if (run_dir / name).exists()]
    if overwrite and present and not resume:
        aside = run_dir / _MOVING
        aside.mkdir()
        for name in present:
            (run_dir / name).rename(aside / name)
        aside.rename(run_dir / _REPLACED)
    elif present and not resume:
        raise ConfigurationError(
            f"the run folder {run_dir} already contains a run ({', '.join(present)}): continue it (--resume), replace "
            "it (--overwrite), or choose another folder (run_dir=…)"
        )
    described = run_dir / "config.yaml"
    before = load_config(described) if resume and described.exists() else config
    _check_same_model(before, config, run_dir)
    if before.data.global_batch_size != config.data.global_batch_size:
        logger.warning(
            "data.global_batch_size was %d, and is %d from here on: samples keep their order, but `energon preview` "
            "and `which` cannot tell from the number of a step which samples it has",
            *(before.data.global_batch_size, config.data.global_batch_size),
        )
    for name in _OF_SAMPLES:
        if (was := getattr(before.data, name)) != (now := getattr(config.data, name)):
            logger.warning(
                "data.%s was %r, and is %r from here on: the samples are not those of before", name, was, now
            )
    _say_other_schedule(before, config, run_dir)
    write_config(config, described)
    write_model_of_run(config, run_dir / "model")


_OF_SAMPLES = (
    *("seq_length", "chat_template", "system", "min_pixels", "max_pixels", "max_num_images", "max_num_frames"),
    *("max_video_tokens", "video_sound", "max_sound_seconds"),
)
"""Settings of `data` that change what the model gets of a sample."""


def _say_other_schedule(before: RunConfig, now: RunConfig, run_dir: Path) -> None:
    """Warn if the learning rate goes on by another schedule than the one a run was begun with, which may be a jump."""
    steps = [int(path.name.split("-")[1].split(".")[0]) for path in (run_dir / "checkpoints").glob("step-*")]
    if not steps:
        return
    step = max(steps)

    def told(config: RunConfig) -> str:
        settings = config.optimizer
        last = config.train.max_steps
        rate = settings.lr * learning_rate_factor(settings, step, last)
        return (
            f"{rate:.3g} (lr={settings.lr:g}, warmup_steps={settings.warmup_steps}, then a cosine to "
            f"min_lr={settings.min_lr:g} at step {last})"
        )

    if told(before) != told(now):
        logger.warning(
            "the learning rate of step %d was to be %s, and is %s from here on: to go on without a jump, keep the "
            "settings of the optimizer and train.max_steps of %s",
            *(step, told(before), told(now), run_dir / "config.yaml"),
        )


def _check_same_model(before: RunConfig, now: RunConfig, run_dir: Path) -> None:
    """Raise ConfigurationError for settings with which the model or the checkpoints of a run cannot go on."""
    names = ["trainer", "model.freeze"] if any((run_dir / "checkpoints").glob("step-*")) else []
    if before.model.name_or_path is now.model.name_or_path is None:
        names += [f"model.{name}" for name in SIZES]
    values = {name: (attrgetter(name)(now), attrgetter(name)(before)) for name in names}
    if changed := [f"{name}={new} (there: {old})" for name, (new, old) in values.items() if new != old]:
        raise ConfigurationError(
            f"the run in {run_dir} cannot go on with {', '.join(changed)}: set what its config.yaml has, or begin "
            "another run (run_dir=…)"
        )
