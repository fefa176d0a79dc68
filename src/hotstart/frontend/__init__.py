"""The HTTP side: OpenAI's protocol, templates, tokenizer, metrics. Imports neither torch nor transformers."""
