"""Where a job file is sent, and what each back end needs beyond what all have in common."""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from smpkit.config.fields import Word
from smpkit.config.section import Section
from smpkit.errors import Problem

__all__ = ["BackendChoice"]


class BackendChoice(Section):
    """Where `smpkit submit` sends the job. A name alone, `backend: fake`, is the `name`."""

    name: Word | None = None
    """The back end: `sagemaker`, `fake` or one of another package. Default: `sagemaker`. `--backend` goes before it."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of a back end of another package, which checks them."""

    @classmethod
    def prepare(cls, data: object) -> object:
        """Read a text as the name."""
        return {"name": data} if isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Report a problem of the name at the text itself, if the short form was written."""
        return Problem((), problem.message, problem.hint) if isinstance(data, str) else problem

    @property
    def chosen(self) -> str | None:
        """The back end that the job file chooses, if it does."""
        return self.name
