"""The machine's GPUs as the driver's program, its files and torch describe them; the programs are scripts of ours."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.machine.account import account, cautions
from segue.graph.machine.gpus import Gpus, built_for, find_gpus
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

TWO = "0, GPU-aa, 81559, [N/A], NVIDIA H100 80GB HBM3\\n1, GPU-bb, 40960, Disabled, NVIDIA A100-PCIE-40GB\\n"
DIVIDED = TWO.replace("Disabled", "Enabled")
MISSING = "nvidia-smi is missing"


class Machine:
    """Files, a program called nvidia-smi and one in torch's place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "bin"
        self.programs.mkdir()
        self.torch: tuple[str, ...] = (sys.executable, "-c", "raise SystemExit('torch must not be asked')")

    def driver(self, body: str) -> None:
        path = self.programs / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def lists(self, output: str) -> None:
        self.driver(f"printf '{output}'")

    def has(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def find(self, torch_cuda: str = "13.0", patience: float = 20.0, **environment: str) -> Gpus:
        return find_gpus(
            self.root,
            {"PATH": str(self.programs), **environment},
            torch_cuda=torch_cuda,
            ask_torch=self.torch,
            patience=patience,
            torch_patience=patience,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("visible", "mib", "note"),
    [
        (None, (81559, 40960), None),
        ("1,0", (40960, 81559), None),
        ("GPU-bb", (40960,), None),
        ("GPU-b,0", (40960, 81559), None),
        ("MIG-cc", (0,), None),
        ("", (), "CUDA_VISIBLE_DEVICES is '', which hides 2 GPUs of this machine"),
        ("-1", (), "CUDA_VISIBLE_DEVICES is '-1', which hides 2 GPUs"),
        ("GPU-,0", (), r"'GPU-' is not one of the machine's GPUs \(0 \(GPU-aa\), 1 \(GPU-bb\)\): CUDA shows no GPU"),
        ("0,7,1", (81559,), "is '0,7,1', but '7' is not one of the machine's GPUs .*: CUDA shows 1 GPU$"),
    ],
)
def test_what_cuda_shows(machine: Machine, visible: str | None, mib: tuple[int, ...], note: str | None) -> None:
    machine.lists(TWO)
    found = machine.find(**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert found.memory == tuple(size << 20 for size in mib)
    assert len(found.names) == len(mib)
    if note is None:
        assert found.notes == ()
    else:
        assert [line for line in found.notes if re.search(note, line)] == list(found.notes) != []


def test_names_and_memory_that_is_not_told(machine: Machine) -> None:
    machine.lists(TWO)
    assert machine.find().names == ("NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-40GB")
    machine.lists("0, GPU-aa, [N/A], [N/A], NVIDIA GB10\\n")
    assert machine.find().memory == (0,)


def test_a_list_with_a_warning_is_a_list(machine: Machine) -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:01:00.0, serial 1, board 2, part 3, see 4"
    machine.driver(f"printf '{TWO}'; echo '{warning}'; exit 14")
    found = machine.find()
    assert found.memory == (81559 << 20, 40960 << 20)
    assert found.notes == ()


def test_wsl_without_its_programs_on_path(machine: Machine) -> None:
    machine.programs = machine.root / "usr/lib/wsl/lib"
    machine.programs.mkdir(parents=True)
    machine.lists(TWO)
    assert machine.find(PATH=str(machine.root / "bin")).memory == (81559 << 20, 40960 << 20)


@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_instances(machine: Machine, visible: dict[str, str]) -> None:
    machine.lists(DIVIDED)
    found = machine.find(**visible)
    assert found.memory == (0,), "one instance, whose memory its worker asks for"
    assert "GPU 1 is divided into MIG instances" in found.notes[0]


def test_a_machine_without_a_gpu(machine: Machine) -> None:
    assert machine.find() == Gpus()
    machine.driver("echo NVIDIA-SMI has failed; exit 9")  # the program came with a package
    assert machine.find() == Gpus()
    machine.has("sys/bus/pci/devices/0000:01:00.0/vendor", "0x8086\n")
    machine.has("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    assert machine.find() == Gpus()


def test_a_driver_that_hangs(machine: Machine) -> None:
    machine.driver("exec sleep 600")
    began = time.monotonic()
    found = machine.find(patience=0.3)
    assert time.monotonic() - began < 60
    assert found.memory == ()
    assert found.notes == (
        "this machine has a GPU that cannot be used: its driver hangs: nvidia-smi gave no answer for 0.3 s",
    )


@pytest.mark.parametrize("trace", ["proc/driver/nvidia/gpus/0000:01:00.0/information", "dev/nvidia0", "dev/dxg"])
def test_a_container_without_nvml(machine: Machine, trace: str) -> None:
    """Its device files are there: torch is asked, in a process of its own."""
    machine.has(trace)
    machine.torch = (sys.executable, "-c", "print('a warning'); print('[[\"NVIDIA L4\", 24000000000]]')")
    found = machine.find()
    assert (found.memory, found.names) == ((24_000_000_000,), ("NVIDIA L4",))
    assert found.notes[0].startswith(MISSING)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in found.notes[0]


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        (
            "raise RuntimeError('The NVIDIA driver on your system is too old')",
            "torch: RuntimeError: The NVIDIA driver on",
        ),
        ("print('[]')", "torch: sees none"),
        ("print('gibberish')", "torch: an answer that is not JSON: 'gibberish'"),
        pytest.param(
            "import time; time.sleep(600)", "torch: no answer for 2 s: the driver hangs", marks=pytest.mark.slow
        ),
    ],
)
def test_torch_can_use_none(machine: Machine, torch: str, why: str) -> None:
    machine.has("dev/nvidia0")
    machine.driver("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    machine.torch = (sys.executable, "-c", torch)
    found = machine.find(patience=2)
    assert found.memory == ()
    [note] = found.notes
    assert note.startswith(
        "this machine has a GPU (/dev/nvidia0) that cannot be used: nvidia-smi failed: Failed to init"
    )
    assert why in note


def test_a_gpu_without_a_driver(machine: Machine) -> None:
    machine.has("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    machine.has("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    machine.torch = (sys.executable, "-c", "print('[]')")
    [note] = machine.find().notes
    assert "a GPU (PCI device 0000:01:00.0) that cannot be used: nvidia-smi is missing" in note


def test_torch_for_cpus(machine: Machine) -> None:
    machine.lists(TWO)
    assert machine.find(torch_cuda="") == Gpus(
        notes=("this machine has 2 GPUs that cannot be used: torch is a build for CPUs; install one for CUDA",)
    )


def test_what_the_installed_torch_was_built_for() -> None:
    torch = pytest.importorskip("torch")
    assert built_for() == (torch.version.cuda or torch.version.hip or "")


UNUSABLE = Hardware(8, 1 << 34, gpu_notes=("this machine has a GPU that cannot be used: its driver hangs",))


def test_the_cpu_is_never_taken_silently(graph: StageGraph) -> None:
    plan = load_plan(graph, hardware=UNUSABLE)
    assert cautions(plan) == [f"{UNUSABLE.gpu_notes[0]}; stages run on the CPU, in float32 unless configured otherwise"]
    assert "on cpu (no GPU can be used), float32" in account(plan)[1]
    assert account(plan)[0] == "found 8 CPU cores, 16.0 GiB of memory; no GPU that can be used"
    assert cautions(load_plan(graph, {"defaults": {"devices": "cpu"}}, hardware=UNUSABLE)) == [], "it is meant so"
    with pytest.raises(ConfigError, match=r"names 'cuda:0', but this process can use no GPU .*its driver hangs"):
        load_plan(graph, {"defaults": {"devices": "cuda:0"}}, hardware=UNUSABLE)


def test_why_each_stage_runs_where_it_does(fused_graph: StageGraph, two_gpus: Hardware) -> None:
    deployment = {"defaults": {"dtype": "float16"}, "stages": {"talker": {"devices": "cuda:1", "memory_share": 0.25}}}
    lines = account(load_plan(fused_graph, deployment, hardware=two_gpus))
    assert lines == [
        "found 16 CPU cores, 128.0 GiB of memory; cuda:0 a GPU (80.0 GiB), cuda:1 a GPU (80.0 GiB)",
        "encoder + thinker: on cuda:0 (the least loaded GPU), float16 (defaults.dtype), 89.9% of its memory = "
        "71.9 GiB (its share by kind of stage)",
        "talker: on cuda:1 (stages.talker.devices), float16 (defaults.dtype), 25.0% of its memory = 20.0 GiB "
        "(stages.talker.memory_share)",
        "vocoder: on cuda:1 (the least loaded GPU), float16 (defaults.dtype), 65.0% of its memory = 52.0 GiB "
        "(its share by kind of stage)",
    ]
