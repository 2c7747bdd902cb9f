"""What is probably a secret is hidden in all that is shown, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.config.confidential import HIDDEN, hide_in_line, hide_in_text, looks_secret, masked
from smpkit.config.job import JobConfig
from smpkit.config.load import load_job
from smpkit.config.section import validated
from smpkit.config.words import coloured, quoted
from smpkit.errors import ConfigError

HF = "hf_" + "a1B2" * 9
AWS = "AKIA" + "ABCDEFGH12345678"
SECRET_NAMES = """
HF_TOKEN WANDB_API_KEY password db.passwd AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID githubToken client-secret OPENAI_KEY
apikey Authorization DB_PASS storage_connection_string PGPASSWORD NGROK_AUTHTOKEN MYTOKEN clientsecret hf_token_v2
AZURE_STORAGE_KEY DD_APP_KEY TOKEN1 MY_TOKEN_2 SSH_KEY
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "abc123") for name in SECRET_NAMES.split()),
        *(("note", value) for value in (HF, AWS, f"key={AWS}", "https://me:pw@host/x", "ghp_" + "a" * 36)),
        ("note", "https://hooks.slack.com/services/T0/B0/abc"),
        *(("note", f"{place}@host/x") for place in ("redis://:pw", "https://" + "a1" * 16, "mysql://me:p@w")),
    ],
)  # fmt: skip
def test_secrets_are_known_by_name_or_by_form(name: str, value: str) -> None:
    assert looks_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", 2048), ("num_tokens", "2048"), ("tokenizer", "gpt2"), ("TOKENIZERS_PARALLELISM", "false")),
        *(("eos_token", "</s>"), ("pad_token", "pad"), ("bos_token_id", "1"), ("HF_TOKEN_PATH", "/run/token")),
        *(("sort_key", "length"), ("keyboard", "x"), ("eostoken", "e"), ("mask_token_2", "m"), ("subtoken", "mean")),
        *(("TOKEN", ""), ("HF_TOKEN", None), ("secret_file", "/x"), ("token", "/opt/token"), ("AKIA", "x")),
        *(("second_pass", "fast"), ("partition_key", "a"), ("url", "https://host:8080/a@b")),
        *(("url", "ssh://git@host/x"), ("image", "docker://pytorch:2.11-cuda13.0-runtime@sha256:0a")),
    ],
)
def test_what_only_resembles_one_is_none(name: str, value: object) -> None:
    assert not looks_secret(name, value)


def test_the_inner_parts_are_masked() -> None:
    value = {"db": {"password": "x1y2", "host": "h"}, "tokens": [1, 2], "keys": [HF]}
    assert masked("a", value) == {"db": {"password": HIDDEN, "host": "h"}, "tokens": [1, 2], "keys": [HIDDEN]}
    assert masked("setup", ["module load x", "export HF_TOKEN=ab"]) == ["module load x", "export HF_TOKEN=**"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  HF_TOKEN: abcd", "  HF_TOKEN: ****"),
        ('environment: {HF_TOKEN: "abcd", A: b}', "environment: {HF_TOKEN: ******, A: b}"),
        ('{"password":"a\\"b","x":1}', '{"password":******,"x":1}'),
        ("epochs: 3  # token: it", "epochs: 3  # token: **"),
        ("hyperparameters: {eos_token: </s>}", "hyperparameters: {eos_token: </s>}"),
        (f"x: {AWS}", "x: " + "*" * 20),
        ("export HF_TOKEN=abcd A=b", "export HF_TOKEN=**** A=b"),
        ("--export=HF_TOKEN=abcd,A=b", "--export=HF_TOKEN=****,A=b"),
        ("-- --hub_token ab --push --token 'a b' -x c", "-- --hub_token ** --push --token ***** -x c"),
        ("train.py --token --push_to_hub", "train.py --token --push_to_hub"),
        ("Authorization: Bearer abcd, x", "Authorization: ***********, x"),
        ("-H 'X-Auth-Token: ab' a: Basic HF_TOKEN=abcd", "-H 'X-Auth-Token: **' a: Basic HF_TOKEN=****"),
    ],
)
def test_lines_of_a_file_are_shown_without_them(line: str, shown: str) -> None:
    assert hide_in_line(line) == shown


SECRET = "271828182845"
"""A number, which is no legal value of a variable, and whose name alone tells that it is a secret."""

BROKEN = {
    "number": "environment: {{}}\nhyperparameters:\n  password: [{0}, .inf]\n",
    "in a list": "environment:\n  PASSWORD: [{0}]\n  OTHER: [{0}]\n",
    "as a number": "environment:\n  API_KEY: {0}\n# a remark\n  OTHER: {0}\n",
    "in a block": "environment:\n  API_KEY:\n    - {0}\n  B:\n    c: {0}\n",
    "no mapping": "environment: {0}\n",
    "list of settings": "environment:\n- API_KEY={0}\n- [{0}]\n- x: {0}\n",
    "braces": "environment: {{A: {0}, B: [{0}], C: {{d: {0}}}}}\n",
    "wrapped braces": "environment: {{A: b,\nB: {0}\n}}\n",
    "entry": "secrets: {{A: {0}, B: 'x {0}', C: {{entry: {0}}}, D: {{entri: {0}}}}}\n",
    "secret's name": "secrets:\n  A:\n    entry: [{0}]\n",
    "under its old name": "env: {{A: {0}}}\n",
    "open quote": 'environment:\n  API_KEY: "{0}\n',
    "open quote elsewhere": 'hyperparameters:\n  password: "x {0}\n',
    "open brace": "environment: {{A: {0}\n",
    "two colons": "environment:\n  A: b: {0}\n",
    "no colon": "environment:\n  A:\n  x{0}\n  B: c\n",
    "alias": "environment:\n  A: *x{0}\n",
    "tag": "environment:\n  A: !x{0}\n",
    "bad number": "environment:\n  A: !!int x{0}\n",
    "at sign": "environment:\n  A: @{0}\n",
    "json": '{{"environment": {{"A": {0}, "B": ["{0}"]}}, "hyperparameters": {{"token": {0}, "a": Infinity}}}}',
    "json over lines": '{{\n"environment": {{\n"A": ["{0}"],\n"B": {0}\n}},\n"compute": 3\n}}',
    "open json": '{{"environment": {{"A": "{0}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_no_error_shows_a_variable_or_what_has_the_name_of_a_secret(text: str, tmp_path: Path) -> None:
    job = tmp_path / ("job.json" if text.startswith("{") else "job.yaml")
    job.write_text(text.format(SECRET))
    with pytest.raises(ConfigError) as raised:
        load_job(job)
    shown = [str(problem) for problem in raised.value.problems]
    assert len(shown) > 1 or raised.value.problems[0].message.startswith(("is not", "has a value"))
    assert not [problem for problem in shown if SECRET in problem]


@pytest.mark.parametrize("key", ["environment.A.b", "hyperparameters.password", "secrets.A"])
def test_no_error_about_an_option_shows_it(key: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"entry_point: train.py\nenvironment: {{A: {SECRET}}}\n")
    for value in (f"[{SECRET}", SECRET):
        with pytest.raises(ConfigError) as raised:
            load_job(tmp_path / "job.yaml", [("--set", f"{key}={value}")])
        assert SECRET not in str(raised.value)


def test_what_stands_beside_a_secret_is_shown() -> None:
    text = "environment:\n  A: {B: c}\n  D: |\n    e: f\n  #\ncompute: {token: [x], hosts: 3}\nenv:\n- g=h\ninputs: [i]"
    shown = (
        "environment:\n  A: ******\n  D: *\n    e: *\n  *\ncompute: {token: **************\nenv:\n- ***\ninputs: [i]"
    )
    assert "\n".join(hide_in_text(text)) == shown
    text = '{"a": {"env": {"b": "}x"}, "c": 1},\n"env": {\n"d": "]",\n"e": [f]\n},\n"g": [\n1]}'
    shown = '{"a": {"env": *********************\n"env": *\n"d": ****\n"e": ***\n**\n"g": [\n1]}'
    assert "\n".join(hide_in_text(text)) == shown


def test_a_python_error_does_not_show_it_either() -> None:
    with pytest.raises(ConfigError, match=r"environment\.A: must be text, got \(hidden\)\n    hint: put it in quotes"):
        validated(JobConfig, {"entry_point": "train.py", "environment": {"A": 271828}}, subject="arguments")


def test_messages_do_not_quote_keys() -> None:
    assert quoted(f"say {AWS}") == "`say (hidden)`"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext \u00e9\u00a0\U0001f469\u200d\U0001f52c", "plain\ttext \u00e9\u00a0\U0001f469\u200d\U0001f52c"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2Ja\rb\x9b1m", "\\x1b[2Ja\\rb\\x9b1m"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_a_terminal_obeys_nothing_but_colours(text: str, shown: str) -> None:
    assert coloured(text) == shown
