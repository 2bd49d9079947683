"""Attention on an accelerator: each backend's numbers, what it allocates, and that it never waits for the device."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops import attention_backends as backends
from megalite.ops import chunked_attention
from megalite.ops.attention import causal_attention, document_cu_seqlens, documents_seen
from megalite.ops.attention_backends import BACKENDS, CANDIDATES, attend_on_device, backend_for
from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import Operators
from megalite.ops.documents import CuSeqlens, longest_document, numbered, packed_cu_seqlens, row_cu_seqlens
from tests.support.attention import WaitsRefused
from tests.support.flash import fake_flash_attn, fake_newer_flash, flash_kernels
from tests.support.parity import assert_close

BY_NAME = {each.name: each for each in (*BACKENDS, *CANDIDATES)}
HEADS, KV_HEADS, SIZE = 4, 2, 8


@contextmanager
def installed(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Let these modules be imported; `mock.patch.dict` would drop those that torch imports meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        for name, module in modules.items():
            patched.setitem(sys.modules, name, module)
        yield


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    """The packages that no test machine has."""
    with flash_kernels(), installed(fake_flash_attn()):
        yield


def _heads(rows: int, new: int, total: int, seed: int = 3) -> list[Tensor]:
    """Views of one projection where there are as many queries as keys, as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    if new == total:
        packed = torch.randn(rows, new, sum(counts), SIZE, dtype=torch.float64, generator=generator)
        return [each.requires_grad_() for each in packed.split(counts, dim=2)]
    return [
        torch.randn(rows, length, heads, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        for length, heads in zip((new, total, total), counts, strict=True)
    ]


def _ids(rows: list[list[int]]) -> Tensor:
    """Documents of these lengths, each row filled up to the longest row by one more."""
    length = max(map(sum, rows)) + 1
    filled = [[*row, length - sum(row)] for row in rows]
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in filled])


def _plain(heads: list[Tensor], ids: Tensor | None, window: int | None, softcap: float | None) -> Tensor:
    """All probabilities written out."""
    query, key, value = heads
    (new, total), group = (query.shape[1], key.shape[1]), query.shape[2] // key.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(group, 2)) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(total - new, total).unsqueeze(1) - torch.arange(total)
    seen = (distance >= 0) & (distance < (total if window is None else window))
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, value.repeat_interleave(group, 2))


def _assert_same(name: str, heads: list[Tensor], ids: Tensor | None = None, **how: float | None) -> None:
    window, softcap = how.get("window"), how.get("softcap")
    expected = _plain(heads, ids, window, softcap)  # type: ignore[arg-type]
    documents = None if ids is None else packed_cu_seqlens(row_cu_seqlens(ids), ids.shape[1])
    form = AttentionForm(window, documents, scale=0.3, softcap=softcap)  # type: ignore[arg-type]
    found = BY_NAME[name].attend(*heads, form)
    assert_close(found, expected, what=name)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    # Together: the gradient of queries that see one key is zero up to rounding.
    ours, theirs = (
        torch.cat([grad.flatten() for grad in torch.autograd.grad((each * weights).sum(), heads)])
        for each in (found, expected)
    )
    assert_close(ours, theirs, what=f"gradients of {name}")


ROWS = st.lists(st.lists(st.integers(1, 20), min_size=0, max_size=5), min_size=1, max_size=3)


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "chunked"])
@settings(max_examples=12)
@given(rows=ROWS, window=st.none() | st.integers(1, 40), chunk=st.sampled_from([1, 2**20]))
def test_documents_and_windows_are_those_of_probabilities_written_out(name, rows, window, chunk) -> None:
    ids = _ids(rows)
    with mock.patch.object(chunked_attention, "_CPU_SCORES", chunk):
        _assert_same(name, _heads(len(rows), ids.shape[1], ids.shape[1]), ids, window=window)


@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize(("new", "total"), [(70, 70), (1, 90), (5, 90), (33, 34)])
@pytest.mark.parametrize("name", ["varlen", "flash_attn", "chunked"])
def test_queries_stand_at_the_end_of_their_keys(name, new, total, window) -> None:
    _assert_same(name, _heads(2, new, total), window=window)


@pytest.mark.parametrize(("new", "total", "window"), [(70, 70, None), (1, 90, None), (1, 90, 1), (1, 90, 7)])
@pytest.mark.parametrize("in_groups", [(torch.float64,), ()], ids=["in groups", "repeated"])
def test_sdpa(new, total, window, in_groups) -> None:
    with mock.patch.object(backends, "LOW_PRECISION", in_groups):
        _assert_same("sdpa", _heads(2, new, total), window=window)


@pytest.mark.parametrize("name", ["flash_attn", "chunked"])
@pytest.mark.parametrize("window", [None, 9])
def test_soft_caps(name, window) -> None:
    ids = _ids([[30, 1, 50], [81]])
    _assert_same(name, _heads(2, 82, 82), ids, window=window, softcap=0.7)
    _assert_same(name, _heads(2, 5, 60), window=window, softcap=0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_are_no_less_accurate_in_low_precision(dtype, softcap) -> None:
    """Than the same probabilities at once, which round where torch's own operators do."""
    exact = _heads(2, 100, 100)
    low = [each.detach().to(dtype).requires_grad_() for each in exact]
    weights = torch.randn(
        2, 100, HEADS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    form = AttentionForm(40, scale=0.3, softcap=softcap)
    found, whole = BY_NAME["chunked"].attend(*low, form), _plain(low, None, 40, softcap)
    rounded = [each.detach().double().requires_grad_() for each in low]
    true = _plain(rounded, None, 40, softcap)
    for index, reference in enumerate([true, *torch.autograd.grad(true, rounded, weights)]):
        ours, theirs = (
            [each, *torch.autograd.grad(each, low, weights.to(dtype), retain_graph=True)][index]
            for each in (found, whole)
        )
        errors = [(each.double() - reference).norm() for each in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1], f"tensor {index}"


class Recorder(WaitsRefused):
    """Records the largest output."""

    largest = 0

    def created(self, name: str, tensor: Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())


LENGTH = 1024
ON_DEVICE = [
    (dtype, window, documents, softcap)
    for dtype in (torch.bfloat16, torch.float32)
    for window in (None, 100)
    for documents in (False, True)
    for softcap in (None, 50.0)
    if window or documents or softcap
]


@pytest.mark.parametrize(("dtype", "window", "documents", "softcap"), ON_DEVICE)
def test_on_a_device_nothing_is_as_large_as_a_mask_and_the_host_never_waits(
    dtype, window, documents, softcap
) -> None:
    """Forward and backward, of grouped heads, on a device without data: whoever asks for a number has none."""
    query, key, value = (
        torch.empty(2, LENGTH, heads, SIZE, dtype=dtype, device="meta", requires_grad=True)
        for heads in (8, 2, 2)
    )
    columns = row_cu_seqlens(_ids([[300, 700], [20] * 50])).to("meta")
    # Pieces so small that one of all queries would be seen.
    with mock.patch.object(chunked_attention, "_DEVICE_SCORES", 2**18), Recorder() as recorder:
        starts = packed_cu_seqlens(columns, LENGTH) if documents else None
        attended = causal_attention(query, key, value, AttentionForm(window, starts, softcap=softcap))
        grads = torch.autograd.grad(attended, (query, key, value), torch.empty_like(attended))
    assert attended.shape == query.shape and attended.dtype == dtype
    assert [each.shape for each in grads] == [query.shape, key.shape, value.shape]
    assert recorder.largest < LENGTH**2
    assert ("_varlen_attn" in recorder.names) == (dtype == torch.bfloat16 and softcap is None)


def test_plain_causal_attention_gives_sdpa_groups_and_no_mask() -> None:
    sdpa = mock.Mock(side_effect=lambda query, *_, **how: query)
    query, key = (
        torch.empty(2, LENGTH, heads, SIZE, dtype=torch.bfloat16, device="meta") for heads in (8, 2)
    )
    with mock.patch.object(backends.F, "scaled_dot_product_attention", sdpa):
        with Recorder() as recorder:
            causal_attention(query, key, key)
            causal_attention(query[:, :1], key, key, AttentionForm(100))
        causal_attention(query.float(), key.float(), key.float())
    whole, one, wide = sdpa.call_args_list
    assert whole.args[1].shape == (2, 2, LENGTH, SIZE) and one.args[1].shape == (2, 2, 100, SIZE)
    assert [call.kwargs["is_causal"] for call in (whole, one)] == [True, False]
    assert all(call.kwargs["enable_gqa"] and "attn_mask" not in call.kwargs for call in (whole, one))
    assert recorder.largest == 0, "something was allocated"
    # The kernels for float32 know no groups.
    assert wide.args[1].shape == (2, 8, LENGTH, SIZE) and not wide.kwargs["enable_gqa"]


@given(rows=ROWS)
def test_documents_of_rows_are_those_of_their_ids(rows) -> None:
    ids = _ids(rows)
    columns = row_cu_seqlens(ids)
    starts = packed_cu_seqlens(columns, ids.shape[1])
    assert columns.shape == (len(rows), max(map(len, rows)) + 1) and starts.cu_seqlens.dtype == torch.int32
    assert starts.cu_seqlens.unique_consecutive().tolist() == document_cu_seqlens(ids).cu_seqlens.tolist()
    with mock.patch.object(Tensor, "item", side_effect=AssertionError("the host waits")):
        numbers = numbered(starts, *ids.shape)
    assert documents_seen(numbers).equal(documents_seen(ids))
    halves = [packed_cu_seqlens(piece, ids.shape[1]).cu_seqlens for piece in columns.split(1)]
    for row, piece in zip(ids, halves, strict=True):
        assert (
            piece.unique_consecutive().tolist() == document_cu_seqlens(row.unsqueeze(0)).cu_seqlens.tolist()
        )


@pytest.mark.parametrize("compiles", [False, True])
def test_attention_is_told_the_longest_document(compiles: bool) -> None:
    """Kernels start blocks for that many tokens of every document. A compiled layer has one number."""
    ids = _ids([[5, 2, 7], [3]])
    columns = row_cu_seqlens(ids)
    longest = longest_document(columns, ids.shape[1])
    assert longest == document_cu_seqlens(ids).max_seqlen == 12
    operators, on_device = Operators({}, compiles), ids.to("meta")
    for told, expected in ((longest, ids.shape[1] if compiles else longest), (None, ids.shape[1])):
        documents = operators.documents(
            on_device, columns.to("meta"), max_seqlen=told, dropout=False, softcap=None
        )
        assert isinstance(documents, CuSeqlens) and documents.max_seqlen == expected


def _asked(**changes: object) -> tuple[SimpleNamespace, SimpleNamespace, AttentionForm]:
    """A query and a key as far as a backend looks at them, and what is asked."""
    facts = {"device": "cuda", "dtype": torch.bfloat16, "new": 64, "total": 64, "size": 64} | changes
    query, key = (
        SimpleNamespace(
            device=torch.device(str(facts["device"])),
            dtype=facts["dtype"],
            shape=(1, length, 4, facts["size"]),
        )
        for length in (facts["new"], facts["total"])
    )
    form = {name: facts[name] for name in ("window", "documents", "softcap") if name in facts}
    return query, key, AttentionForm(**form)  # type: ignore[arg-type]


DOCUMENTS = CuSeqlens(torch.tensor([0, 3, 64], dtype=torch.int32), 64)


@pytest.mark.parametrize(
    ("asked", "chip", "serves"),
    [
        ({}, (8, 0), "sdpa"),
        ({"dtype": torch.float32}, (8, 0), "sdpa"),
        ({"documents": DOCUMENTS}, (8, 0), "varlen"),
        ({"window": 5}, (12, 0), "varlen"),
        ({"new": 1, "window": 5}, (9, 0), "sdpa"),
        ({"new": 3}, (9, 0), "varlen"),
        ({"window": 5, "size": 256}, (8, 6), "varlen"),
        ({"window": 5, "size": 264}, (9, 0), "chunked"),
        ({"window": 5, "size": 20}, (9, 0), "chunked"),
        ({"window": 5, "dtype": torch.float32}, (9, 0), "chunked"),
        ({"window": 5}, (7, 5), "chunked"),
        ({"softcap": 50.0}, (9, 0), "chunked"),
        ({"window": 5, "device": "xpu"}, None, "chunked"),
    ],
)
def test_who_serves(asked, chip, serves) -> None:
    on_cuda = mock.patch.object(backends, "_has_flash_kernel", lambda kind: kind == "cuda")
    with on_cuda, mock.patch.object(torch.cuda, "get_device_capability", lambda device: chip):
        assert backend_for(*_asked(**asked)).name == serves


@pytest.mark.parametrize(
    ("prefer", "asked", "chip", "why"),
    [
        ("flash_attn", {"softcap": 50.0}, (9, 0), ""),
        (
            "flash_attn",
            {"softcap": 50.0, "dtype": torch.float32},
            (9, 0),
            "for bfloat16 and float16, not float32",
        ),
        ("flash_attn", {"window": 3}, (7, 5), "for chips 8.0 and later, this one is 7.5"),
        ("flash_attn", {"window": 3, "device": "xpu"}, None, "no kernels for devices of type xpu"),
        ("FA3", {"window": 3}, (10, 0), "for chips 9.x, this one is 10.0"),
        ("FA3", {"window": 3}, (9, 0), "flash_attn_interface is not installed"),
        ("FA4", {"window": 3}, (8, 0), "for chips 9.x and 10.x, this one is 8.0"),
        ("FA4", {"window": 3}, (10, 0), "flash_attn.cute.interface is not installed"),
        ("cudnn", {"window": 3}, (9, 0), "a window takes a mask"),
    ],
)
def test_a_preferred_backend_serves_where_it_can(prefer, asked, chip, why) -> None:
    query, key, wanted = _asked(**asked)
    on_cuda = mock.patch.object(backends, "_has_flash_kernel", lambda kind: kind == "cuda")
    with on_cuda, mock.patch.object(torch.cuda, "get_device_capability", lambda device: chip):
        backend = BY_NAME[prefer]
        complaint = backend.why_not_on(query.device.type) + backend.why_not(query, key, wanted)
        assert why in complaint and bool(why) == bool(complaint)
        assert (backend_for(query, key, wanted, prefer) is backend) == (not why)


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        ("sdpa", {"documents": DOCUMENTS}, "documents take a mask"),
        ("varlen", {"softcap": 1.0}, "no soft cap"),
        ("varlen", {"window": 3, "device": "xpu"}, "torch has no flash attention for devices of type xpu"),
    ],
)
def test_what_torch_lacks_is_said(name, asked, why) -> None:
    assert why in BY_NAME[name].why_not(*_asked(**asked))


def test_what_this_torch_has_flash_kernels_for() -> None:
    assert backends._has_flash_kernel("cpu") and not backends._has_flash_kernel("xpu")


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_grouped_heads_are_named_where_torch_asks_for_it(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has no such argument, and takes them."""
    query, key = (torch.empty(1, 5, heads, 8, device="meta") for heads in (4, kv_heads))
    taken: list[dict[str, Any]] = []

    def of_2_11(query: Tensor, *_: object, scale: float | None = None, window_size: Any = None) -> Tensor:
        taken.append({})
        return query

    def of_2_13(query: Tensor, *_: object, scale: Any, window_size: Any, enable_gqa: bool = False) -> Tensor:
        taken.append({"enable_gqa": enable_gqa})
        return query

    for varlen_attn in (of_2_11, of_2_13):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
        BY_NAME["varlen"].attend(query, key, key, AttentionForm(3))
    assert taken == [{}, {"enable_gqa": kv_heads == 1}]


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_newer_kernels_are_called_alone(name: str) -> None:
    """In torch's place they would compute the other layers too, and backwards of torch's own forwards."""
    documents = _ids([[30, 1, 50], [81]])
    refused = mock.Mock(side_effect=AssertionError("torch's own attention is another's from here on"))
    with (
        installed(fake_newer_flash()),
        mock.patch.object(torch.nn.attention, "activate_flash_attention_impl", refused),
        mock.patch.object(torch.library.Library, "impl", refused),
    ):
        for window in (None, 9):
            _assert_same(name, _heads(2, 82, 82), documents, window=window)
            _assert_same(name, _heads(2, 5, 60), window=window)
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_a_window_of_all_keys_is_none() -> None:
    query = torch.empty(1, 9, 4, 8, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(backends, "backend_for", side_effect=LookupError) as asked:
        for window in (9, 8):
            with pytest.raises(LookupError):
                attend_on_device(query, query, query, AttentionForm(window, scale=1.0))
    assert [call.args[2].window for call in asked.call_args_list] == [None, 8]


def test_importing_the_operators_does_not_import_the_compiler():
    """It takes half as long to import as torch, and commands that do not train need none of it."""
    script = "import sys, megalite.train.rank; print(any(name.startswith('torch._dynamo') for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.stdout == "False\n", run.stderr
    # The mark on our function is the one that torch's decorator sets.
    assert vars(torch.compiler.assume_constant_result(lambda: None)) == vars(backends._chip)
