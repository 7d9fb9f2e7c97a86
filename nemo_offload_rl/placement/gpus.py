"""Reads the GPUs of this machine and their PCIe links from nvidia-smi and sysfs."""

import csv
import logging
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_offload_rl.memory.numa import gpu_numa_node, normalize_pci_bus_id, read_text

logger = logging.getLogger(__name__)

# PCI Express: generations by a lane's transfers in GT/s, and how many lanes a link may have.
_GENERATION_OF_SPEED = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_SMI_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "driver_version",
)
_SMI_TIMEOUT_S = 60  # without persistence mode the driver initialises every GPU first


@dataclass(frozen=True)
class GpuFacts:
    """Describes a GPU with values of the driver and sysfs; None for values that neither reports.

    Attributes:
        index: The driver's index, independent of CUDA_VISIBLE_DEVICES.
        name: The product's name.
        uuid: The driver's identifier, such as GPU-1e2d...
        pci_bus_id: The PCI address as sysfs spells it.
        total_bytes: GPU memory.
        link_generation: PCI Express generation that the link runs at now; an idle GPU may lower it.
        link_width: Lanes in use.
        max_link_generation: The highest PCI Express generation that the GPU supports.
        max_link_width: Lanes that the GPU has.
        numa_node: The nearest NUMA node with CPUs.
    """

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    total_bytes: int | None
    link_generation: int | None
    link_width: int | None
    max_link_generation: int | None
    max_link_width: int | None
    numa_node: int | None


def gpu_facts(sysfs: Path = Path("/sys")) -> tuple[GpuFacts, ...]:
    """Returns this machine's GPUs: from nvidia-smi or, if that is not available, the GPUs that torch sees.

    Args:
        sysfs: Where sysfs is mounted.
    """
    rows = _query_nvidia_smi()
    gpus = _gpus_of_torch() if rows is None else [_gpu_of_row(row) for row in rows]
    return tuple(_with_sysfs(gpu, sysfs) for gpu in gpus)


def driver_version(sysfs: Path = Path("/sys")) -> str | None:
    """Returns the version of the NVIDIA kernel driver; None if no driver is loaded or visible."""
    version = read_text(sysfs / "module/nvidia/version")
    if version is None:
        version = next((row["driver_version"] for row in _query_nvidia_smi() or ()), None)
    return version


def torch_pci_bus_id(index: int) -> str:
    """Returns the PCI address, as sysfs spells it, of the GPU with this index in torch."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI fields
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _query_nvidia_smi() -> list[dict[str, str]] | None:
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return None
    command = [executable, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi gives no answer: %s", error)
        return None
    rows = csv.DictReader(done.stdout.splitlines(), fieldnames=_SMI_FIELDS, skipinitialspace=True)
    # A line with fewer fields is a message, such as "No devices were found".
    return [row for row in rows if row["driver_version"] is not None]


def _gpu_of_row(row: dict[str, str]) -> GpuFacts:
    total_mib = _number(row["memory.total"])
    return GpuFacts(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        pci_bus_id=normalize_pci_bus_id(row["pci.bus_id"]),
        total_bytes=None if total_mib is None else total_mib << 20,
        link_generation=_number(row["pcie.link.gen.current"]),
        link_width=_number(row["pcie.link.width.current"]),
        max_link_generation=_number(row["pcie.link.gen.max"]),
        max_link_width=_number(row["pcie.link.width.max"]),
        numa_node=None,
    )


def _gpus_of_torch() -> list[GpuFacts]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        GpuFacts(
            index=index,
            name=gpu.name,
            uuid=f"GPU-{gpu.uuid}",
            pci_bus_id=torch_pci_bus_id(index),
            total_bytes=gpu.total_memory,
            link_generation=None,
            link_width=None,
            max_link_generation=None,
            max_link_width=None,
            numa_node=None,
        )
        for index, gpu in enumerate(properties)
    ]


def _with_sysfs(gpu: GpuFacts, sysfs: Path) -> GpuFacts:
    """Adds values from sysfs to those that the driver reports of a GPU.

    The driver's "max" is the maximum of GPU and slot together, which hides a slot with too few lanes. sysfs has the
    maximum of the GPU alone, and so takes precedence.
    """
    device = sysfs / "bus/pci/devices" / gpu.pci_bus_id
    return replace(
        gpu,
        link_generation=gpu.link_generation or _generation(device / "current_link_speed"),
        link_width=gpu.link_width or _num_lanes(device / "current_link_width"),
        max_link_generation=_generation(device / "max_link_speed") or gpu.max_link_generation,
        max_link_width=_num_lanes(device / "max_link_width") or gpu.max_link_width,
        numa_node=gpu_numa_node(gpu.pci_bus_id, sysfs),
    )


def _generation(path: Path) -> int | None:
    words = (read_text(path) or "").split()  # "32.0 GT/s PCIe", or "Unknown"
    return _GENERATION_OF_SPEED[words[0]] if words and words[0] in _GENERATION_OF_SPEED else None


def _num_lanes(path: Path) -> int | None:
    lanes = _number(read_text(path))
    return lanes if lanes in _LINK_WIDTHS else None  # 0 or 255: not known


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
