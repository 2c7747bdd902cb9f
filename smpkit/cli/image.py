"""`smpkit image`: build the training image on any base."""

from __future__ import annotations

from typing import Any

import click

from smpkit.cli.options import recipe_options


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
