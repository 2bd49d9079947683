"""All code that knows ranks: the mesh, collectives, parallel layers, the pipeline; independent of the
configuration.

Code asks the mesh for a group by its role: `mesh.batch` (different samples), `mesh.dense_gradients` (copies of the
same dense weights), `mesh.replica` (one copy of the model), `mesh.tied_over(stages)`; `mesh.counts_loss` says
whose losses count. Tables in `topology/axes.py` say which axes each role spans. Code asks for a share of a
parameter by the parameter, never by an axis: `mesh.slices(parameter)` (this rank's slice of each part),
`mesh.copies(parameter)` (who sums its gradient), `mesh.is_counted(parameter)` (in the norm),
`mesh.writes(parameter, turn)` (to a checkpoint). All follow from `ShardSpec.axis` (`topology/place.py`). Layers,
which compute over tensor parallelism, name `mesh.tp`.

- With sequence parallelism hidden states outside of attention and MLP are [B, S / tp, H]: column-parallel
  layers gather, row-parallel ones reduce-scatter, and masks know which positions a rank holds.
- With context parallelism each rank has blocks of every sequence (`context.py`), and only attention reaches the others
  (`context_attention.py`). The loss of a preference adds the parts of a row first.
- A layer's gradients are summed over the copies once the gradient of its input is there, in the last backward
  of its chunk, after a split backward once its last W is done; embedding, final norm, head, and weights that
  other ranks complete first come after the last backward.
- Weights that several ranks hold (tied over stages, norms over tp) get the sum of their partial gradients first
  (`all_reduce_replicated_gradients`). After the update the first stage's tied copy overwrites the other
  (`sync_tied_weights`), since reductions round by an element's place in a buffer.
- Messages between stages start in one order of all stages (`topology/transfers.py`), so that no sharing of CUDA's
  queues can hang; sends are freed when an answer shows that they were used. The last chunk computes its loss
  itself: logits never leave it.
"""
