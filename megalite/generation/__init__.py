"""Text from a checkpoint or a Hugging Face folder.

`batch_engine.py` takes requests and yields events with text; `token_engine.py` runs forwards; `slots.py` says
which tokens. A forward is [1, T]: one token of every request whose prompt is complete, then at most
`prefill_chunk` tokens of prompts; nothing is padded, only attention knows rows. Requests stand in slots 0 to n
- 1 of each layer's cache, so that a decode step reads views; when one leaves, the last one takes its slot. A
new request copies the keys of the longest beginning that any slot holds from its own adapter, except with
angles that depend on the whole prompt (dynamic, LongRoPE).

Every rank keeps the same tables. A step broadcasts rank 0's new and cancelled requests; the last stage samples
and broadcasts the tokens. With stages there is one table a stage, and as many forwards in flight. A token
depends on its request's seed and position, each row is sampled by itself: no batch and no layout changes it but
by the rounding of logits.
"""
