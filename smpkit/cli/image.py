"""`smpkit image`: build the training image on any base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_BASE = "python:3.12-slim-bookworm"
"""`smpkit_estimator.image.DEFAULT_BASE_IMAGE`, which `--help` must not import."""


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what the image is made of: the fields of `smpkit_estimator.image.Recipe`."""
    file, folder = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)
    network = "Docker's network for the build, such as `host`."
    options = (
        click.option("--base-image", default=_BASE, show_default=True, help="Any image with apt or dnf."),
        click.option("--torch", default="torch>=2.11", show_default=True, help="What pip is asked to install."),
        click.option("--wheels", type=folder, help="A folder of wheels that are preferred over the index."),
        click.option(
            "--ca", "authority", type=file, help="Certificates (PEM) that the build must trust, behind a proxy."
        ),
        click.option("--build-network", "network", metavar="NETWORK", help=network),
    )
    for option in reversed(options):  # the first one stands first in the help
        command = option(command)
    return command


@click.command()
@click.option("--tag", metavar="NAME", help="Name of the image. Default: `smpkit:` and a hash of what it is made of.")
@recipe_options
def image(tag: str | None, **options: Any) -> None:
    """Build the training image on any base.

    The name of the image is printed. Push it to your registry and name it in the job file to run it as a managed job.
    """
    from smpkit_estimator.docker import check
    from smpkit_estimator.image import Recipe, build_image

    check()
    click.echo(build_image(Recipe(**options), tag))
