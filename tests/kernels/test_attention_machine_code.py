"""What nvcc makes of attention's forward: products on the tensor cores, fragments and tiles in single instructions."""

import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "megalite" / "csrc"
NVCC = shutil.which("nvcc")
# The low 12 bits of an instruction, sm_80 to sm_90: a product on the tensor cores, ldmatrix, cp.async of 16 bytes.
HMMA, LDSM, LDGSTS = 0x23C, 0x83B, 0xFAE


def _instructions(cubin: bytes) -> dict[str, Counter[int]]:
    """Kernel -> how often each operation stands in it: the sections .text.* of an ELF file, 16 bytes an instruction."""
    first, size, count, names = (
        struct.unpack_from(kind, cubin, at)[0]
        for kind, at in (("<Q", 0x28), ("<H", 0x3A), ("<H", 0x3C), ("<H", 0x3E))
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + number * size) for number in range(count)]
    found = {}
    for name_at, _, _, _, offset, length in sections:
        begin = sections[names][4] + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            words = struct.iter_unpack("<QQ", cubin[offset : offset + length])
            found[name.removeprefix(".text.")] = Counter(low & 0xFFF for low, _ in words)
    return found


@pytest.mark.skipif(
    NVCC is None, reason="LOUD: nvcc is not in PATH, so no machine code of attention was looked at"
)
def test_the_forward_is_made_of_tensor_core_products(tmp_path: Path) -> None:
    cubin = tmp_path / "forward.cubin"
    command = [str(NVCC), "-std=c++20", "-O3", "-I.", "-arch=sm_90a", "-cubin", "-o", str(cubin)]
    subprocess.run([*command, "cuda/attention_forward_128.cu"], cwd=CSRC, check=True, capture_output=True)
    kernels = _instructions(cubin.read_bytes())
    assert len(kernels) == 2, "one for each 16-bit type"
    for counts in kernels.values():
        # A warp's probabilities [32, 64] times values [64, 128], unrolled in whole: 2 x 4 x 16 products of 16 x 16 x 8
        # and 4 x 8 ldmatrix of 16 x 16; to that comes the product of the scores, unrolled twice.
        assert counts[HMMA] >= 2 * 4 * 16 + 32 and counts[LDSM] >= 4 * 8 + 12
        # 128 rows of queries, twice 64 of keys and 64 of values, 8 of them by an instruction of each thread.
        assert counts[LDGSTS] >= (128 + 2 * 64 + 64) // 8
