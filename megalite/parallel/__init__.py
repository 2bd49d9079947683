"""All code that knows ranks: the mesh, collectives, parallel layers, the pipeline; independent of the configuration."""
