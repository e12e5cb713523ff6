"""The profile that `nereid serve --profile auto` selects, and its reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.base.errors import ServerError
from nereid.server.command_line import DEFAULT_PROFILE, GPU_PROFILE, TUNED_PROFILE
from nereid.server.gpu import cuda_packages, nvidia_smi
from nereid.server.gpu.cuda_packages import Installed, Problem
from nereid.server.gpu.nvidia_smi import Gpu


@dataclass(frozen=True, slots=True)
class Choice:
    """A profile with the reason for it, how to get the GPU, and a hint at another profile."""

    profile: str
    reason: str
    fix: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"profile {self.profile}: {self.reason}"
        return "; ".join(filter(None, (text, self.fix and f"fix: {self.fix}", self.hint)))


def choose(
    repository: Path,
    environment: Mapping[str, str],
    devices: Path = nvidia_smi.DEVICES,
    find_packages: Callable[[], Installed] = Installed.present,
) -> Choice:
    """Select `gpu` if a GPU, its packages and configs for it are there, else `cpu`.

    On a machine without a GPU, nothing is started. No library of CUDA is loaded on any machine. A profile
    `tuned` is not selected, because it fits the machine of its search only; the choice mentions it.

    Args:
        repository: the models to serve.
        environment: variables of the server.
        devices: folder of the device files.
        find_packages: returns the packages of the GPU path.
    """
    hint = ""
    if any(repository.glob(f"*/configs/{TUNED_PROFILE}.pbtxt")):
        hint = f"another profile is there: --profile {TUNED_PROFILE}"
    path = environment.get("PATH", "")
    if reason := nvidia_smi.why_absent(path, devices):
        return Choice(DEFAULT_PROFILE, reason, hint=hint)
    if not any(repository.glob(f"*/configs/{GPU_PROFILE}.pbtxt")):
        return Choice(DEFAULT_PROFILE, f"no model has configs/{GPU_PROFILE}.pbtxt", hint=hint)
    installed = find_packages()
    if problem := next(installed.problems(), None):
        return _without(problem, hint)
    try:
        gpus = nvidia_smi.read_gpus(path)
        seen = nvidia_smi.visible(nvidia_smi.read_devices(path), environment)
        cuda = nvidia_smi.read_cuda_version(path)
    except ServerError as error:
        return _without(Problem(error.reason, error.fix), hint)
    used = [gpu for gpu in gpus if any(each.uuid == gpu.uuid for each in seen)]
    if problem := unusable(used or gpus, len(seen), cuda, installed.cuda):
        return _without(problem, hint)
    names = ", ".join(dict.fromkeys(each.name for each in used or seen))
    return Choice(GPU_PROFILE, f"{names}, CUDA provider, CuPy {installed.cupy[0].version}", hint=hint)


def check_named_gpus(words: str, choice: Choice) -> None:
    """Check that a server for which GPUs are named uses a GPU.

    Raises:
        ValueError: the selected profile does not; the message has the reason.
    """
    if words and choice.profile != GPU_PROFILE:
        raise ValueError(f"--gpu-id {words}: expected a profile that uses a GPU, got {choice}")


def unusable(gpus: list[Gpu], visible: int, cuda: str, major: int) -> Problem | None:
    """Return why no GPU can be used, or None.

    Args:
        gpus: the GPUs that CUDA shows.
        visible: number of GPUs that CUDA shows.
        cuda: the newest CUDA release that the driver supports.
        major: major release of CUDA that CuPy is built for.
    """
    if not visible:
        return Problem("CUDA_VISIBLE_DEVICES names no GPU of this machine", "change or unset it")
    if problem := cuda_packages.driver_problem(cuda, gpus[0].driver if gpus else "", major):
        return problem
    problems = [cuda_packages.capability_problem(each.name, each.compute_capability, major) for each in gpus]
    return problems[0] if problems and all(problems) else None


def _without(problem: Problem, hint: str) -> Choice:
    return Choice(DEFAULT_PROFILE, f"a GPU, but {problem.found}", problem.fix, hint)
