"""Detect this machine's GPUs, and the reasons why some cannot be used, without importing torch; every wait is bounded.

`nvidia-smi` reports index, name and memory of each GPU. If it is missing or fails, this module looks for traces of GPUs
(device files, the driver's files, devices on the PCI bus), so that a machine with GPUs is not mistaken for one without.
If there is a trace, a separate process asks torch whether the GPU is usable, since a driver may hang forever.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MiB = 1 << 20

PATIENCE = 20.0
"""Seconds to wait for `nvidia-smi`; a driver that wakes up from sleep takes a few."""
TORCH_PATIENCE = 90.0
"""Seconds to wait for torch, whose import from a slow disk takes long."""
_GRACE = 1.0
"""Seconds to wait until a killed process is gone."""
_WHOLE, _INSTANCE = "GPU-", "MIG-"
"""Prefixes of the UUIDs of a GPU and of a MIG instance, of which a process sees only the first."""
_INSTANCE_NAME = "an instance of a GPU"
_QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current,name", "--format=csv,noheader,nounits")
_HANGS, _LISTS_NONE = "nvidia-smi gives no answer", "nvidia-smi lists no GPU"
_WSL_PROGRAMS = "usr/lib/wsl/lib"
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""On the PCI bus: NVIDIA's vendor id, and the prefix of the classes of display and 3D controllers."""
_ASK_TORCH = (
    sys.executable,
    "-c",
    "import json, torch\n"
    "every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
    "print(json.dumps([[one.name, one.total_memory] for one in every]))",
)
"""A program that prints the GPUs that torch can use: [[name, bytes], …]."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs found; entry i is `cuda:i`."""

    memory: tuple[int, ...] = ()
    """Bytes; 0: unknown until a worker runs there."""
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Restrictions on their use, and reasons why GPUs of the machine cannot be used; each is a sentence for the log."""


def find_gpus(
    root: Path,
    environment: Mapping[str, str],
    *,
    torch_cuda: str | None = None,
    ask_torch: Sequence[str] = _ASK_TORCH,
    patience: float = PATIENCE,
    torch_patience: float = TORCH_PATIENCE,
) -> Gpus:
    """Find the GPUs that this process may use. `root`: root directory of the files to read; `torch_cuda`: CUDA version
    of the torch build, `""` for a CPU build, None: look it up. Raises nothing."""
    program = _find_program(root, environment)
    listed, failure = _ask_driver(program, patience)
    trace = "nvidia-smi" if listed or failure == _HANGS else _trace(root)
    if trace is None:
        return Gpus()  # no GPU, with or without `nvidia-smi`
    here = _counted(len(listed)) if listed else f"a GPU ({trace})"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Gpus(notes=(f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides {here} of this machine",))
    if (built_for() if torch_cuda is None else torch_cuda) == "":
        return _unusable(here, "torch is a build for CPUs; install one for CUDA")
    if listed:
        return _visible(listed, visible)
    if failure == _HANGS:
        return _unusable("a GPU", f"its driver hangs: nvidia-smi gave no answer for {patience:g} s")
    found, why = _ask(ask_torch, torch_patience)
    if not found:
        return _unusable(here, f"{failure}; torch: {why}")
    return Gpus(
        tuple(memory for _, memory in found),
        tuple(name for name, _ in found),
        (
            f"{failure}; torch sees {_counted(len(found))} nevertheless. Workers whose libraries query GPUs on import "
            "(diffusers does) cannot start like this: a container needs "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
    )


def built_for() -> str:
    """Return the CUDA (or ROCm) version that the installed torch was built for; "" for a CPU build. It comes from
    torch's version file, because the control plane does not import torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    written = Path(spec.origin).with_name("version.py")
    for line in ast.parse(written.read_text()).body if written.is_file() else []:
        if not isinstance(line, ast.AnnAssign | ast.Assign):
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if names & {"cuda", "hip"} and isinstance(line.value, ast.Constant) and line.value.value is not None:
            return str(line.value.value)
    return ""


@dataclass(frozen=True, slots=True)
class _Listed:
    index: str
    uuid: str
    memory: int
    divided: bool
    """Divided into MIG instances."""
    name: str


def _find_program(root: Path, environment: Mapping[str, str]) -> str | None:
    """Find `nvidia-smi`; under WSL, a service does not have its directory on PATH."""
    paths = (environment.get("PATH", os.defpath), str(root / _WSL_PROGRAMS))
    return shutil.which("nvidia-smi", path=os.pathsep.join(paths))


def _ask_driver(program: str | None, patience: float) -> tuple[list[_Listed], str]:
    """Return the GPUs that `nvidia-smi` lists, or none and the reason."""
    if program is None:
        return [], "nvidia-smi is missing: the driver is not installed, or the container lacks its tools"
    status, out = _run((program, *_QUERY), patience)
    if status is None:
        return [], _HANGS
    rows = [[cell.strip() for cell in line.split(",", 4)] for line in out.splitlines() if line.count(",") >= 4]
    # "[N/A]" if the GPU has no memory of its own
    listed = [
        _Listed(index, uuid, int(mib) * MiB if mib.isdigit() else 0, mig == "Enabled", name)
        for index, uuid, mib, mig, name in rows
        if index.isdigit()  # other lines are warnings with commas
    ]
    if listed:  # with any status: 14 warns of a damaged infoROM, but the GPUs work
        return listed, ""
    return [], f"nvidia-smi failed: {_last_line(out) or f'exit status {status}'}" if status else _LISTS_NONE


def _visible(listed: list[_Listed], visible: str | None) -> Gpus:
    """Return the GPUs that CUDA shows to a process under CUDA_VISIBLE_DEVICES. NVIDIA's MIG User Guide, "Device
    Enumeration": CUDA shows at most one MIG instance, and then no whole GPU."""
    if visible is None:
        return _gpus(listed)
    chosen: list[_Listed] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.startswith(_INSTANCE):
            return Gpus((0,), (f"{_INSTANCE_NAME} ({name})",))
        found = [gpu for gpu in listed if name in (gpu.index, gpu.uuid) or _begins(gpu.uuid, name)]
        if len(found) != 1:  # like CUDA, which also ignores all names after an unknown one
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in listed)
            return _gpus(
                chosen,
                f"CUDA_VISIBLE_DEVICES is {visible!r}, but {name!r} is not one of the machine's GPUs ({known}): CUDA "
                f"shows {_counted(len(chosen)) if chosen else 'no GPU'}",
            )
        chosen += found
    return _gpus(chosen)


def _gpus(chosen: Sequence[_Listed], *notes: str) -> Gpus:
    if divided := [gpu.index for gpu in chosen if gpu.divided]:
        note = (
            f"GPU {', '.join(divided)} is divided into MIG instances; a process sees one of them, and no other GPU; "
            "CUDA_VISIBLE_DEVICES=MIG-… selects it (nvidia-smi -L lists them)"
        )
        return Gpus((0,), (_INSTANCE_NAME,), (*notes, note))
    return Gpus(tuple(gpu.memory for gpu in chosen), tuple(gpu.name for gpu in chosen), notes)


def _begins(uuid: str, name: str) -> bool:
    """Whether `name` is a shortened UUID of the GPU."""
    return len(name) > len(_WHOLE) and name.startswith(_WHOLE) and uuid.startswith(name)


def _unusable(what: str, why: str) -> Gpus:
    return Gpus(notes=(f"this machine has {what} that cannot be used: {why}",))


def _counted(number: int) -> str:
    return f"{number} GPU{'s' if number != 1 else ''}"


def _trace(root: Path) -> str | None:
    """Return the path or device that shows that there is a GPU; None: nothing does."""
    for pattern in ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "dev/dxg"):  # the last: of WSL
        if found := sorted(root.glob(pattern)):
            return f"/{found[0].relative_to(root)}"
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY):
            return f"PCI device {device.name}"
    return None


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _ask(command: Sequence[str], patience: float) -> tuple[list[tuple[str, int]], str]:
    """Return (name, bytes) of the GPUs that torch can use, or the reason why there are none."""
    status, out = _run(command, patience)
    if status is None:
        return [], f"no answer for {patience:g} s: the driver hangs"
    said = _last_line(out)
    if status:
        return [], said or f"exit status {status}"
    try:
        return [(str(name), int(memory)) for name, memory in json.loads(said)], "sees none"
    except (ValueError, TypeError):
        return [], f"an answer that is not JSON: {said!r}"


def _run(command: Sequence[str], patience: float) -> tuple[int | None, str]:
    """Return (exit status, output and errors); the status is None if the process gave no answer in time. A process that
    hangs in the driver cannot be killed and is left behind."""
    read, write = os.pipe()
    with open(read, errors="replace") as output:
        try:
            with open(write, "wb") as end:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=end, stderr=end, start_new_session=True
                )
        except OSError as error:
            return 1, f"{command[0]}: {error.strerror}"
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            return None, ""
        return status, output.read()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
