"""Values that follow from several settings, for the rules and for whoever uses a resolved run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from megalite.config.sections.adapter_section import described_adapter
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.shape_settings import model_shape
from megalite.topology.adapter import Prefix
from megalite.topology.axes import Layout
from megalite.topology.context import ContextChoice, choose_method
from megalite.topology.shape import ModelShape

_OFFLOADS = ("offload_optimizer", "offload_param")


def vocabulary(config: RunConfig | CheckedRun) -> int | None:
    """Return the rows of the embedding; None where a tokenizer that is not read or trained yet decides."""
    rows: int | Literal["auto"] = config.model.vocab_size
    rows = config.tokenizer.vocab_size if rows == "auto" else rows
    return None if rows == "auto" else rows


def adapted_shape(run: CheckedRun) -> ModelShape:
    """Return the model's shape with its adapter and one row of vocabulary, on which no name or stage depends."""
    return replace(model_shape(run.model, 1), adapter=described_adapter(run.adapter))


def bucket_multiple(sequence_length: int) -> int:
    """Return the number of which the lengths of data.length_buckets are multiples; the longest may be sequence_length.

    They are multiples of 8, as kernels like them, of which the search for the best lengths takes at most 256.
    """
    return 8 * -(-sequence_length // (8 * 256))


def context_choice(run: RunConfig | CheckedRun) -> ContextChoice | None:
    """Return the method that `parallel.context_method = "auto"` stands for; None with one context-parallel rank."""
    if run.parallel.context == 1:
        return None
    recomputed = run.training.recompute != "none"
    shape, layout = model_shape(run.model, 1), Layout.of(run.parallel)
    return choose_method(shape, layout, ring=may_go_round(run), recomputed=recomputed)


def may_go_round(run: RunConfig | CheckedRun) -> bool:
    """Return whether "auto" may choose the ring, which balances no documents and has no place for a prefix."""
    documents = run.data.document_mask or run.data.kind != "text"
    return not (documents or isinstance(described_adapter(run.adapter), Prefix))


def offload_devices(zero: object) -> dict[str, Any]:
    """Return the tables of `zero_optimization` that ask for offload -> their device."""
    tables = {name: zero.get(name) for name in _OFFLOADS} if isinstance(zero, Mapping) else {}
    devices = {
        name: table.get("device", "none") for name, table in tables.items() if isinstance(table, Mapping)
    }
    return {name: device for name, device in devices.items() if device != "none"}
