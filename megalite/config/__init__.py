"""A run as frozen models: read from TOML, flags, presets and DeepSpeed's JSON, and checked before anything starts."""
