"""Names of devices: the same in every process, and different for different devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_recv import identity
from sglang_recv.errors import UnsupportedError
from sglang_recv.identity import boot_id, device_id

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
ROOT = Path(__file__).resolve().parents[2]


def test_boot_id_is_the_kernels() -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert re.fullmatch(UUID, boot_id())


@pytest.mark.parametrize("content", [None, "", "not a uuid\n"])
def test_unreadable_boot_id_is_refused(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "boot_id"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(identity, "_BOOT_ID", path)
    boot_id.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=re.escape(str(path))):
            boot_id()
    finally:
        boot_id.cache_clear()


def test_cpu_id_names_host_and_rank() -> None:
    assert device_id(torch.device("cpu")) == f"cpu:{boot_id()}:0"
    assert device_id(torch.device("cpu", 0), rank=3) == f"cpu:{boot_id()}:3"


def test_cpu_id_is_the_same_in_another_process() -> None:
    script = "import torch; from sglang_recv.identity import device_id; print(device_id(torch.device('cpu'), 2))"
    seen = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == device_id(torch.device("cpu"), 2)


def test_other_device_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'meta'"):
        device_id(torch.device("meta"))


def test_absent_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        device_id(torch.device("cuda", 0))


@pytest.mark.gpu
def test_gpu_id_is_the_uuid_whatever_the_ordinal() -> None:
    name = device_id(torch.device("cuda", 0))
    assert re.fullmatch(f"gpu:{UUID}", name)
    assert device_id(torch.device("cuda", 0), rank=5) == name
    with torch.cuda.device(0):
        assert device_id(torch.device("cuda")) == name


@pytest.mark.gpu
def test_absent_ordinal_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match=f"sees {count} CUDA devices"):
        device_id(torch.device("cuda", count))
