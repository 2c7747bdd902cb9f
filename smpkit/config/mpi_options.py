"""Read `custom_mpi_options` and lay them over our own mpirun options, so that the user's choice always wins.

SMP v1's launcher handed both to mpirun, which refuses a parameter that is "listed multiple times"; the documented
configuration with `--mca btl_vader_single_copy_mechanism none` failed on exactly that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smpkit.errors import ConfigError, Problem

_PATH = ("distribution", "mpi", "custom_mpi_options")

_TWO_VALUES = frozenset({"mca", "gmca", "omca", "gomca", "prtemca", "gprtemca", "pmixmca", "gpmixmca"})
"""`--mca NAME VALUE` and its variants per part of Open MPI 5; one parameter each."""

_HOSTS = ("host", "H", "hostfile", "machinefile", "default-hostfile", "add-host", "add-hostfile")
_OURS: Mapping[str, str] = {
    **dict.fromkeys(("np", "n", "c", "N", "npernode", "pernode"), "set `processes_per_host` instead"),
    **dict.fromkeys(_HOSTS, "hosts come from the platform"),
    "app": "every rank runs the job's script",
}


@dataclass(frozen=True)
class Option:
    """One option of mpirun with its values; `words` is how it is written on the command line."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.words[0].lstrip("-")

    @property
    def key(self) -> tuple[str, ...]:
        """What may be given only once: an MCA parameter, an exported variable, or the option itself."""
        if self.name in _TWO_VALUES:
            return ("mca", *self.words[1:2])
        if self.name == "x":
            return ("x", *(word.partition("=")[0] for word in self.words[1:2]))
        return (self.name,)

    def __str__(self) -> str:
        return shlex.join(self.words)


def parse_custom_options(text: str) -> list[Option]:
    """Split a user's options as a shell would and return each one once.

    Raises:
        ConfigError: a quote is not closed; an option is given twice with different values; or one is not the user's to
            give (`-np`, `--host`, ...); lists all such problems.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError([Problem(_PATH, f"cannot be split into words: {error}", "close the quotation")]) from None
    problems: list[Problem] = []
    options: dict[tuple[str, ...], Option] = {}
    for option in _grouped(words):
        problem = _problem(option, options.get(option.key))
        if problem:
            problems.append(problem)
        options.setdefault(option.key, option)
    if problems:
        raise ConfigError(problems)
    return list(options.values())


def merged(defaults: Iterable[Option], custom: Sequence[Option], environ: Mapping[str, str]) -> list[Option]:
    """Return our defaults without those that the user set, on the command line or as OMPI_MCA_*, then the user's."""
    taken = {option.key for option in custom}
    taken |= {("mca", name.partition("_MCA_")[2]) for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))}
    return [*(option for option in defaults if option.key not in taken), *custom]


def exported_values(text: str) -> dict[str, str]:
    """Return the variables to which a user's options give a value, for all ranks: `-x OMP_NUM_THREADS=4`."""
    exported = [word for option in parse_custom_options(text) if option.name == "x" for word in option.words[1:2]]
    return dict(word.split("=", 1) for word in exported if "=" in word)


def _grouped(words: Sequence[str]) -> Iterator[Option]:
    """Yield each option with its values; values of an option unknown to us are the words up to the next dash."""
    position = 0
    while position < len(words):
        start = position
        position += 1
        name = words[start].lstrip("-")
        if name in _TWO_VALUES:  # which may look like options
            position = min(len(words), position + 2)
        else:
            while words[start].startswith("-") and position < len(words) and not words[position].startswith("-"):
                position += 1
        option = tuple(words[start:position])
        if name.partition("=")[0] == "NCCL_DEBUG":  # an exported variable, as AWS's toolkit has it
            option = ("-x", "=".join([name, *option[1:]]))
        yield Option(option)


def _problem(option: Option, earlier: Option | None) -> Problem | None:
    name = option.name.partition("=")[0]
    if not option.words[0].startswith("-") or not name:
        message = f"`{option.words[0]}` is not an option of mpirun"
        return Problem(_PATH, message, "the program to run is added by smpkit")
    if name in _OURS:
        return Problem(_PATH, f"`{option}` is set by smpkit", _OURS[name])
    if name in _TWO_VALUES and len(option.words) < 3:
        return Problem(_PATH, f"`{option}` lacks a value")
    if earlier is not None and earlier.words[1:] != option.words[1:]:
        return Problem(_PATH, f"`{earlier}` and `{option}` contradict each other", "keep one of them")
    return None
