"""Adapters in PEFT's file format, both ways, and merged into the model that they adapt.

`ModelShape.adapter` makes the topology list A, B and magnitudes of LoRA, or a prefix, as further parameters,
and marks all others as frozen (`Parameter.trained`). Optimizers, gradient sums, the norm and checkpoints take
`Replica.trained`; the base comes from its Hugging Face folder at every start, and the manifest has a
fingerprint of it.

A column-parallel linear's A is whole on every rank and its B cut like the linear's rows, part by part of a
fused weight; a row-parallel linear's A is cut like its columns and its B is whole. B A x joins the linear's own
product before its one collective. An expert's A and B are cut and copied as the expert. Gradients of what
is whole are sums over the ranks that share a weight (`ShardSpec.summed`). A prefix stands in front of its
layer's keys and values; the trunk of a projected prefix is tied over all stages.

Exports, generation and `megalite.load` read base and adapter merged (`merged.py`), region by region. With
several adapters beside one model each linear has a `LoraBank` with the A and B of all, and a mask by token
hides the columns of the others.
"""
