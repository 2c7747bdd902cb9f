"""What only a managed job has: its network, its keys, the container's command; and where secrets come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from smpkit.config.explain import validation_error
from smpkit.config.mappings import variable_problems
from smpkit.config.section import KeyPath, Section
from smpkit.config.texts import Word
from smpkit.errors import Problem

__all__ = ["Container", "Encryption", "Experiment", "Network", "Secret"]


def _variable(value: str) -> str:
    problems = [Problem((), problem.message, problem.hint) for problem in variable_problems(value, None)]
    if problems:
        raise validation_error("variable", problems)
    return value


class Network(Section):
    """The network of the machines. `subnets` and `security_groups` belong together."""

    subnets: list[Word] = Field(default_factory=list, max_length=16)
    """Subnets of your VPC, by id."""

    security_groups: list[Word] = Field(default_factory=list, max_length=5)
    """Security groups of your VPC, by id."""

    isolation: bool = False
    """Cut the container off from the network, S3 included: SageMaker itself brings the sources."""

    encrypt_traffic: bool = False
    """Encrypt what the hosts send each other; slower."""

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Refuse one half of a VPC."""
        if broken & {("subnets",), ("security_groups",)} or bool(self.subnets) == bool(self.security_groups):
            return
        missing, there = ("security_groups", "subnets") if self.subnets else ("subnets", "security_groups")
        yield Problem((missing,), f"is required with {there}", "a VPC needs both")


class Encryption(Section):
    """Keys of AWS KMS, by id or ARN. Default: what bucket and volume have by themselves."""

    output_key: Word | None = None
    """Encrypts the results and the sources in S3."""

    volume_key: Word | None = None
    """Encrypts the disks of the machines."""


class Container(Section):
    """What is started in the image. Default: the image's own entry point, with the argument `train`."""

    entry_point: list[str] = Field(default_factory=list, max_length=100)
    """Program and arguments to run instead of the image's entry point."""

    arguments: list[str] = Field(default_factory=list, max_length=100)
    """Arguments for the entry point, instead of `train`."""

    log_level: int = Field(default=20, ge=0)
    """Python's number for the least important messages to log: 10 debug, 20 info, 30 warning."""

    remote_debug: bool | None = None
    """Allow a shell in the running container through AWS Systems Manager."""

    registry_access: Literal["Platform", "Vpc"] | None = None
    """Where the image's registry is: `Platform` for ECR, `Vpc` for a private one that your VPC (`network`) reaches."""

    registry_credentials: str | None = Field(default=None, min_length=1, max_length=2048)
    """ARN of the Lambda function that gives SageMaker the credentials of a private registry."""

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Refuse credentials for a registry that needs none."""
        if self.registry_credentials is None or broken & {("registry_access",), ("registry_credentials",)}:
            return
        if self.registry_access != "Vpc":
            yield Problem(("registry_credentials",), "requires registry_access", "set `registry_access: Vpc`")


class Experiment(Section):
    """The place of a job in SageMaker Experiments. Default: none, or what your account does by itself."""

    name: str | None = Field(default=None, min_length=1, max_length=120)
    """The experiment."""

    trial: str | None = Field(default=None, min_length=1, max_length=120)
    """The trial in it."""

    display_name: str | None = Field(default=None, min_length=1, max_length=120)
    """What the job is called in it."""

    run: str | None = Field(default=None, min_length=1, max_length=120)
    """The run in it."""


class Secret(Section):
    """A value for a variable of the script that neither the job file nor the request holds.

    A text alone is the `entry`.
    """

    entry: Word | None = None
    """On SageMaker: the entry in AWS Secrets Manager, by name or ARN. The job's role needs
    `secretsmanager:GetSecretValue` for it; the container reads it, and SageMaker never sees its value."""

    key: str | None = Field(default=None, min_length=1, max_length=256)
    """The key to take if the entry holds a JSON object, as those made in the console do. Default: the whole text."""

    variable: Annotated[str, AfterValidator(_variable)] | None = None
    """On this machine and in Docker: the variable of your environment to take. Default: the one of the same name."""

    @classmethod
    def prepare(cls, data: object) -> object:
        """Read a text as the entry."""
        return {"entry": data} if isinstance(data, str) else data

    @classmethod
    def as_written(cls, problem: Problem, data: Any) -> Problem:
        """Tell a problem of the entry at the text itself, if it was written as one."""
        return Problem((), problem.message, problem.hint) if isinstance(data, str) else problem
