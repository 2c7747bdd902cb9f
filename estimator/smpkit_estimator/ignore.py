"""Decide what of a source folder is left out: ignore files, and names that are caches or secrets."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

__all__ = ["IGNORE_FILES", "IgnoreRules", "holds_secret", "is_secret"]

IGNORE_FILES = (".gitignore", ".smpkitignore")
"""Files with patterns in git's syntax, in any folder of the sources; the second may bring back what the first hides."""

_NEVER = frozenset(
    {
        *(".git", ".hg", ".svn", ".bzr"),
        *("__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".cache", ".tox"),
        *(".DS_Store", ".venv", "node_modules"),
    }
)
"""Names that are never sources."""

_SECRET_FOLDERS = frozenset({".aws", ".ssh", ".gnupg", ".azure", ".kube", ".docker", ".kaggle", "gcloud"})
_SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*_rsa", "*_ed25519", "*_ed25519_sk", "*_ecdsa_sk"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx"),
    *("credentials", "credentials.json", "credentials.csv", "accesskeys.csv", "*_accesskeys.csv", "kaggle.json"),
    *("service-account*.json", "service_account*.json", ".huggingface_token", "application_default_credentials.json"),
    *(".vault_pass", ".vault_pass.*", ".vault_password", "vault_pass.txt", "vault_password.txt", ".vault-token"),
    *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml", "secrets.ini", ".secrets"),
    *("*.tfstate", "*.tfstate.*", "*.tfvars", ".boto", ".s3cfg", ".dockercfg", ".my.cnf", ".terraformrc"),
)
_HARMLESS = (".env.example", ".env.sample", ".env.template", "example.env", "sample.env", "template.env")
_SECRET = re.compile("|".join(fnmatch.translate(pattern) for pattern in _SECRET_FILES), re.IGNORECASE)
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-")
_KEY_INSIDE = re.compile(
    rb'"private_key"\s*:\s*"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY'
    rb"|(?<![A-Z0-9])(?:AKIA|ASIA)(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}(?![A-Z0-9])"
)
"""A key file of Google's, an access key of AWS that is not one of its documentation."""
_SMALL_BYTES = 1 << 16


def is_secret(name: str) -> bool:
    """Tell whether a file or folder of this name holds secrets; no ignore file can include it again."""
    return name in _SECRET_FOLDERS or (_SECRET.match(name) is not None and name.lower() not in _HARMLESS)


def holds_secret(beginning: bytes, *, whole: bool) -> bool:
    """Tell by its first bytes whether a file is a private key or holds a cloud's access key, whatever its name.

    Args:
        whole: `beginning` is the whole file. Only small files are searched for keys inside: long ones are data, or
            text about keys.
    """
    if _PRIVATE_KEY.match(beginning[:200]) is not None:
        return True
    return whole and len(beginning) <= _SMALL_BYTES and _KEY_INSIDE.search(beginning) is not None


@dataclass(frozen=True)
class IgnoreRules:
    """The ignore files from the root of the sources down to one folder."""

    specs: Sequence[tuple[str, GitIgnoreSpec]] = ()
    """(folder, its patterns) each; folders relative to the root, with a slash at the end."""

    def below(self, folder: Path, relative: str) -> IgnoreRules:
        """Add the ignore files of one folder; `relative` is its path from the root, empty or with a slash at the end.

        Raises:
            OSError, UnicodeDecodeError: an ignore file cannot be read.
        """
        found = [folder / name for name in IGNORE_FILES if (folder / name).is_file()]
        if not found:
            return self
        lines = [line for file in found for line in file.read_text(encoding="utf-8").splitlines()]
        return IgnoreRules((*self.specs, (relative, GitIgnoreSpec.from_lines(lines))))

    def ignores(self, relative: str, *, is_folder: bool) -> bool:
        """Tell whether an entry is left out: the innermost ignore file that has something to say decides."""
        name = relative.rpartition("/")[2]
        if name in _NEVER or name.endswith((".pyc", ".pyo")):
            return True
        for folder, spec in reversed(self.specs):
            below = relative[len(folder) :] + "/" * is_folder
            verdict = spec.check_file(below).include
            if verdict is not None:
                return verdict
        return False
