from __future__ import annotations

from smpkit.config.locate import LocatedProblem, excerpt

TEXT = "compute:\n  instance_cuont: 2\n"


def test_a_located_problem_shows_file_line_excerpt_and_hint() -> None:
    problem = LocatedProblem(
        ("compute", "instance_cuont"), "unknown field", "did you mean `instance_count`?", "job.yaml", 2, 3, TEXT
    )
    assert str(problem) == (
        "job.yaml:2: compute.instance_cuont: unknown field\n"
        "    2 |   instance_cuont: 2\n"
        "\n"
        "    hint: did you mean `instance_count`?"
    )


def test_an_exact_place_has_a_column_and_a_mark() -> None:
    problem = LocatedProblem((), "is not JSON", None, "a.json", 1, 7, '{"a": four}', exact=True)
    assert str(problem) == 'a.json:1:7: is not JSON\n    1 | {"a": four}\n      |       ^'


def test_a_source_without_lines_has_no_excerpt() -> None:
    problem = LocatedProblem(("name",), "must be text", "put it in quotes", "--set name")
    assert str(problem) == "--set name: must be text\n    hint: put it in quotes"


def test_long_lines_are_cut_around_the_column() -> None:
    shown = excerpt("a" * 500 + "!" + "b" * 500, 1, 501)
    line, mark = shown.split("\n")
    assert len(line) < 120
    assert line[mark.index("^")] == "!"


def test_control_characters_are_escaped_and_the_mark_stays_below() -> None:
    line, mark = excerpt("\x1b[31mx", 1, 6).split("\n")
    assert "\x1b" not in line
    assert line[mark.index("^")] == "x"


def test_lines_that_are_not_there_show_nothing() -> None:
    assert excerpt("a", 7) == excerpt("a\n\n", 2) == excerpt("", 1) == ""
