"""The training image and `smpkit run --docker`, with a real engine, real containers, torchrun, mpirun and ssh."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import base_image, image_options, running_engine, why_not
from tests.job_contract import OnThisMachine, a_job_that_is_stopped_goes_on

HERE = Path(__file__).parent

# The time of each test alone: the first one would be charged with the making of the image, which has limits of its own.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600, func_only=True)]


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("docker")
    with running_engine():
        if "SMPKIT_TEST_IMAGE" in os.environ:
            yield os.environ["SMPKIT_TEST_IMAGE"]
            return
        if shutil.which("debootstrap") is None and "SMPKIT_TEST_BASE_IMAGE" not in os.environ:
            pytest.skip("debootstrap is not installed, and SMPKIT_TEST_BASE_IMAGE names no image")
        words = ["image", "--base-image", base_image(folder), *image_options()]
        built = subprocess.run([*smpkit(), *words], stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
        yield built.stdout.strip()


def smpkit() -> list[str]:
    return [sys.executable, "-c", "from smpkit.cli.main import main; main()"]


def start(image: str, tmp_path: Path, *options: str, job: str = "job/job.yaml") -> subprocess.Popen[str]:
    folders = ["--set", f"checkpoints={tmp_path}/checkpoints", "--set", f"output={tmp_path}/output"]
    command = [*smpkit(), "run", str(HERE / job), "--docker", "--set", f"image={image}", *folders, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(image: str, tmp_path: Path, *options: str, job: str = "job/job.yaml") -> tuple[int, str, str]:
    process = start(image, tmp_path, *options, job=job)
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


def losses(tmp_path: Path) -> str:
    return (tmp_path / "output" / "model" / "losses.txt").read_text()


def containers() -> list[str]:
    listed = ["docker", "ps", "--all", "--filter", "label=smpkit.run", "--format", "{{.Names}}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()


def await_line(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"`{pattern}` was never printed: {process.communicate()[1][-2000:]}")


@pytest.mark.parametrize("job", ["job/job.yaml", "mpi_job.yaml"])
def test_two_hosts(image: str, tmp_path: Path, job: str) -> None:
    """Four ranks on two hosts; with mpirun, its daemon is started on the second by ssh.

    Surprises 4 and 16: SDK v3's MPI starts the first host's ranks only; no image of AWS's takes SMP v1's parameters.
    """
    code, out, err = run(image, tmp_path, "--hosts", "2", job=job)
    assert code == 0, err
    assert "[algo-1] [rank 0] step 6 on algo-1" in out
    assert "[algo-2] [rank 3] step 6 on algo-2" in out
    assert (tmp_path / "output" / "model" / "host.txt").read_text() in ("algo-1", "algo-2")
    assert containers() == []


@pytest.mark.parametrize("job", ["job/job.yaml", "mpi_job.yaml"])
def test_a_rank_that_fails_on_the_second_host_ends_all(image: str, tmp_path: Path, job: str) -> None:
    options = ["--hosts", "2", "--set", "hyperparameters.fail-on-rank=3"]
    code, _, err = run(image, tmp_path, *options, job=job)
    assert code == 1
    assert err.count("ValueError: bad batch") <= 3  # the traceback, and one line on each host
    assert re.search(r"\[algo-1\] Failed after .*algo-2: rank 3: ValueError: bad batch", err), err
    assert containers() == []


TORCHRUN = ["--set", "distribution.torch_distributed.processes_per_host=2"]
MPI = [
    *("--set", "distribution.mpi={enabled: true, processes_per_host: 2}"),
    *("--set", "distribution.torch_distributed=null"),
]


@pytest.mark.parametrize(
    ("hosts", "launcher"),
    [
        pytest.param(1, TORCHRUN, id="1-torchrun", marks=pytest.mark.slow),
        pytest.param(2, MPI, id="2-mpirun"),
        pytest.param(1, MPI, id="1-mpirun", marks=pytest.mark.slow),
        pytest.param(2, TORCHRUN, id="2-torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_example_learns(image: str, tmp_path: Path, hosts: int, launcher: list[str]) -> None:
    example = HERE.parents[1] / "examples" / "gpt_text" / "job.yaml"
    options = ["--hosts", str(hosts), *launcher, "--set", "hyperparameters.steps=10"]
    code, out, err = run(image, tmp_path, *options, job=str(example))
    assert code == 0, err
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+) nats", out).groups()  # type: ignore[union-attr]
    assert float(after) < float(before) - 0.5


@pytest.mark.slow
def test_a_job_that_is_stopped_goes_on_as_everywhere(image: str, tmp_path: Path) -> None:
    a_job_that_is_stopped_goes_on(OnThisMachine(tmp_path, ("--docker",), {"image": image}))


def test_a_host_that_is_killed_ends_the_other(image: str, tmp_path: Path) -> None:
    options = ["--hosts", "2", "--set", "hyperparameters.steps=1000", "--set", "hyperparameters.seconds=0.2"]
    process = start(image, tmp_path, *options)
    await_line(process, "step 2 on algo-1")
    [second] = [name for name in containers() if name.endswith("algo-2")]
    subprocess.run(["docker", "kill", second], check=True, capture_output=True)
    began = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert time.monotonic() - began < 60
    assert "algo-2: the host was lost" in err
    assert containers() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stop_lets_the_script_save(image: str, tmp_path: Path, number: int, code: int) -> None:
    """Surprise 15: a launcher that is told to stop kills the ranks soon; here the ranks are told themselves."""
    options = ["--hosts", "2", "--set", "hyperparameters.steps=1000", "--set", "hyperparameters.seconds=0.2"]
    process = start(image, tmp_path, *options)
    await_line(process, "step 2 on algo-2")
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    for rank in range(4):
        assert f"[rank {rank}] saved and stopping" in out
    assert any((tmp_path / "checkpoints").iterdir())


def test_docker_stop_of_the_image_itself_ends_with_zero(image: str, tmp_path: Path) -> None:
    """Surprise 7: as PID 1, AWS's programs ignore SIGTERM; ours gives the ranks the time that they need to save."""
    options = ["--set", "hyperparameters.steps=1000", "--set", "hyperparameters.seconds=0.2"]
    process = start(image, tmp_path, *options)
    await_line(process, "step 2 on algo-1")
    [name] = containers()
    subprocess.run(["docker", "stop", "--time", "60", name], check=True, capture_output=True, timeout=100)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.count("saved and stopping") == 2


def test_a_rehearsed_interruption_changes_nothing(image: str, tmp_path: Path) -> None:
    """A spot instance is taken away and comes back with nothing but the checkpoints: the losses are the same."""
    options = ["--set", "hyperparameters.steps=8", "--set", "hyperparameters.hold-at=4"]
    plain, interrupted = tmp_path / "plain", tmp_path / "interrupted"
    assert run(image, plain, "--set", "hyperparameters.steps=8")[0] == 0
    code, out, err = run(image, interrupted, *options, "--interrupt-after", "8")
    assert code == 0, err
    assert "resumed at step 4" in out
    assert "with an interruption" in err
    assert losses(interrupted) == losses(plain)


def test_a_clone_builds_with_the_dockerfile_at_its_root(image: str, tmp_path: Path) -> None:
    """As `docker build .` does; what this machine needs (its index, its certificates) goes where the file says."""
    root, context = HERE.parents[1], tmp_path / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, context / name)
    words = image_options()
    given = dict(zip(words[::2], words[1::2], strict=True))
    if "--ca" in given:
        (context / "ca").mkdir()
        shutil.copyfile(given["--ca"], context / "ca" / f"{Path(given['--ca']).stem}.crt")
    if "--wheels" in given:
        (context / "wheels").mkdir()
        for wheel in Path(given["--wheels"]).glob("*.whl"):
            shutil.copyfile(wheel, context / "wheels" / wheel.name)
    # The same arguments as those of `smpkit image`, so that the layer of packages, which takes minutes, is made once.
    arguments = {"BASE_IMAGE": base_image(tmp_path), "TORCH": given.get("--torch", "torch>=2.11"), "TORCH_OPTIONS": ""}
    options = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    command = ["docker", "build", "--network", given["--build-network"], *options, "--tag", "smpkit-test:clone", "."]
    subprocess.run(command, cwd=context, check=True, timeout=1800)
    said = subprocess.run(
        ["docker", "run", "--rm", "--entrypoint", "smpkit", "smpkit-test:clone", "--version"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert said.stdout.startswith("smpkit")


def test_the_image_holds_no_keys_and_runs_other_commands(image: str) -> None:
    def inside(*words: str) -> str:
        return subprocess.run(["docker", "run", "--rm", *words], capture_output=True, text=True, check=True).stdout

    assert "ssh_host" not in inside(image, "ls", "/etc/ssh")
    assert inside(image, "echo", "as", "it is") == "as it is\n"
    assert inside("--entrypoint", "python3", image, "-c", "print(6 * 7)") == "42\n"


def test_a_container_without_a_job_says_what_is_missing(image: str) -> None:
    """SageMaker's SDK v3 replaces the entry point by a command of its own; ours is the same program then."""
    for words in ([image, "train"], ["--entrypoint", "python3", image, "-P", "-m", "smpkit_container", "train"]):
        done = subprocess.run(["docker", "run", "--rm", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "the job names no entry point" in done.stderr
