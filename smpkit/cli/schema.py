"""`smpkit schema`: the configuration as JSON Schema, for editors and other programs."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("kind", type=click.Choice(["job", "modelparallel", "distribution"]), default="job")
def schema(kind: str) -> None:
    """Print the JSON Schema of the configuration.

    KIND is what to describe: the whole job file (default), or only a part of it.
    """
    from smpkit.config.schema import json_schema

    click.echo(json.dumps(json_schema(kind), indent=2))
