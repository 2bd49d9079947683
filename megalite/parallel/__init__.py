"""All that knows ranks: the mesh, collectives, parallel layers, the pipeline. Takes ints, tensors and axes only."""
