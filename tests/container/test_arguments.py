from __future__ import annotations

from smpkit_container.variables import compact, script_arguments


def test_hyperparameters_become_sorted_arguments() -> None:
    values = {"lr": 0.001, "epochs": 3, "flag": True, "name": "a b", "e": 1, "none": None}
    assert script_arguments(values) == [
        "-e", "1", "--epochs", "3", "--flag", "True", "--lr", "0.001", "--name", "a b", "--none", "",
    ]  # fmt: skip


def test_containers_become_json() -> None:
    assert script_arguments({"layers": [1, 2], "d": {"b": 1, "a": None}}) == [
        "-d", '{"a": null, "b": 1}', "--layers", "[1, 2]",
    ]  # fmt: skip


def test_more_arguments_come_last_and_unchanged() -> None:
    assert script_arguments({"z": 1}, ["--a", "--", "x y"]) == ["-z", "1", "--a", "--", "x y"]


def test_trap_21_mp_parameters_in_the_toolkits_form() -> None:
    values = {"mp_parameters": {"partitions": 2, "ddp": True, "microbatches": 4}, "epochs": 1}
    assert script_arguments(values) == ["--epochs", "1"]
    assert script_arguments(values, pass_mp_parameters=True) == [
        "--epochs", "1", "--mp_parameters", "ddp=True,microbatches=4,partitions=2",
    ]  # fmt: skip


def test_json_is_compact_and_sorted() -> None:
    assert compact({"b": [1, 2], "a": True}) == '{"a":true,"b":[1,2]}'
