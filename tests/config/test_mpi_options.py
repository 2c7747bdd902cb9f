from __future__ import annotations

import pytest

from smpkit.config.mpi_options import Option, merged, parse_custom_options
from smpkit.errors import ConfigError


def words(text: str) -> list[tuple[str, ...]]:
    return [option.words for option in parse_custom_options(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("--mca btl_vader_single_copy_mechanism none ", [("--mca", "btl_vader_single_copy_mechanism", "none")]),
        ("-verbose -x A -x B=1", [("-verbose",), ("-x", "A"), ("-x", "B=1")]),
        ("--mca btl ^openib,-x", [("--mca", "btl", "^openib,-x")]),
        ("-x 'GREETING=hello world'", [("-x", "GREETING=hello world")]),
        ("--some-option value --other", [("--some-option", "value"), ("--other",)]),
        ("--NCCL_DEBUG=INFO", [("-x", "NCCL_DEBUG=INFO")]),
        ("--NCCL_DEBUG INFO -v", [("-x", "NCCL_DEBUG=INFO"), ("-v",)]),
        ("--mca btl tcp -mca btl tcp", [("--mca", "btl", "tcp")]),
        ("--bind-to core --bind-to core -v -v", [("--bind-to", "core"), ("-v",)]),
    ],
    ids=["none", "seed", "flags", "dash", "quotes", "unknown", "aws form", "with a blank", "same twice", "flag twice"],
)
def test_options_are_split_as_a_shell_would(text: str, expected: list[tuple[str, ...]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--mca btl self --mca btl tcp", "`--mca btl self` and `--mca btl tcp` contradict each other"),
        ("-x A=1 -x A=2", "`-x A=1` and `-x A=2` contradict each other"),
        ("--bind-to core --bind-to none", "contradict each other"),
        ("-np 4", "`-np 4` is set by smpkit"),
        ("-n 4", "is set by smpkit"),
        ("--host a,b", "is set by smpkit"),
        ("-H a", "is set by smpkit"),
        ("--hostfile f", "is set by smpkit"),
        ("--hostfile=f", "is set by smpkit"),
        ("-N 2", "set `processes_per_host` instead"),
        ("train.py", "`train.py` is not an option of mpirun"),
        ("--mca btl", "`--mca btl` lacks a value"),
        ("-x 'A=1", "cannot be split into words"),
    ],
)
def test_options_that_cannot_be_meant_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_custom_options(text)
    assert message in str(caught.value)
    assert caught.value.problems[0].where == "distribution.mpi.custom_mpi_options"


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="4 problems"):
        parse_custom_options("-np 4 --mca btl a --mca btl b train.py -np")


DEFAULTS = [Option(("--bind-to", "none")), Option(("--mca", "btl", "^openib")), Option(("-x", "PATH"))]


@pytest.mark.parametrize(
    ("text", "dropped"),
    [("--bind-to core", 0), ("-bind-to core", 0), ("--mca btl tcp", 1), ("-mca btl tcp", 1), ("-x PATH=/bin", 2)],
)
def test_the_users_option_replaces_ours(text: str, dropped: int) -> None:
    custom = parse_custom_options(text)
    kept = [option for index, option in enumerate(DEFAULTS) if index != dropped]
    assert merged(DEFAULTS, custom, {}) == [*kept, *custom]


def test_parameters_in_the_environment_replace_ours() -> None:
    assert merged(DEFAULTS, [], {"OMPI_MCA_btl": "tcp"}) == [DEFAULTS[0], DEFAULTS[2]]
    assert merged(DEFAULTS, [], {"PRTE_MCA_btl": "tcp"}) == [DEFAULTS[0], DEFAULTS[2]]  # of Open MPI 5
