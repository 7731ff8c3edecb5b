"""Describe in a few lines the hardware found, and why each stage runs on its device."""

from __future__ import annotations

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.stage_plan import CPU
from segue.graph.parts import is_built_in
from segue.messages.addresses import SERVER

GiB = 1 << 30


def account(plan: Plan) -> list[str]:
    """Return one line about the machine and about each described node, then one about each worker."""
    workers = [group for group in plan.groups if not all(map(is_built_in, group))]
    nodes = [f"node {name} is to have {described(hardware)}" for name, hardware in plan.hosts.items()]
    return [f"found {described(plan.hardware)}", *nodes, *(_worker(plan, group) for group in workers)]


def cautions(plan: Plan) -> list[str]:
    """Return the problems of the machine's GPUs; none if the deployment sets the devices of every stage."""
    if all("devices" in plan.said.get(name, {}) for name in plan.stages if not is_built_in(name)):
        return []
    on_cpu = all(stage.devices == (CPU,) for stage in plan.stages.values())
    then = "; stages run on the CPU, in float32 unless configured otherwise" if on_cpu else ""
    return [f"{note}{then}" for note in plan.hardware.gpu_notes]


def described(hardware: Hardware) -> str:
    """Return the cores, memory and GPUs of a host as text."""
    names = [*hardware.gpu_names, *["a GPU"] * (len(hardware.gpus) - len(hardware.gpu_names))]
    gpus = [
        f"cuda:{number} {name} ({_size(size) if size else 'memory not known yet'})"
        for number, (name, size) in enumerate(zip(names, hardware.gpus, strict=True))
    ]
    cores = f"{hardware.cpus} CPU core{'s' if hardware.cpus != 1 else ''}"
    unusable = "no GPU that can be used" if hardware.gpu_notes else "no GPU"
    return f"{cores}, {_size(hardware.memory_bytes)} of memory; {', '.join(gpus) or unusable}"


def _worker(plan: Plan, group: tuple[str, ...]) -> str:
    stages = [plan.stages[name] for name in group]
    said: dict[str, str] = {}
    for name in group:
        said = {**plan.said.get(name, {}), **said}
    first = stages[0]
    gpu = first.devices != (CPU,)
    auto = "the least loaded GPU" if gpu else "no GPU can be used" if plan.hardware.gpu_notes else "no GPU"
    where = "" if first.node == (SERVER,) else f" of {', '.join(first.node)}"
    kind = "a GPU" if gpu else "a CPU"
    dtypes = ", ".join(dict.fromkeys(stage.dtype for stage in stages))
    share = sum(stage.memory_share for stage in stages)
    size = sum(stage.memory_bytes for stage in stages)
    memory = f"{share:.1%} of its memory" + (f" = {_size(size)}" if size else "")
    replicas = f" x {first.replicas} replicas" if first.replicas > 1 else ""
    if first.scaling is not None:
        replicas = f" x {first.scaling.least} to {first.scaling.most} replicas"
    return (
        f"{' + '.join(group)}: on {', '.join(first.devices)}{where} ({said.get('devices', auto)}), "
        f"{dtypes} ({said.get('dtype', f'default on {kind}')}), "
        f"{memory} ({said.get('memory_share', 'its share by kind of stage')}){replicas}"
    )


def _size(count: int) -> str:
    return f"{count / GiB:.1f} GiB"
