"""`smpkit completion`: the script that lets a shell complete commands and options."""

from __future__ import annotations

import click

__all__ = ["completion"]

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   `smpkit completion bash >> ~/.bashrc`
    zsh    `smpkit completion zsh >> ~/.zshrc`
    fish   `smpkit completion fish > ~/.config/fish/completions/smpkit.fish`
    """  # noqa: D301  a backspace is how click is told to keep lines as they are
    from click.shell_completion import get_completion_class

    from smpkit.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "smpkit", "_SMPKIT_COMPLETE").source())
