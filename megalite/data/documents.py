"""Where documents begin within samples: data.document_mask."""

import numpy as np
from numpy.typing import NDArray

from megalite.data.packing import IGNORE_INDEX
from megalite.data.token_file import TokenFile, bin_path
from megalite.errors import DataError

_LOOKED_AT = 64


def document_ids_and_positions(
    input_ids: NDArray[np.int64], labels: NDArray[np.int64], end_of_document_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each token of the samples its document, counted within the row, and its place in there: [rows, S] each.

    A document includes the end-of-document token that closes it. A row begins at position 0, also within a document;
    the filling behind the last label belongs to the document before it, or is one of its own.
    """
    begins = np.zeros(input_ids.shape, dtype=bool)
    begins[:, 1:] = (input_ids[:, :-1] == end_of_document_id) & (labels[:, :-1] != IGNORE_INDEX)
    places = np.arange(input_ids.shape[1])
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return begins.cumsum(axis=1), places - first


def require_ends(file: TokenFile, end_of_document_id: int) -> None:
    """DataError where documents of a token file do not close with the id; looks at some of them."""
    count = file.num_documents
    for index in np.unique(np.linspace(0, max(0, count - 1), num=min(count, _LOOKED_AT), dtype=np.int64)):
        document = file.document(int(index))
        if len(document) and document[-1] != end_of_document_id:
            raise DataError(
                f"{bin_path(file.prefix)}: document {index} ends in id {document[-1]}, and the tokenizer's end of "
                f"document, which data.document_mask goes by, is {end_of_document_id}; set tokenizer.end_of_document "
                "to the token that stands there, or prepare the text again (Megatron's preprocess_data: --append-eod)"
            )
