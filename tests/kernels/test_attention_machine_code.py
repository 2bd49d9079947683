"""Machine code of attention's forward: mma.sync, ldmatrix and cp.async as single instructions.

For compute capability 9.0: wgmma, TMA and mbarriers, in an order in which the softmax overlaps with products.
"""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.machine_code import LDL, STG, STL, Words, words_of

CSRC = Path(__file__).parents[2] / "megalite" / "csrc"
NVCC = shutil.which("nvcc")
# The low 12 bits of instructions, sm_80 to sm_90: mma.sync, ldmatrix, cp.async of 16 bytes.
HMMA, LDSM, LDGSTS = 0x23C, 0x83B, 0xFAE
# The low 9 bits of instructions of sm_90a (the next three give the operand kinds): wgmma; wgmma.fence, commit and wait
# (bit 47: wait; bits 72 to 79: the number of groups that may stay pending); TMA copy; mbarrier init, and arrive or
# wait; setmaxnreg; exp2.
HGMMA, WARPGROUP, UTMALDG, SYNCS, USETMAXREG = 0x1F0, 0x1C5, 0x1B4, (0x1B2, 0x1A7), 0x1C8
MUFU = 0x108


def _compiled(name: str, folder: Path) -> tuple[dict[str, Words], str]:
    """Return the machine code of cuda/<name>.cu for sm_90a, and the compiler's output."""
    cubin = folder / f"{name}.cubin"
    command = [
        str(NVCC),
        "-std=c++20",
        "-O3",
        "-I.",
        "-arch=sm_90a",
        "-Xptxas=-v",
        "-cubin",
        "-o",
        str(cubin),
    ]
    done = subprocess.run([*command, f"cuda/{name}.cu"], cwd=CSRC, check=True, capture_output=True, text=True)
    return words_of(cubin.read_bytes()), done.stdout + done.stderr


needs_nvcc = pytest.mark.skipif(
    NVCC is None, reason="LOUD: nvcc is not in PATH, so no machine code of attention was looked at"
)


@needs_nvcc
def test_the_forward_is_made_of_tensor_core_products(tmp_path: Path) -> None:
    kernels, _ = _compiled("attention_forward_128", tmp_path)
    assert len(kernels) == 2, "one for each 16-bit type"
    for words in kernels.values():
        counts = Counter(low & 0xFFF for low, _ in words)
        # A warp's probabilities [32, 64] times values [64, 128], completely unrolled: 2 x 4 x 16 products of
        # 16 x 16 x 8 and 4 x 8 ldmatrix of 16 x 16; plus the product of the scores, unrolled twice.
        assert counts[HMMA] >= 2 * 4 * 16 + 32 and counts[LDSM] >= 4 * 8 + 12
        # 128 rows of queries, twice 64 rows of keys and 64 of values; one instruction of all threads copies 8 rows.
        assert counts[LDGSTS] >= (128 + 2 * 64 + 64) // 8


@needs_nvcc
@pytest.mark.parametrize("head_size", [64, 128])
def test_on_hopper_the_softmax_goes_on_beside_products_of_warp_groups(head_size: int, tmp_path: Path) -> None:
    kernels, said = _compiled(f"attention_hopper_{head_size}", tmp_path)
    assert len(kernels) == 2, "one for each 16-bit type"
    # ptxas complains if it serialises products, ignores setmaxnreg, or injects wgmma fences.
    for complaint in ("Potential Performance Loss", "serialized", "setmaxnreg", "injected"):
        assert complaint not in said, said
    for words in kernels.values():
        counts = Counter(low & 0x1FF for low, _ in words)
        assert not counts[LDL] and not counts[STL], "local memory"
        # Products of depth 16: of scores before and in the loop, of values in the loop and after it.
        assert counts[HGMMA] == 2 * (head_size // 16) + 2 * (128 // 16)
        # Boxes of 64 columns: queries of each warpgroup, the first keys, the next keys, values.
        assert counts[UTMALDG] == (head_size // 64) * ((2 if head_size == 128 else 3) + 3)
        assert counts[USETMAXREG] == 2 and all(counts[each] for each in SYNCS)
        # A warp's 16 rows in 16-byte stores, and two log-sum-exps.
        assert counts[STG] == 16 * head_size * 2 // (32 * 16) + 2
        assert _between_waits(words) >= 64, "the probabilities of 64 x 128 scores, of 128 threads"


def _between_waits(words: Words) -> int:
    """Return the number of exp2 in the loop between the wait for the scores and the wait for all products."""
    waits = [i for i, (low, _) in enumerate(words) if low & 0x1FF == WARPGROUP and low >> 47 & 1]
    [first] = [i for i in waits if words[i][1] >> 8 & 0xFF == 1]
    last = waits[waits.index(first) + 1]
    assert words[last][1] >> 8 & 0xFF == 0
    return sum(low & 0x1FF == MUFU for low, _ in words[first:last])
