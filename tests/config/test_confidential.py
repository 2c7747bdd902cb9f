"""What is probably a secret is hidden in all that is shown, and nothing else is."""

from __future__ import annotations

import pytest

from smpkit.config.confidential import HIDDEN, hide_in_line, looks_secret, masked
from smpkit.config.words import coloured, quoted

HF = "hf_" + "a1B2" * 9
AWS = "AKIA" + "ABCDEFGH12345678"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "abc123") for name in ("HF_TOKEN", "WANDB_API_KEY", "password", "db.passwd", "AWS_SECRET_ACCESS_KEY")),
        *((name, "abc123") for name in ("AWS_ACCESS_KEY_ID", "githubToken", "client-secret", "OPENAI_KEY", "apikey")),
        *(("note", value) for value in (HF, AWS, f"key={AWS}", "https://me:pw@host/x", "ghp_" + "a" * 36)),
    ],
)  # fmt: skip
def test_secrets_are_known_by_name_or_by_form(name: str, value: str) -> None:
    assert looks_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", 2048), ("num_tokens", "2048"), ("tokenizer", "gpt2"), ("TOKENIZERS_PARALLELISM", "false")),
        *(("eos_token", "</s>"), ("pad_token", "pad"), ("bos_token_id", "1"), ("HF_TOKEN_PATH", "/run/token")),
        *(("sort_key", "length"), ("keyboard", "x"), ("TOKEN", ""), ("secret_file", "/x"), ("token", "/opt/token")),
        *(("partition_key", "a"), ("AKIA", "x"), ("url", "https://host:8080/a@b"), ("HF_TOKEN", None)),
    ],
)
def test_what_only_resembles_one_is_none(name: str, value: object) -> None:
    assert not looks_secret(name, value)


def test_the_inner_parts_are_masked() -> None:
    value = {"db": {"password": "x1y2", "host": "h"}, "tokens": [1, 2], "keys": [HF]}
    assert masked("a", value) == {"db": {"password": HIDDEN, "host": "h"}, "tokens": [1, 2], "keys": [HIDDEN]}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  HF_TOKEN: abcd", "  HF_TOKEN: ****"),
        ('environment: {HF_TOKEN: "abcd", A: b}', "environment: {HF_TOKEN: ******, A: b}"),
        ('{"password":"a\\"b","x":1}', '{"password":******,"x":1}'),
        ("epochs: 3  # token: it", "epochs: 3  # token: **"),
        ("hyperparameters: {eos_token: </s>}", "hyperparameters: {eos_token: </s>}"),
        (f"x: {AWS}", "x: " + "*" * 20),
    ],
)
def test_lines_of_a_file_are_shown_without_them(line: str, shown: str) -> None:
    assert hide_in_line(line) == shown


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
