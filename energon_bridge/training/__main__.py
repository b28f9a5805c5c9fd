"""Train a vision-language model: alone, under torchrun or under SLURM.

python -m energon_bridge.training --config shapes.yaml train.max_steps=200 optimizer.lr=1e-3
torchrun --nproc-per-node=2 -m energon_bridge.training --config shapes.yaml --resume

The package brings configurations, configs/NAME.yaml: recipes for LLaVA-1.5 and Qwen2.5-VL, and their tiny twins,
configs/tiny/NAME.yaml. A file of that name in the current folder comes first. --copy-configs makes copies to edit.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence

from energon_bridge.core.errors import ConfigurationError, DatasetNotFoundError, EnergonError
from energon_bridge.core.storage import no_room
from energon_bridge.training.config_file import PACKAGE_CONFIGS, dump_config, find_config, key_hint, load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 143 after a stop by SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m energon_bridge.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file, or one that the package brings")
    what.add_argument("--copy-configs", metavar="FOLDER", help="copy the package's configurations to a new folder")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint of the run folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in the run folder")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and what it lacks, and leave")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the configuration: section.key=value")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        hint = key_hint(unknown[0].strip("-").partition("=")[0].replace("-", "_"))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. Settings have no dashes: section.key=value.{hint}")
    main_rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    logging.basicConfig(level=logging.INFO if main_rank else logging.WARNING, format="%(asctime)s %(message)s")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # lightning's use of torch, of no interest here
    places = [tempfile.gettempdir()]
    try:
        if options.copy_configs is not None:
            copy_configs(options.copy_configs)
            return 0
        try:
            config = load_config(options.config, options.overrides)
        except ConfigurationError as error:
            if options.dry_run:
                raise ConfigurationError(f"{error}{_wrong_inputs(options.config, options.overrides)}") from error
            raise
        places.insert(0, config.run_dir)
        # Only now: torch, lightning and transformers take seconds, and a typing error should not.
        from energon_bridge.training import run as training

        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)

        if options.dry_run:
            print(f"{dump_config(config)}---", flush=True)
            print(training.dry_run(config), end="")
            return 0
        if config.trainer == "megatron":
            # What is not installed, not finished, or soon to be called otherwise in torch.
            warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
            logging.getLogger("megatron").setLevel(logging.ERROR)
            from energon_bridge.training.megatron.loop import run
        else:
            run = training.run
        result = run(config, resume=options.resume, overwrite=options.overwrite)
    except EnergonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if (options.dry_run or isinstance(error, DatasetNotFoundError)) and (head := head_of(options.config)):
            print(f"\nWhat {options.config} says of itself:\n{head}", file=sys.stderr)
        return 2
    except Exception as error:
        full = no_room(error, places)
        if full is None:
            raise
        print(f"{type(full).__name__}: {full}", file=sys.stderr)
        return 2
    if result.stopped:
        return 143
    if result.main_rank and result.read is not None:
        print(f"validation {config.validation.name} read: {100 * result.read:.1f} %", flush=True)
    return 0


def _wrong_inputs(path: str, overrides: Sequence[str]) -> str:
    """Return what is wrong with the data and the model of a configuration that is wrong itself, each on its line."""
    from energon_bridge.training.run import dry_run

    try:
        config = load_config(path, overrides, inputs=True)
    except ConfigurationError:
        return ""  # it does not say which
    try:
        dry_run(config, inputs=True)
    except EnergonError as error:
        return f"\n{error}"
    return ""


def copy_configs(folder: str) -> None:
    """Copy the package's configurations into a folder that does not exist yet."""
    try:
        shutil.copytree(PACKAGE_CONFIGS, folder)
    except OSError as error:
        raise ConfigurationError(
            f"--copy-configs {folder}: {error.strerror or error}. Choose a folder that does not exist yet."
        ) from error


def head_of(path: str) -> str:
    """Return the comment at the beginning of a configuration: what it is for, and where data and model come from."""
    try:
        with find_config(path).open(encoding="utf-8") as file:
            return "".join(itertools.takewhile(lambda line: line.startswith("#"), file))
    except (OSError, UnicodeDecodeError):  # load_config has said so
        return ""


if __name__ == "__main__":
    sys.exit(main())
