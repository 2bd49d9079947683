"""An accelerator receives the host's batch, with documents in the form that attention needs without a device sync."""

from dataclasses import replace

import torch

from megalite.data.batches.transfer import BatchTransfer
from megalite.ops.documents import row_cu_seqlens
from tests.support.tiny import in_documents, tiny_batch, tiny_shape


def arrived(documents: bool) -> dict[str, torch.Tensor]:
    """The batch of a step on the device, copied back; the one sent, too, by `sent `."""
    batch = tiny_batch(tiny_shape(), 4)
    batch = in_documents(batch) if documents else batch
    moved = BatchTransfer(torch.device("standin", 0)).start(batch).ready()
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"standin"}
    sent = {f"sent {name}": tensor for name, tensor in batch.tensors.items()}
    return {name: tensor.cpu() for name, tensor in moved.tensors.items()} | sent


def longest_of_every_micro_batch() -> list[int | None]:
    """Return the number that the host has for each micro batch on the device."""
    batch = in_documents(tiny_batch(tiny_shape(), 4))
    moved = BatchTransfer(torch.device("standin", 0)).start(batch).ready()
    assert batch.max_seqlen is None
    return [each.max_seqlen for each in moved.micro_batches(2)]


def tables_of_micro_batches() -> list[tuple[str, list[list[int]]]]:
    """Return where each micro batch's block table is, and its numbers."""
    batch = replace(tiny_batch(tiny_shape(), 4), blocks=torch.arange(16).view(4, 4))
    moved = BatchTransfer(torch.device("standin", 0)).start(batch).ready()
    tables = [each.blocks for each in moved.micro_batches(2)]
    return [(table.device.type, table.tolist()) for table in tables if table is not None]


def test_the_block_table_stays_where_the_host_reads_it(devices) -> None:
    rows = torch.arange(16).view(4, 4).tolist()
    assert devices.run(tables_of_micro_batches, world_size=1) == [[("cpu", rows[:2]), ("cpu", rows[2:])]]


def test_a_batch_arrives_whole(devices) -> None:
    [held] = devices.run(arrived, documents=False)
    names = {name for name in held if not name.startswith("sent ")}
    assert names == {"input_ids", "position_ids", "labels", "loss_mask", "sample_indices"}
    assert all(torch.equal(held[name], held[f"sent {name}"]) for name in names)


def test_documents_arrive_with_their_places(devices) -> None:
    [held] = devices.run(arrived, documents=True)
    assert torch.equal(held["document_ids"], held["sent document_ids"])
    assert torch.equal(held["cu_seqlens"], row_cu_seqlens(held["sent document_ids"]))


def test_the_host_knows_the_longest_document(devices) -> None:
    """Flash attention starts a block for each tile of the longest document in every document."""
    ids = in_documents(tiny_batch(tiny_shape(), 4)).document_ids
    longest = max(int(row.bincount().max()) for row in ids)
    assert 1 < longest < ids.shape[1], "a row of one document proves nothing"
    assert devices.run(longest_of_every_micro_batch, world_size=1) == [[longest, longest]]
