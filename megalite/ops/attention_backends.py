"""Causal attention on an accelerator, by the kernels of torch and of other packages.

No backend materialises an S x S mask or synchronises with the device. Each backend says why it does not support a call;
the first backend that supports the call is used: SDPA for calls without a mask, torch's variable-length flash attention
for documents and windows, plain torch in chunks of queries for everything else. CANDIDATES are packages that the
self-test may prefer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.ops.attention_form import AttentionForm
from megalite.ops.chunked_attention import VisibleKeys, chunked_attention
from megalite.ops.documents import CuSeqlens, Documents, equal_cu_seqlens, numbered

LOW_PRECISION = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Backend:
    """One implementation. why_not(query, key, form): why the backend does not support the call; empty if it does.

    attend(query [B, S, heads, D], key, value [B, T, kv heads, D], form), T >= S: [B, S, heads, D] as
    `causal_attention` defines it. package: the Python package that the backend needs.
    """

    name: str
    why_not: Callable[[Tensor, Tensor, AttentionForm], str]
    attend: Callable[[Tensor, Tensor, Tensor, AttentionForm], Tensor]
    package: str = ""

    def why_not_on(self, device_type: str) -> str:
        """Return why a candidate supports no call on devices of this type; empty if it may support some."""
        if device_type not in ("cuda", "meta"):
            return f"{self.name} has no kernels for devices of type {device_type}"
        return "" if not self.package else _why_not_installed(self.package)


def served_on_device(documents: Documents | None, device: torch.device) -> TypeGuard[CuSeqlens | None]:
    """Return whether `attend_on_device` supports documents of this form and tensors of this device."""
    return device.type != "cpu" and (documents is None or isinstance(documents, CuSeqlens))


def attend_on_device(
    query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, *, prefer: str = ""
) -> Tensor:
    """Compute `causal_attention` without dropout. prefer: the backend to use if it supports the call."""
    if form.window is not None and form.window >= key.shape[1]:
        form = AttentionForm(None, form.documents, scale=form.scale, softcap=form.softcap)
    return backend_for(query, key, form, prefer).attend(query, key, value, form)


def backend_for(query: Tensor, key: Tensor, form: AttentionForm, prefer: str = "") -> Backend:
    """Return the preferred one of CANDIDATES if it supports the call, else the first of BACKENDS that does."""
    for backend in CANDIDATES:
        if backend.name == prefer and not (
            backend.why_not_on(query.device.type) or backend.why_not(query, key, form)
        ):
            return backend
    return next(backend for backend in BACKENDS if not backend.why_not(query, key, form))


# --------------------------------------------------------------------------------------------------- torch's SDPA


def _why_not_sdpa(query: Tensor, key: Tensor, form: AttentionForm) -> str:
    new, total = query.shape[1], key.shape[1]
    if form.softcap is not None:
        return "it has no soft cap"
    if form.documents is not None:
        return "documents take a mask of S x S"
    if form.window is not None and new > 1:
        return "a window takes a mask of S x S"
    return "more than one query behind a cache takes a mask" if 1 < new < total else ""


def _sdpa(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    if form.window is not None:
        key, value = key[:, -form.window :], value[:, -form.window :]
    grouped = query.shape[2] // key.shape[2]
    # The float32 kernels do not support enable_gqa: SDPA would fall back to materialising S x S probabilities.
    as_groups = grouped > 1 and query.dtype in LOW_PRECISION
    if grouped > 1 and not as_groups:
        key, value = (
            tensor.unsqueeze(3).expand(-1, -1, -1, grouped, -1).flatten(2, 3) for tensor in (key, value)
        )
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    causal = query.shape[2] > 1
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=form.scale, enable_gqa=as_groups
    )
    return attended.transpose(1, 2)


def _why_not_cudnn(query: Tensor, key: Tensor, form: AttentionForm) -> str:
    return (
        _why_not_sdpa(query, key, form)
        or _why_not_flash(query, "cuDNN")
        or ("" if torch.backends.cudnn.is_available() else "torch has no cuDNN here")
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    # Flash attention is the fallback for calls that cuDNN refuses.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return _sdpa(query, key, value, form)


# -------------------------------------------------------------------------- flash attention over variable lengths


def _why_not_flash(query: Tensor, name: str) -> str:
    """Return which limit shared by all flash kernels the query breaks; empty if none."""
    if query.dtype not in LOW_PRECISION:
        return f"{name} is for bfloat16 and float16, not {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] % 8 or query.shape[-1] > _LARGEST_HEAD:
        return f"{name} is for heads of a multiple of 8 up to {_LARGEST_HEAD} elements, not {query.shape[-1]}"
    if torch.version.hip:
        return f"{name} was not tried with ROCm"
    chip = _chip(query.device)
    return (
        f"{name} is for chips 8.0 and later, this one is {chip[0]}.{chip[1]}" if chip and chip[0] < 8 else ""
    )


def _chip(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA card; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


# torch.compile cannot trace a query of the driver. torch.compiler.assume_constant_result does the same, but imports the
# compiler, which takes half as long as torch.
vars(_chip)["_dynamo_marked_constant"] = True


def _has_flash_kernel(device_type: str) -> bool:
    """Return whether torch has a flash kernel for these devices; always true on "meta", which needs shapes only."""
    if device_type == "meta":
        return True
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key)


def _why_not_varlen(query: Tensor, key: Tensor, form: AttentionForm) -> str:
    if form.softcap is not None:
        return "it has no soft cap"
    if not _has_flash_kernel(query.device.type):
        return f"torch has no flash attention for devices of type {query.device.type}"
    return _why_not_flash(query, "torch's flash attention")


def _varlen(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    # Imported here: it imports torch's compiler.
    from torch.nn.attention.varlen import varlen_attn

    grouped = query.shape[2] != key.shape[2]
    groups: dict[str, Any] = {"enable_gqa": True} if grouped and _asks_for_groups() else {}
    attended = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        *sequences(query, key, form.documents),
        scale=form.scale,
        window_size=form.window_size,
        **groups,
    )
    assert isinstance(attended, Tensor)
    return attended.view_as(query)


def _asks_for_groups() -> bool:
    """Return whether this torch's varlen_attn has `enable_gqa`; torch 2.11's takes grouped heads without it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in (varlen_attn.__kwdefaults__ or {})


# As `_chip`.
vars(_asks_for_groups)["_dynamo_marked_constant"] = True


def sequences(query: Tensor, key: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor, int, int]:
    """Return cu_seqlens of queries and keys, then their max_seqlens, in the argument order of varlen kernels."""
    if documents is not None:
        assert isinstance(documents, CuSeqlens)
        keys = documents.of_keys
        return documents.cu_seqlens, keys.cu_seqlens, documents.max_seqlen, keys.max_seqlen
    (rows, new), total = query.shape[:2], key.shape[1]
    of_queries = equal_cu_seqlens(rows, new, query.device)
    of_keys = of_queries if new == total else equal_cu_seqlens(rows, total, query.device)
    return of_queries, of_keys, new, total


def _why_not_installed(package: str) -> str:
    try:
        installed = find_spec(package) is not None
    except ModuleNotFoundError:  # raised for a submodule if its parent package is absent
        installed = False
    return "" if installed else f"{package} is not installed"


def _flash_package(
    name: str,
    module: str,
    generations: tuple[int, ...] = (),
    *,
    softcap: bool = False,
    all_keys: int | None = -1,
) -> Backend:
    """Return FlashAttention (Dao, 2023; Shah et al., 2024) by a package's own function, which has its own backward.

    torch can put these kernels in place of its own, for the whole process: attention of other layers would use them
    too, and a backward those that another layer activated after its forward.
    generations: the major compute capabilities of its chips; none: all from 8. all_keys: its word for no window.
    """

    def why_not(query: Tensor, key: Tensor, form: AttentionForm) -> str:
        if form.softcap is not None and not softcap:
            return "it has no soft cap"
        if complaint := _why_not_flash(query, name):
            return complaint
        chip = _chip(query.device)
        if not chip or not generations or chip[0] in generations:
            return ""
        served = " and ".join(f"{generation}.x" for generation in generations)
        return f"{name} is for chips {served}, this one is {chip[0]}.{chip[1]}"

    def attend(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        of_queries, of_keys, longest, longest_key = sequences(query, key, form.documents)
        before, behind = form.window_size
        attended = import_module(module).flash_attn_varlen_func(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            cu_seqlens_q=of_queries,
            cu_seqlens_k=of_keys,
            max_seqlen_q=longest,
            max_seqlen_k=longest_key,
            softmax_scale=form.scale,
            causal=True,
            window_size=(all_keys if before < 0 else before, behind),
            softcap=form.softcap or 0.0,
        )
        # Some versions return the log-sum-exp too.
        output: Tensor = attended[0] if isinstance(attended, tuple) else attended
        return output.view_as(query)

    return Backend(name, why_not, attend, module)


# -------------------------------------------------------------------------------------------------- plain torch


def _chunked(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    documents = form.documents
    ids = numbered(documents.of_keys, *key.shape[:2]) if isinstance(documents, CuSeqlens) else None
    visible = VisibleKeys(form.window, document_ids=ids)
    scale = form.factor(query.shape[-1])
    return chunked_attention(query, key, value, visible, scale=scale, softcap=form.softcap)


# In order of preference. The last one supports every call.
BACKENDS = (
    Backend("sdpa", _why_not_sdpa, _sdpa),
    Backend("varlen", _why_not_varlen, _varlen),
    Backend("chunked", lambda *_: "", _chunked),
)
# Backends that may be faster on a GPU, or support calls that torch's kernels do not; used when preferred by name.
CANDIDATES = (
    _flash_package("flash_attn", "flash_attn", softcap=True),
    _flash_package("FA3", "flash_attn_interface", (9,)),
    _flash_package("FA4", "flash_attn.cute.interface", (9, 10), all_keys=None),
    Backend("cudnn", _why_not_cudnn, _cudnn),
)
