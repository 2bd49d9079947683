"""Divides a text with too few documents between two tokens: contiguous parts in order, without overlap."""

from collections.abc import Sequence

import numpy as np

from megalite.data.files.token_file import TokenFile, TokenWriter
from megalite.data.prepare.split import Split
from megalite.errors import DataError


def part_sizes(tokens: int, split: Split, sequence_length: int, source: str) -> list[int]:
    """Return the tokens of each part, training first, which takes what is left over.

    Every other part holds as many whole sequences as its share gives, at least one. A sequence of S tokens has S + 1
    with its last label; an end-of-document id that is added at a cut is one of them. Raises DataError.
    """
    shares = [split.shares[part] for part in split.parts[1:]]
    sizes = [max(1, round(share * tokens / sequence_length)) * sequence_length for share in shares]
    # The last part ends with the end-of-document id of the text.
    sizes[-1] += 1
    first = tokens - sum(sizes)
    if first < sequence_length:
        longest = (tokens - 1) // len(split.parts)
        remedy = f", or set training.sequence_length to {longest} or less" if longest else ""
        raise DataError(
            f"data.split: {source} has {tokens:,} tokens, too few for a sequence of {sequence_length} "
            f"(training.sequence_length) in each of the {len(split.parts)} parts; name a longer text{remedy}"
        )
    return [first, *sizes]


def cut_by_tokens(
    file: TokenFile, sizes: Sequence[int], writers: Sequence[TokenWriter], end_of_document_id: int
) -> None:
    """Write consecutive parts of `file`, of these sizes in tokens, each with its documents, and each ending in one."""
    edges = np.cumsum([0, *sizes]).tolist()
    stop = 0
    for index in range(file.num_documents):
        document = file.document(index)
        start, stop = stop, stop + len(document)
        for writer, first, end in zip(writers, edges, edges[1:], strict=False):
            part = document[max(first - start, 0) : max(end - start, 0)]
            if len(part):
                writer.add(part)
                if part[-1] != end_of_document_id:
                    writer.add(np.array([end_of_document_id], dtype=part.dtype))
                writer.end_document()
