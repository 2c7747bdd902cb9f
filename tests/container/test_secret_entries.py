"""Secrets reach the script from AWS Secrets Manager; the client is checked against botocore's model by its stubber."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from botocore.stub import Stubber

from smpkit.config.wire import SECRETS
from smpkit.errors import ConfigError, LaunchError
from smpkit_container import __main__ as program
from smpkit_container.aws import secret_variables
from smpkit_container.environment import Environment, Folders

Entries = Callable[..., None]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Entries:
    """Put entries where the client looks: name -> text, bytes, or a refusal's code."""
    real = boto3.client

    def fill(expected_region: str = "eu-west-1", **found: Any) -> None:
        def client(service: str, region_name: str, config: Any) -> Any:
            assert (service, region_name) == ("secretsmanager", expected_region)
            made = real(service, region_name=region_name, aws_access_key_id="x", aws_secret_access_key="y")
            stubber = Stubber(made)
            name, value = found.popitem()
            if value == "denied":
                stubber.add_client_error("get_secret_value", "AccessDeniedException", "not authorized")
            else:
                answer = {"SecretBinary" if isinstance(value, bytes) else "SecretString": value}
                stubber.add_response("get_secret_value", answer, {"SecretId": name})
            stubber.activate()
            return made

        monkeypatch.setattr(boto3, "client", client)

    return fill


def read(places: Any, region: str = "eu-west-1") -> dict[str, str]:
    return secret_variables(Environment(Folders(Path()), framework={SECRETS: places, "sagemaker_region": region}))


def test_entries_become_variables(entries: Entries) -> None:
    entries(token="abc")
    assert read({"HF_TOKEN": {"entry": "token", "key": None}}) == {"HF_TOKEN": "abc"}
    entries(team='{"hf": "a", "wandb": "b"}')  # which is read once
    places = {"HF_TOKEN": {"entry": "team", "key": "hf"}, "WANDB_API_KEY": {"entry": "team", "key": "wandb"}}
    assert read(places) == {"HF_TOKEN": "a", "WANDB_API_KEY": "b"}
    arn = "arn:aws:secretsmanager:us-east-2:123456789012:secret:x"
    entries("us-east-2", **{arn: "abc"})
    assert read({"A": {"entry": arn}}) == {"A": "abc"}


@pytest.mark.parametrize(
    ("found", "key", "message"),
    [
        ("denied", None, "cannot be read: .*not authorized"),
        (b"abc", None, "is not a text"),
        ("plain", "hf", "is no JSON object with a text at `hf`"),
        ('{"hf": 1}', "hf", "is no JSON object with a text at `hf`"),
        ("a\0b", None, "NUL"),
    ],
)
def test_what_cannot_be_read_is_named_alone(entries: Entries, found: Any, key: Any, message: str) -> None:
    entries(team=found)
    with pytest.raises(LaunchError, match=message) as caught:
        read({"HF_TOKEN": {"entry": "team", "key": key}})
    assert "HF_TOKEN" in str(caught.value)
    assert "`team`" in str(caught.value)
    assert "plain" not in str(caught.value)


def test_a_job_without_secrets_asks_nobody(entries: Entries) -> None:
    entries()
    assert secret_variables(Environment(Folders(Path()))) == {}
    with pytest.raises(ConfigError, match="must be a JSON object"):
        read([1])


def test_the_script_has_the_variable_and_no_file_has_its_value(
    entries: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries(token="s3cr3t-value")
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    sent = {SECRETS: json.dumps({"HF_TOKEN": {"entry": "token"}}), "sagemaker_region": '"eu-west-1"'}
    (config / "hyperparameters.json").write_text(json.dumps(sent))
    launch = Mock(return_value=0)
    monkeypatch.setattr(program, "launch", launch)
    assert program.main(["train"], {"SMPKIT_BASE_DIR": str(tmp_path)}) == 0
    assert launch.call_args.args[1]["HF_TOKEN"] == "s3cr3t-value"
