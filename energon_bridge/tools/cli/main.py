"""The command group: finds the subcommands, and turns errors of this package into one message and exit code 1.

A subcommand's module (its name with underscores) is imported when it runs, so that `energon --help` and shell
completion answer at once.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from typing import Any

import click

from energon_bridge.core import __version__
from energon_bridge.core.errors import EnergonError, did_you_mean
from energon_bridge.core.storage import no_room

_COMMANDS = {
    "analyze-debug": "Show what is read when, as a picture.",
    "bench": "Measure how fast a dataset loads here, and what limits it.",
    "checkpoint": "Show what saved states say, and how two differ.",
    "columns": "Add numbers and texts by sample, which filters use.",
    "convert": "Make a prepared dataset of JSON with media, folders, COCO, CSV, parquet or WebDatasets.",
    "info": "Show what a prepared dataset holds.",
    "lint": "Read and decode every sample, and name those that fail.",
    "mount": "Show a prepared dataset as a folder of files, read-only.",
    "plan": "Forecast epochs per dataset of a mix, and what its weights mean.",
    "prepare": "Index a folder of WebDataset tars and write its .nv-meta.",
    "prepare-media": "Write down the sizes of images and the lengths of videos and sound.",
    "preview": "Show samples, batches as a model gets them, or what a run saw at a step.",
    "quarantine": "Show which samples failed in a run, and where.",
    "which": "Name the samples of a step, without reading data.",
}

_OF_TODAY = ("columns", "convert", "info", "lint", "prepare", "prepare-media")
"""Commands that look at what a store holds now, whatever the node's cache has seen of it in the last minute."""
_WORDS = "energon words"
"""In the context, the arguments: among them are the folders that a full disk is looked for in."""
_ANSWERS = {
    "prepare": "--split-ratio 8,1,1, then --sample-type CaptioningSample --field-map "
    '\'{"image": "jpg", "caption": "txt"}\', or --sample-type CrudeWebdataset, or --skip-dataset-yaml; and '
    "--force-overwrite if PATH is prepared already.",
    "convert": "--no-ask takes the proposals; --sample-type, --field and --split-ratio change them.",
}


class SuggestingGroup(click.Group):
    """A group that answers an unknown subcommand with the nearest one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            commands = self.list_commands(ctx)
            hint = did_you_mean(name, commands) or f" Known commands: {', '.join(commands)}."
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


class _LazyGroup(SuggestingGroup):
    """A group whose subcommands live in modules of their own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"energon_bridge.tools.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        ctx.meta[_WORDS] = list(args)
        if args[0] in _OF_TODAY:
            from energon_bridge.cloud.node_cache import BELIEVED_SINCE

            os.environ[BELIEVED_SINCE] = str(time.time())
            ctx.call_on_close(partial(os.environ.pop, BELIEVED_SINCE, None))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        if sys.stdin is None:  # closed, as some schedulers do: a question gets no answer, rather than a traceback
            return self._invoke_alone(ctx)
        try:
            return super().invoke(ctx)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            name = str(ctx.invoked_subcommand)
            raise click.ClickException(
                f"`energon {name}` asks a question, but there is no terminal to answer it. Answer with options: "
                f"{_ANSWERS.get(name, 'see --help')}"
            ) from None
        except EnergonError as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(str(error)) from error
        except Exception as error:
            words = [word for word in reversed(ctx.meta.get(_WORDS, ())) if os.sep in word or os.path.exists(word)]
            places = [*words, tempfile.gettempdir(), os.getcwd()]  # of those on one disk, the first is named
            full = no_room(error, places)
            if full is None or ctx.params.get("debug"):
                raise
            raise click.ClickException(str(full)) from error

    def _invoke_alone(self, ctx: click.Context) -> object:
        with open(os.devnull) as nothing:
            sys.stdin = nothing
            try:
                return self.invoke(ctx)
            finally:
                sys.stdin = None


def _say_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from energon_bridge.core.order.leaf_order import ORDER_VERSION

    click.echo(f"energon (energon_bridge), version {__version__}, order version {ORDER_VERSION}")
    context.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version, help="Show the version."
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Prepare, inspect and check datasets for energon_bridge and Megatron Energon.

    \b
    energon convert photos data/photos --split-ratio 9,1,0
    energon preview data/photos
    energon COMMAND --help                              shows examples of a command
    """
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s: %(message)s")


if __name__ == "__main__":
    main()
