"""All code that knows ranks: the mesh, collectives, parallel layers, the pipeline; independent of the
configuration.

Code asks the mesh for a group by its role (`mesh.batch`, `mesh.loss`, `mesh.dense_gradients`, `mesh.replica`,
`mesh.tied_over(stages)`); a table in `topology/axes.py` says which axes each role spans.

- With sequence parallelism hidden states outside of attention and MLP are [B, S / tp, H]: column-parallel
  layers gather, row-parallel ones reduce-scatter, and masks know which positions a rank holds.
- A layer's gradients are summed over the copies once the gradient of its input is there, in the last backward
  of its chunk, after a split backward once its last W is done; embedding, final norm, head, and weights that
  other ranks complete first come after the last backward.
- Weights that several ranks hold (tied over stages, norms over tp) get the sum of their partial gradients first
  (`all_reduce_replicated_gradients`). After the update the first stage's tied copy overwrites the other
  (`sync_tied_weights`), since reductions round by an element's place in a buffer.
- The schedule's receives start two actions ahead; sends are freed when an answer shows that they were used. The
  last chunk computes its loss itself: logits never leave it.
"""
