"""An OpenAI-compatible server over a model (`graftwork serve`); the extra `serve`."""
