"""An HTTP server with OpenAI's interface over the generation engine."""
