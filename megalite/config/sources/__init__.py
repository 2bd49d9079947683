"""Settings that stand elsewhere: presets, a Hugging Face config.json, the hub, PEFT's adapter_config.json."""
