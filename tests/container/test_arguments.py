from __future__ import annotations

from smpkit_container.variables import script_arguments


def test_hyperparameters_become_sorted_arguments() -> None:
    values = {"lr": 0.001, "epochs": 3, "flag": True, "name": "a b", "e": 1, "none": None, "d": {"b": 1, "a": None}}
    assert script_arguments(values) == [
        "-d", '{"a": null, "b": 1}',
        "-e", "1", "--epochs", "3", "--flag", "True", "--lr", "0.001", "--name", "a b", "--none", "",
    ]  # fmt: skip


def test_trap_21_mp_parameters_in_the_toolkits_form() -> None:
    values = {"mp_parameters": {"partitions": 2, "ddp": True, "microbatches": 4}, "epochs": 1}
    assert script_arguments(values) == ["--epochs", "1"]
    assert script_arguments(values, pass_mp_parameters=True) == [
        "--epochs", "1", "--mp_parameters", "ddp=True,microbatches=4,partitions=2",
    ]  # fmt: skip
