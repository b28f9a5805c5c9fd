#!/usr/bin/env python
"""Write the pages that follow from the code (the command line, the configuration, the Python API), and llms.txt.

    python scripts/reference.py

A test compares the pages with what this gives. `scripts/docs` fills in the docstrings where the pages have `:::`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click
import yaml

import energon_bridge
from energon_bridge.tools.cli.main import main as energon
from energon_bridge.training.config import DataConfig, RunConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Written by scripts/reference.py -->"

# The pages of the API, in the order of a first program: the modules of `energon_bridge/__init__.pyi` that begin so.
API = {
    "datasets": (
        "Datasets and loaders",
        ("core.datasets", "core.worker_config", "core.loader", "core.dataloader", "trainers"),
    ),
    "mixes": ("Mixes", ("core.mix", "tools.columns.functions")),
    "samples": ("Samples and batches", ("core.samples", "models.images.devices")),
    "encoders": (
        "Task encoders",
        (
            "core.encoder",
            "models.conversations",
            "models.packing",
            "models.images",
            "trainers.replica.costs",
            "tools.verify",
        ),
    ),
    "families": ("Encoders for Hugging Face models", ("models.families",)),
    "media": ("Video, sound and metadata of media", ("models.av", "core.format.media")),
    "stores": ("Stores and caches", ("core.stores", "cloud")),
    "preparing": ("Writing datasets", ("tools.convert", "core.prepare", "tools.check", "tools.columns")),
    "errors": ("Errors and policies", ("core.stream.policy", "tools.check.quarantine", "core.errors")),
}
COMPLETION = """
## Shell completion

Add the line of your shell to `~/.bashrc` (bash from 4.4 on), `~/.zshrc` or `~/.config/fish/completions/energon.fish`:

```text
eval "$(_ENERGON_COMPLETE=bash_source energon)"
eval "$(_ENERGON_COMPLETE=zsh_source energon)"
_ENERGON_COMPLETE=fish_source energon | source
```

For `energon-bridge`, the variable is `_ENERGON_BRIDGE_COMPLETE`.""".splitlines()
INTEGRATIONS = {
    "Lightning": "trainers.lightning",
    "transformers": "trainers.huggingface",
    "Megatron-LM": "trainers.megatron_lm",
    "Megatron-Bridge": "trainers.bridge",
    "Context parallelism": "trainers.context_parallel",
    "Media of context-parallel ranks": "trainers.context_parallel_media",
    "torchtitan": "trainers.torchtitan",
    "torchft": "trainers.torchft",
    "Weights that follow the losses": "trainers.feedback",
    "Prometheus": "trainers.prometheus",
    "Reports under Lightning": "tools.report.callback",
    "Reports": "tools.report.recorder",
    "Transforms of images": "models.images.transforms",
}


SHARED = 2
"""Commands that have an option in the same words, from which on the page says it once."""
RUNS = ("plan", "which", "preview", "bench", "analyze-debug")
"""Commands that take the settings of a run."""


def cli_page() -> str:
    """Return the help of every command, options that several have once."""
    helps = {
        # click keeps the names of a command's help option from its first context on
        names: click.Context(command, info_name=" ".join(names), **energon.context_settings)
        for names, command in commands(energon, ("energon",))
    }
    records = {
        names: dict(filter(None, (option_record(context, option) for option in context.command.params)))
        for names, context in helps.items()
    }
    counts = Counter(record for options in records.values() for record in options.items())
    shared = [record for record, count in counts.items() if count >= SHARED]
    of_runs = [record for record in shared if all(record in records["energon", name].items() for name in RUNS)]
    rest = [record for record in shared if record not in of_runs]
    lines = ["# Command line", "", NOTE, "", "`energon COMMAND --help` says more of each, with examples."]
    lines += ["Where megatron-energon was installed later, the command is `energon-bridge`.", *COMPLETION]
    lines += ["", "## Options of a run", "", f"Of {', '.join(f'`energon {name}`' for name in RUNS)}:"]
    lines += ["", "```text", *map("  ".join, of_runs), "```"]
    lines += ["", "## Options of several commands", "", "```text", *map("  ".join, rest), "```"]
    for names, context in helps.items():
        if isinstance(context.command, click.Group) and len(names) > 1:
            continue  # its commands say it all
        own = ["  ".join(record) for record in records[names].items() if record not in shared]
        is_run = all(record in records[names].items() for record in of_runs)
        elsewhere = [record for record in records[names].items() if record in shared]
        also = [record[0].split()[0].rstrip(",") for record in elsewhere if not (is_run and record in of_runs)]
        also += ["the options of a run"] if is_run else []
        lines += ["", f"## {' '.join(names)}", "", "```text", *usage(context)]
        lines += ["", *own] if own else []
        lines += ["", f"and {', '.join(also)}"] if also else []
        lines += ["```"]
    return "\n".join(lines) + "\n"


def usage(context: click.Context) -> list[str]:
    """Return how a command is called and the first paragraph of what it does, or of a group its commands."""
    paragraphs = [inspect.cleandoc(context.command.help or "").replace("\b\n", "").partition("\n\n")[0]]
    if isinstance(context.command, click.Group):
        paragraphs.append("Commands: " + ", ".join(context.command.list_commands(context)))
    words = [word for word in context.command.collect_usage_pieces(context) if word != "[OPTIONS]"]
    text = textwrap.indent("\n\n".join(paragraphs), "  ")
    return [f"{context.info_name} {' '.join(words)}", "", *text.splitlines()]


def option_record(context: click.Context, parameter: click.Parameter) -> tuple[str, str] | None:
    """Return what gives an option and its words, as the command's help has them; a number is N, without bounds."""
    if not isinstance(parameter, click.Option) or (record := parameter.get_help_record(context)) is None:
        return None
    words = re.sub(
        r"; \d*\.?\d*<?=?x[<>]=[\d.]+|  \[\d*<?=?x[<>]=[\d.]+\]", "", record[1]
    )  # bounds are told when they are broken
    return re.sub(r"(INTEGER|FLOAT)( RANGE)?", "N", record[0]), words


def commands(command: click.Command, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and those below it, each with the words that call it."""
    yield names, command
    if isinstance(command, click.Group):
        context = click.Context(command, **energon.context_settings)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*names, name))


def configuration_page() -> str:
    """Return the keys of a run's configuration by section, with defaults and what they mean."""
    lines = ["# Configuration", "", NOTE, ""]
    lines += [
        "`python -m energon_bridge.training --config FILE.yaml [section.key=value ...]` reads these keys. The command",
        "line wins over the file, and the file over the defaults. `--dry-run` prints the result. An unknown key is an",
        "error that names the nearest one. The package has examples, `configs/NAME.yaml`; `--copy-configs configs`",
        "makes copies to edit. Those of real models are [recipes](../how-to/recipes.md).",
    ]
    lines += ["", "## The run", "", *section(RunConfig, "")]
    for name, config in get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(config):
            summary = " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())
            lines += ["", f"## {name}", "", summary, "", *section(config, f"{name}.")]
    return "\n".join(lines) + "\n"


def section(config: Any, prefix: str) -> list[str]:
    """Return the table of one section."""
    described = arguments_of(config)
    lines = ["|key|default|what it says|", "|---|---|---|"]
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            lines.append(f"|`{prefix}{field.name}`|`{as_yaml(field.default)}`|{described[field.name]}|")
    if config is DataConfig:
        lines += ["", "All other arguments of the [data module](api/datasets.md) that are plain values are keys, too:"]
        lines += ["`data.num_lanes=96`, `data.image_decode=torchrgb8`."]
    return lines


def as_yaml(value: object) -> str:
    """Return a default as the file would have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else f"{value:g}" if isinstance(value, float) else str(value)


def arguments_of(described: Any) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    text = (inspect.getdoc(described) or "").split("Args:\n", 1)[1].split("\n\n")[0]
    entries = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    return {name: " ".join(words.split()) for name, words in zip(entries[::2], entries[1::2], strict=True)}


def public_names() -> dict[str, list[str]]:
    """Return the public names of each page of the API: those of the modules with its longest beginning."""
    begins = {begin: page for page, (_, modules) in API.items() for begin in modules}
    tree = ast.parse(Path(energon_bridge.__file__).with_suffix(".pyi").read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            begin = max((one for one in begins if f"{node.module}.".startswith(f"{one}.")), key=len)
            found += [(list(begins).index(begin), begins[begin], alias.name) for alias in node.names]
    names: dict[str, list[str]] = {page: [] for page in API}
    for _, page, name in sorted(found):
        names[page].append(name)
    return names


def api_pages() -> dict[str, str]:
    """Return the pages of the API by name, the overview among them."""
    overview = ["# Python API", "", NOTE, ""]
    overview += ["`from energon_bridge import NAME` imports a name.", ""]
    pages, names = {}, public_names()
    for name, (title, _) in API.items():
        exported = names[name]
        told = [f"`{public}`" for public in exported if not public.endswith("Error")]
        told += ["all errors"] if len(told) < len(exported) else []
        overview += [f"## [{title}]({name}.md)", "", ", ".join(told), ""]
        lines = [f"# {title}", "", NOTE, ""]
        for public in exported:
            lines += [f"::: energon_bridge.{public}", ""]
        pages[name] = "\n".join(lines).rstrip() + "\n"
    lines = ["# Integrations", "", NOTE, ""]
    for title, module in INTEGRATIONS.items():
        lines += [
            f"## {title}",
            "",
            f"::: energon_bridge.{module}",
            "    options:",
            "      heading_level: 3",
            "",
        ]
    pages["integrations"] = "\n".join(lines).rstrip() + "\n"
    overview += ["## [Integrations](integrations.md)", ""]
    overview += [", ".join(f"`energon_bridge.{module}`" for module in INTEGRATIONS.values()), ""]
    pages["index"] = "\n".join(overview).rstrip() + "\n"
    return pages


def llms_page() -> str:
    """Return llms.txt, the pages of the menu for language models: each with its title and its first sentence."""
    menu = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    lines = [f"# {energon_bridge.__name__}", "", f"> {first_sentence(DOCS / 'index.md')}"]
    alone = [entry for entry in menu if isinstance(entry, str)]
    parts = [pair for entry in menu if isinstance(entry, dict) for pair in entry.items()]
    for title, below in [("Pages", alone), *parts]:
        lines += ["", f"## {title}", "", *map(line_of, files_of(below))]
    return "\n".join(lines) + "\n"


def line_of(page: str) -> str:
    """Return a line of llms.txt; figures and lists of names need no more than their title."""
    says = "" if re.match(r"measured/|reference/api/", page) else first_sentence(DOCS / page)
    return f"- [{heading(DOCS / page)}]({page})" + (f": {says}" if says else "")


def files_of(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the menu; the changelog lies beside the folder of the pages."""
    if isinstance(entry, str):
        yield "../CHANGELOG.md" if entry == "changelog.md" else entry
    for inner in entry.values() if isinstance(entry, dict) else () if isinstance(entry, str) else entry:
        yield from files_of(inner)


def heading(page: Path) -> str:
    """Return the title of a page."""
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


def first_sentence(page: Path) -> str:
    """Return the first sentence of a page, without links; nothing if it begins with a table or code."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    paragraph = next((block for block in text.split("\n\n")[1:] if re.match(r"[\w`*\[]", block.strip())), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":").replace("*", "")


def pages() -> dict[Path, str]:
    """Return all pages that are written here."""
    made = {DOCS / "reference/cli.md": cli_page(), DOCS / "reference/configuration.md": configuration_page()}
    made[DOCS / "llms.txt"] = llms_page()
    return made | {DOCS / "reference/api" / f"{name}.md": text for name, text in api_pages().items()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in pages().items():
        path.write_text(text)
