"""The Transformer, written like single-device code: parallel layers know the ranks, these files do not.

- A `Stage` registers its rank's parameters once, by canonical names; its `Chunk`s are what a schedule runs.
  `DecoderLayer` runs one arrangement of its blocks, a function of about five lines for each `norm_placement`.
- With `data.document_mask` the loader numbers the documents of each row, and positions begin anew with each.
  Every chunk turns `document_ids`, once a micro batch, into the form that its attention kernel needs: spans,
  `cu_seqlens` or a dense mask.
- `ModelShape.window_of` alone says which layers have a sliding window, and so which rotary angles a layer
  takes. Soft caps of the logits come before the loss, which does not know them; only the chunked loss applies
  them itself.
- A prefix is concatenated in front of a layer's keys and values, behind rotation and query-key norm; positions
  of tokens begin behind it. With documents or a sliding window its attention takes a dense mask.
"""
