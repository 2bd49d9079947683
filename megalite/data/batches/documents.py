"""The documents within packed samples, for data.document_mask."""

import numpy as np
from numpy.typing import NDArray

from megalite.data.batches.packing import IGNORE_INDEX
from megalite.data.files.token_file import TokenFile, bin_path
from megalite.errors import DataError

_CHECKED_DOCUMENTS = 64


def document_ids_and_positions(
    input_ids: NDArray[np.int64], labels: NDArray[np.int64], end_of_document_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each token its document, counted from 0 in each row, and its position in it: [rows, S] int64 each.

    A document includes its end-of-document token. A row starts at position 0, even within a document. The padding after
    the last label is a document of its own.
    """
    begins, padding = np.zeros(input_ids.shape, dtype=bool), labels == IGNORE_INDEX
    begins[:, 1:] = ((input_ids[:, :-1] == end_of_document_id) | padding[:, 1:]) & ~padding[:, :-1]
    return documents_of(begins)


def documents_of(begins: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return document and position of each token, as `document_ids_and_positions`. begins: first tokens, [rows, S]."""
    begins = begins.copy()
    begins[:, 0] = False  # a row starts with document 0
    places = np.arange(begins.shape[1])
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return begins.cumsum(axis=1), places - first


def require_ends(file: TokenFile, end_of_document_id: int) -> None:
    """Raise DataError unless the documents of a token file end in the id; checks _CHECKED_DOCUMENTS of them."""
    count = file.num_documents
    for index in np.unique(
        np.linspace(0, max(0, count - 1), num=min(count, _CHECKED_DOCUMENTS), dtype=np.int64)
    ):
        document = file.document(int(index))
        if len(document) and document[-1] != end_of_document_id:
            raise DataError(
                f"{bin_path(file.prefix)}: document {index} ends in id {document[-1]}, but the end-of-document id of "
                f"the tokenizer, which data.document_mask looks for, is {end_of_document_id}; set "
                "tokenizer.end_of_document to the token that ends these documents, or prepare the text again "
                "(Megatron's preprocess_data: --append-eod)"
            )
