"""`smpkit schema`: the configuration as JSON Schema, for editors and other programs."""

from __future__ import annotations

import click

from smpkit.cli import _console


@click.command()
@click.argument("kind", type=click.Choice(["job", "modelparallel", "distribution"]), default="job")
def schema(kind: str) -> None:
    """Print the JSON Schema of the configuration.

    KIND is what to describe: the whole job file (default), or only a part of it.
    """
    from smpkit.config.schema import json_schema

    _console.print_json(json_schema(kind))
