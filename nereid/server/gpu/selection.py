"""The GPUs that a server uses: `nereid serve --gpu-id`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nereid.base.errors import ServerError
from nereid.server.gpu import nvidia_smi
from nereid.server.gpu.nvidia_smi import Device


def select(words: str, environment: Mapping[str, str], devices: Path = nvidia_smi.DEVICES) -> dict[str, str]:
    """Return the environment variables with which a server and its stubs see only the named GPUs.

    Raises:
        ValueError: the machine has no GPU, or not this one; the message names those that it has.
    """
    path = environment.get("PATH", "")
    if reason := nvidia_smi.why_absent(path, devices):
        raise ValueError(f"--gpu-id {words}: {reason}")
    try:
        known = nvidia_smi.read_devices(path)
    except ServerError as error:
        raise ValueError(f"--gpu-id {words}: {error}") from None
    # UUIDs, because CUDA sorts GPUs by speed, and nvidia-smi by their slots.
    return {"CUDA_VISIBLE_DEVICES": ",".join(each.uuid for each in parse(words, known))}


def parse(words: str, devices: Sequence[Device]) -> list[Device]:
    """Parse indexes of nvidia-smi and UUIDs, separated by commas.

    Raises:
        ValueError: a word names no device, several devices, or one that CUDA cannot use with the others.
    """
    found: list[Device] = []
    for word in [each.strip() for each in words.split(",")]:
        matching = [each for each in devices if nvidia_smi.matches(each, word)]
        if len(matching) != 1:
            known = "; ".join(map(str, devices)) or "none"
            what = "several GPUs match" if matching else "no GPU is called"
            raise ValueError(f"--gpu-id {words}: {what} '{word}'; this machine has: {known}")
        found += matching
    if len(set(found)) < len(found):
        raise ValueError(f"--gpu-id {words}: expected each GPU once")
    if divided := [each for each in found if nvidia_smi.parts_of(each.uuid, devices)]:
        parts = "; ".join(map(str, nvidia_smi.parts_of(divided[0].uuid, devices)))
        raise ValueError(
            f"--gpu-id {words}: MIG divides GPU {divided[0].index}; expected the UUID of a part: {parts}"
        )
    if len(found) > 1 and any(each.is_part for each in found):
        raise ValueError(f"--gpu-id {words}: expected one part of a GPU alone, because CUDA uses only one")
    return found
