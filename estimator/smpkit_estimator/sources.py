"""A job's sources: which files travel, and one archive of them that is the same for the same content.

Left out are what ignore files at the root name, caches, and whatever has the name of a secret. A link travels as the
file or folder that it leads to; one that leads out of the sources is refused.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import itertools
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pathspec import GitIgnoreSpec

from smpkit.config.job import JobConfig
from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem
from smpkit.units import amount

IGNORE_FILES = (".gitignore", ".smpkitignore")
"""Files with patterns in git's syntax, at the root of the sources; the second may bring back what the first hides."""

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

_COMPRESSION = 5
"""On 10,000 Python files: two thirds of the time of level 6, and 1 % larger."""
_LARGE_BYTES = 100 * 2**20
SMALLER = "name what the job does not need in .smpkitignore; data belongs in `inputs`"
"""What to do about sources that are too large."""


@dataclass(frozen=True)
class Entry:
    """One file of the archive."""

    name: str
    """Its path in the archive, with `/`."""
    path: Path
    executable: bool = False


@dataclass
class Sources:
    """What is packed, sorted by name, and what was left out for a reason that the user should know."""

    entries: list[Entry] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    """Names of files and folders that look like secrets: never packed."""
    specials: list[str] = field(default_factory=list)
    """Names of sockets, pipes, devices, and links to nothing: not files."""
    unread: list[str] = field(default_factory=list)
    """Names of ignore files that are not at the root, and so do not count."""


@dataclass(frozen=True)
class Packed:
    """What was packed."""

    sources: Sources = field(compare=False)
    digest: str
    """SHA-256 of the uncompressed archive, in hexadecimal: it does not depend on the version of zlib."""
    num_bytes: int
    """Size of the uncompressed archive."""


def job_sources(
    job: JobConfig,
    folder: Path,
    problems: list[Problem],
    *,
    script_only: bool = False,
    instead_of_s3: str | None = None,
) -> Sources | None:
    """Return what a job packs; None if its sources are in S3 already, or if there are `problems`, which are added.

    Args:
        script_only: pack the entry point and the dependencies alone, as SDK v2 does without a `source_dir`.
        instead_of_s3: what to do where hosts do not read sources in S3.
    """
    if "://" in job.source_dir:
        if instead_of_s3 is not None:
            problems.append(Problem(("source_dir",), "is in S3, which the hosts do not read", instead_of_s3))
        if not job.source_dir.endswith(".tar.gz"):
            problems.append(Problem(("source_dir",), "must be a `.tar.gz` in S3", "or name a local folder"))
        if job.dependencies:
            hint = "put them into the archive"
            problems.append(Problem(("dependencies",), "cannot be added to sources in S3", hint))
        return None
    remote = [name for name in job.dependencies if "://" in name]
    problems += [Problem(("dependencies",), f"must be local, got `{name}`", "copy it here") for name in remote]
    dependencies = [folder / name for name in job.dependencies if name not in remote]
    root = folder / job.source_dir
    if not (root / job.entry_point).is_file():
        problems.append(Problem(("entry_point",), f"there is no file `{job.entry_point}` in `{root}`"))
        return None
    try:
        sources = collect(root, dependencies, only=job.entry_point if script_only else None)
    except ConfigError as error:
        problems += error.problems
        return None
    if all(entry.name != job.entry_point for entry in sources.entries):
        message = f"`{job.entry_point}` is left out by an ignore file or by its name"
        problems.append(Problem(("entry_point",), message, "bring it back with a line `!...` in .smpkitignore"))
    return sources


def packing_notes(packed: Packed) -> Iterator[str]:
    sources = packed.sources
    if sources.secrets:
        yield f"left out, as secrets are never packed: {_some(sources.secrets)}"
    if sources.specials:
        yield f"left out, as they are no files: {_some(sources.specials)}"
    if sources.unread:
        yield f"not read, as only ignore files at the root count: {_some(sources.unread)}"
    if packed.num_bytes > _LARGE_BYTES:
        size = f"{amount(packed.num_bytes)} in {len(sources.entries):,} files"
        yield f"the sources have {size}; name what the job does not need in .smpkitignore"


def _some(names: Sequence[str]) -> str:
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


# ---- which files ---------------------------------------------------------------------------------------------------


def collect(source: Path, dependencies: Sequence[Path] = (), *, only: str | None = None) -> Sources:
    """List what is packed of `source`, its content at the root, and of `dependencies`, each under its own name.

    Args:
        only: take this one file of `source` and no others.

    Raises:
        ConfigError: with all problems.
    """
    sources = Sources()
    problems: list[Problem] = []
    if only is None:
        _Walk(source.resolve(), "", sources, problems).start()
    else:
        _take(source / only, only, sources, problems)
    for path in dependencies:
        if path.is_dir():
            _Walk(path.resolve(), f"{path.resolve().name}/", sources, problems).start()
        elif path.is_file():
            _take(path, path.name, sources, problems)
        else:
            problems.append(Problem(("dependencies",), f"there is no file or folder `{path}`"))
    sources.entries.sort(key=lambda entry: entry.name)
    for first, second in itertools.pairwise(sources.entries):
        if first.name == second.name:
            message = f"`{first.name}` is both `{first.path}` and `{second.path}`"
            problems.append(Problem(("dependencies",), message, "rename one of them"))
    if problems:
        raise ConfigError(problems, subject="sources")
    for names in (sources.secrets, sources.specials, sources.unread):
        names.sort()
    return sources


def is_secret(name: str) -> bool:
    """Tell whether a file or folder of this name holds secrets; no ignore file can include it again."""
    return name in _SECRET_FOLDERS or (_SECRET.match(name) is not None and name.lower() not in _HARMLESS)


def _take(path: Path, name: str, sources: Sources, problems: list[Problem]) -> None:
    """Add one file."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        problems.append(Problem(("source_dir",), f"the name of `{printable(name)}` is not UTF-8"))
    else:
        sources.entries.append(Entry(name, path, executable=bool(path.stat().st_mode & stat.S_IXUSR)))


@dataclass
class _Walk:
    """Goes through one folder, and adds what it finds to the sources."""

    root: Path
    prefix: str
    """Of the names in the archive."""
    sources: Sources
    problems: list[Problem]
    ignored: GitIgnoreSpec = field(default_factory=lambda: GitIgnoreSpec([]))
    inside: list[Path] = field(default_factory=list)
    """Folders that links led into, on the way to the present one."""

    def start(self) -> None:
        files = [self.root / name for name in IGNORE_FILES if (self.root / name).is_file()]
        try:
            lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(f"an ignore file in `{printable(str(self.root))}` cannot be read: {error}")
            return
        self.ignored = GitIgnoreSpec.from_lines(lines)
        self._folder(self.root, "")

    def _folder(self, folder: Path, relative: str) -> None:
        try:
            with os.scandir(folder) as scan:
                items = list(scan)
        except OSError as error:
            self._refuse(f"`{printable(str(folder))}` cannot be read: {error}")
            return
        for item in items:
            self._item(item, relative + item.name)

    def _item(self, item: os.DirEntry[str], relative: str) -> None:
        is_folder, name = item.is_dir(follow_symlinks=False), self.prefix + relative
        if item.name in _NEVER or item.name.endswith((".pyc", ".pyo")):
            return
        if is_folder and (Path(item.path) / "pyvenv.cfg").is_file():  # a virtual environment, whatever its name
            return
        if self.ignored.check_file(relative + "/" * is_folder).include:
            return
        if item.name in IGNORE_FILES and "/" in relative:
            self.sources.unread.append(name)
        if is_secret(item.name):
            self.sources.secrets.append(name)
        elif item.is_symlink():
            self._link(Path(item.path), relative)
        elif is_folder:
            self._folder(Path(item.path), f"{relative}/")
        elif item.is_file(follow_symlinks=False):
            _take(Path(item.path), name, self.sources, self.problems)
        else:
            self.sources.specials.append(name)

    def _link(self, path: Path, relative: str) -> None:
        """Take what a link leads to, if that is inside: the launcher unpacks files and folders only."""
        name = self.prefix + relative
        try:
            target = path.resolve(strict=False)
            is_circle = target.is_symlink()  # Python 3.13 and later resolve a circle of links to one of its links
        except (OSError, RuntimeError):
            is_circle = True
        hint = "put a copy in its place, or name it in .smpkitignore"
        if is_circle:
            self._refuse(f"the link {quoted(name)} leads to itself", hint)
        elif not target.is_relative_to(self.root):
            self._refuse(f"the link {quoted(name)} leads out of the sources, to `{printable(str(target))}`", hint)
        elif any(is_secret(part) for part in target.relative_to(self.root).parts):
            self.sources.secrets.append(name)
        elif target.is_file():
            _take(target, name, self.sources, self.problems)
        elif not target.is_dir():
            self.sources.specials.append(name)
        elif target in self.inside or path.is_relative_to(target):
            self._refuse(f"the link {quoted(name)} leads to a folder that it is in", hint)
        else:
            self.inside.append(target)
            self._folder(target, f"{relative}/")
            self.inside.pop()

    def _refuse(self, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(("source_dir",), message, hint))


# ---- the archive ---------------------------------------------------------------------------------------------------


def pack(sources: Sources, target: BinaryIO | None = None) -> Packed:
    """Write the compressed archive (`.tar.gz`) to `target`; without one only read everything, and return the same."""
    with _Stream(target) as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in sources.entries:
            _add(tar, entry)
    return Packed(sources, stream.digest.hexdigest(), stream.num_bytes)


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    member = tarfile.TarInfo(entry.name)  # without a time and an owner
    member.mode = 0o755 if entry.executable else 0o644
    try:
        with entry.path.open("rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)
    except OSError as error:
        message = f"`{printable(entry.name)}` cannot be read: {error}"
        raise ConfigError([Problem(("source_dir",), message)], subject="sources") from None


class _Stream(io.RawIOBase):
    """Counts and digests what `tarfile` writes, and compresses it into the target if there is one."""

    def __init__(self, target: BinaryIO | None) -> None:
        super().__init__()
        self.digest, self.num_bytes = hashlib.sha256(), 0
        self._file = gzip.GzipFile("", "wb", _COMPRESSION, target, mtime=0) if target is not None else None

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        if self._file is not None:
            self._file.write(data)
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # also of an archive that is given up: the collector would write into a closed target
        super().close()
